"""The reader of machine code finds what ptxas forgot to set, and nothing where all is set."""

from __future__ import annotations

from sass import unset_uniform_registers

SET = """
        /*0010*/                   ULDC.64 UR4, c[0x0][0x208] ;     /* 0x0 */
        /*0020*/                   UIMAD.WIDE.U32 UR6, UR4, UR5, URZ ;
        /*0030*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0040*/                   UIADD3 UR16, UP0, UR6, 0x40, URZ ;
        /*0050*/                   UIADD3.X UR17, UR7, -0x7fffffe0, URZ, UP0, !UPT ;
        /*0060*/                   UIADD3.64 UR18, UR16, 0x40, URZ ;
        /*0070*/                   HGMMA.64x64x16.F32 R24, gdesc[UR16], RZ, !UPT ;
        /*0080*/                   R2UR UR10, R4 ;
        /*0090*/                   UMOV UR11, 0x80000020 ;
        /*00a0*/                   HGMMA.64x32x16.F32 R56, R24, gdesc[UR8].tnspB, R56, gsb0 ;
"""


def test_all_set() -> None:
    assert unset_uniform_registers(SET) == []


def test_a_register_that_nothing_set() -> None:
    """As in flash's forward at head dims 33 and 17: the copy into UR16 is missing."""
    found = unset_uniform_registers("        /*29a0*/   UIADD3 UR16, UP0, UR16, 0x40, URZ ;  /* 0x0 */\n")
    assert len(found) == 1, found
    assert found[0].startswith("29a0: UIADD3")
    assert found[0].endswith("reads UR16")


def test_half_a_descriptor() -> None:
    without_upper_word = SET.replace("UMOV UR11, 0x80000020", "NOP")
    assert [line.partition(":")[0] for line in unset_uniform_registers(without_upper_word)] == ["00a0"]
