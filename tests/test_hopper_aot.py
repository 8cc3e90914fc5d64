"""The Hopper kernels compiled for sm_90a without a GPU: spills, serialised products, shared memory, instruction counts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compiled import compile_all, needs_triton
from hopper_aot import VARIANTS

from attnzoo.backends.hopper.support import TRITONS
from attnzoo.backends.hopper.tiles import ForwardTile, backward_tile, forward_tile, head_dim_pieces, padded_head_dim

SCRIPT = Path(__file__).with_name("hopper_aot.py")
PAGE = Path(__file__).parents[1] / "docs" / "hopper.md"
REGISTERS = 65536
SHARED_BYTES = 227 * 1024


# One process a line. Not every variant at every head dim: those left out differ from a neighbour by a number alone.
PROCESSES = (
    (
        "forward-64-dense",
        "forward-64-causal",
        "forward-64-window",
        "forward-64-shortcausal",
        "forward-64-middlecausal",
        "forward-64-shifted",
    ),
    ("forward-128-dense", "forward-128-causal", "forward-128-shifted", "forward-128-window", "forward-128-half", "forward-128-shortcausal"),
    ("forward-96-dense", "forward-96-causal", "forward-96-window", "forward-64-widewindow", "forward-128-widewindow"),
    ("forward-192-dense", "forward-192-causal", "forward-192-window", "forward-192-values", "forward-192-shortcausal"),
    ("forward-256-dense", "forward-256-causal", "forward-256-window"),
    ("backward-64-dense", "backward-64-causal", "backward-64-window", "pre-64-dense", "post-64-dense"),
    ("backward-128-dense", "backward-128-causal", "backward-128-window", "backward-128-half", "pre-128-dense", "post-128-dense"),
)

# Bytes that may spill, written and read; all outside of the loops, or in the branch that masks a cut block.
SPILLS = {
    "forward-64-shortcausal": 128,
    "forward-64-window": 400,
    "forward-64-shifted": 256,
    "forward-128-widewindow": 16,
    "forward-192-window": 96,
    "forward-256-window": 64,
    "backward-64-causal": 152,
    "backward-64-window": 212,
    "backward-128-causal": 32,
    "backward-128-half": 32,
    "backward-128-window": 140,
}
# Two CTAs a multiprocessor leave so few registers that ptxas waits for each product at once; measured faster all the same.
SERIALISED = ("forward-64-shortcausal", "forward-64-window")
# What other versions of Triton add; the kernels are served under 3.6 alone.
LATER_SPILLS = {"forward-64-shortcausal": 192, "backward-128-window": 160}


def tile_of(head_dim: int, variant: str) -> ForwardTile:
    return forward_tile(
        head_dim,
        is_masked=variant not in ("dense", "ragged", "values"),
        keys={"window": 129, "widewindow": 1025}.get(variant, VARIANTS[variant].get("length", 8192)),
        has_left=variant.endswith("window"),
    )


def forward_counts(head_dim: int, variant: str) -> dict[str, int]:
    """The instructions that the schedule asks for."""
    tile = tile_of(head_dim, variant)
    loops = {"shifted": 2, "window": 3, "widewindow": 3}.get(variant, 1)  # of full blocks; of further cut ones; of those cut at the left
    if VARIANTS[variant].get("causal") and tile.rows_together > tile.block_kv:
        loops = 2  # the diagonal cuts more than one block
    scores = head_dim // 16 * (loops + 2)  # in a loop, for the first block, for the next tile's first
    products = tile.block_kv // 16 * (loops + 1)  # in a loop, for the last block
    pieces = 2 if head_dim_pieces(VARIANTS[variant].get("value_dim", head_dim))[1] else 1
    return {
        "HGMMA": tile.consumers * (scores + products * pieces),
        "UTMASTG": tile.consumers * pieces,
        "ATOMG": 1,
    }


def backward_counts(head_dim: int, variant: str) -> dict[str, int]:
    tile = backward_tile(head_dim)
    scores = 2 * head_dim // 16  # S and dP
    keys = 2 * tile.block_q // 16  # dV and dK
    rows, columns = tile.dq_block(head_dim)
    queries = tile.block_kv // 16 * (rows // 64)  # dQ, 64 rows an instruction
    boxes = columns * 4 // 128  # of a warpgroup's half of dQ: TMA takes 128 bytes of a row at a time
    return {"HGMMA": 2 * (scores + keys + queries), "UTMAREDG": 2 * boxes, "UTMASTG": 2 * boxes + 4, "RED": 0, "ATOMG": 1}


def problems_of(name: str, facts: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel."""
    kernel, head_dim, variant = name.split("-")
    found = []
    if facts["serialised"] and name not in SERIALISED:
        found.append(f"ptxas serialises wgmma: {facts['serialised']}")
    allowed = SPILLS.get(name, 0)
    if not facts["triton"].startswith(TRITONS):
        allowed = max(allowed, LATER_SPILLS.get(name, 0))
    if facts["spilled_bytes"] > allowed:
        found.append(f"{facts['spilled_bytes']} bytes spill, {allowed} allowed")
    if facts["shared_bytes"] > SHARED_BYTES:
        found.append(f"{facts['shared_bytes']} bytes of shared memory, {SHARED_BYTES} at most")
    found += [f"ptxas forgot to set what it reads: {line}" for line in facts["unset"]]
    counts = facts["counts"]
    wanted = {"forward": forward_counts, "backward": backward_counts}.get(kernel, lambda *_: {})(int(head_dim), variant)
    found += [f"{counts[name]} {name}, expected {count}" for name, count in wanted.items() if counts[name] != count]
    if kernel in ("pre", "post") and not counts["LDG.E.128"]:
        found.append("its loads are narrower than 16 bytes")
    if kernel in ("forward", "backward") and counts["UTMALDG"] < 4:
        found.append(f"{counts['UTMALDG']} UTMALDG: q, k and v do not all come by TMA")
    return found


