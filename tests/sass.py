"""Reads NVIDIA machine code, as cuobjdump prints it, for what ptxas must not do."""

from __future__ import annotations

import re

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.M)
WRITERS = ("U", "R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX")
"""How the instructions begin whose first operand, if it is a uniform register, is written."""


def unset_uniform_registers(sass: str) -> list[str]:
    """Instructions that read a uniform register which none before them wrote, in the order of the code.

    ptxas 12.8 does that to wgmma descriptors: two that share an address but not a swizzle get one copy of it too few.
    """
    written: set[int] = set()
    found = []
    for address, operation, operands in INSTRUCTION.findall(sass):
        target, read = _registers(operation, [part.strip() for part in operands.split(",")])
        unset = read - written
        if unset:
            found.append(f"{address}: {operation} {operands} reads {', '.join(f'UR{number}' for number in sorted(unset))}")
        written |= target | unset
    return found


def _registers(operation: str, operands: list[str]) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction writes and reads."""
    is_writer = operation.startswith(WRITERS)
    is_wide = is_writer and (".64" in operation or "WIDE" in operation)
    target: set[int] = set()
    read: set[int] = set()
    for operand in operands:
        numbers = [int(number) for number in re.findall(r"\bUR(\d+)\b", operand)]
        if is_writer and not target and not read and re.fullmatch(r"UR\d+", operand):
            target.update(range(numbers[0], numbers[0] + 1 + is_wide))
            continue
        for number in numbers:
            read.update(_span(operation, operand, operands, number, is_wide))
    return target, read


def _span(operation: str, operand: str, operands: list[str], first: int, is_wide: bool) -> range:
    if "gdesc[" in operand:  # descriptors of A and B; of B alone where A is in registers
        has_registers = len(operands) > 1 and operand != operands[1]
        return range(first + 2 * has_registers, first + 4)
    is_pair = "desc[" in operand or (is_wide and ".64" in operation)  # the factors of a WIDE product are single
    return range(first, first + 1 + is_pair)