@pytest.mark.kernels
@needs_triton
@pytest.mark.parametrize("names", PROCESSES, ids=[names[0].rpartition("-")[0] for names in PROCESSES])
def test_kernels_compile_tight(names: tuple[str, ...]) -> None:
    facts = compile_all(SCRIPT, names)
    problems = [f"{name}: {problem}" for name in names for problem in problems_of(name, facts[name])]
    assert not problems, "\n".join(problems)


def test_problems_are_seen() -> None:
    counts = forward_counts(128, "dense") | {"HGMMA": 79, "UTMALDG": 8}
    facts = {"triton": "3.6.0", "serialised": ["C7511"], "spilled_bytes": 8, "shared_bytes": 232449, "counts": counts, "unset": ["UR16"]}
    assert len(problems_of("forward-128-dense", facts)) == 5, f"five things are wrong, found {problems_of('forward-128-dense', facts)}"


def test_counts_follow_a_changed_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every causal kernel: with 64 keys a block the diagonal cuts two, which takes a second loop."""
    monkeypatch.setitem(globals(), "forward_tile", lambda *_, **__: ForwardTile(64, 2, 4, 4))
    assert forward_counts(128, "half") == forward_counts(128, "causal")
    assert forward_counts(128, "causal")["HGMMA"] > forward_counts(128, "dense")["HGMMA"]


def test_the_page_compiles_what_it_says() -> None:
    """docs/hopper.md tells a newcomer what to run after a change of a tile: it must not leave out what compiles."""
    (command,) = re.findall(r"^    pytest (.*test_hopper_aot.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [sys.executable, "-m", "pytest", *command.split(), "--collect-only", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(listed, cwd=PAGE.parents[1], capture_output=True, text=True, check=True).stdout
    for test in ("test_hopper_aot.py::test_kernels_compile_tight[forward-128]", "test_hopper_sparse.py::test_kernels_compile_tight"):
        assert test in found, f"pytest {command} does not select {test}"


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("keys", [512, 2048, 8192])
def test_registers_fit_the_multiprocessor(head_dim: int, is_masked: bool, keys: int) -> None:
    tile = forward_tile(head_dim, is_masked=is_masked, keys=keys)
    used = tile.ctas * 128 * (tile.consumers * tile.consumer_registers + tile.producer_registers)
    assert used <= REGISTERS, f"{tile} uses {used} registers of {REGISTERS}"
    assert tile.consumer_registers % 8 == tile.producer_registers % 8 == 0, f"{tile}: setmaxnreg takes multiples of 8"


@pytest.mark.parametrize(("head_dim", "padded"), [(8, 64), (64, 64), (72, 128), (96, 128), (128, 128), (136, 256), (256, 256)])
def test_head_dims_are_padded_to_a_power_of_two(head_dim: int, padded: int) -> None:
    assert padded_head_dim(head_dim) == padded, f"head_dim {head_dim} gives tiles of {padded_head_dim(head_dim)} columns, expected {padded}"
