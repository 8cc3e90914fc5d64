"""The Hopper kernels compiled for sm_90a without a GPU: spills, serialised products, shared memory, instruction counts."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compiled import compile_all, needs_triton
from hopper_aot import PROCESSES, VARIANTS, spec_of

from attnzoo.backends.hopper import support
from attnzoo.backends.hopper.tiles import (
    BackwardTile,
    ForwardTile,
    backward_tile,
    forward_tile,
    forward_tile_of,
    head_dim_pieces,
    padded_head_dim,
)

SCRIPT = Path(__file__).with_name("hopper_aot.py")
PAGE = Path(__file__).parents[1] / "docs" / "hopper.md"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "h200"
SHARED_BYTES = 228 * 1024  # of a multiprocessor, of which each CTA takes 1 KB for itself


# Bytes that may spill, written and read. Most lies outside of the loops or in the branch that masks a cut block; in the loop of
# full blocks backward-64-causal reads back one register a step.
SPILLS = {
    "forward-64-shifted": 248,
    "forward-96-shifted": 16,
    "forward-96-widewindow": 16,
    "forward-192-window": 52,
    "forward-192-ragged": 16,
    "forward-192-shortshifted": 56,
    "forward-256-window": 48,
    "forward-256-shifted": 40,
    "backward-64-causal": 88,
    "backward-64-window": 108,
    "backward-128-causal": 8,
    "backward-128-half": 8,
    "backward-128-window": 132,
}
# Under 3.7.1 or 3.8.0, whichever is more; the kernels are served under 3.6 alone.
LATER_SPILLS = {
    "forward-64-causal": 92,
    "forward-64-ragged": 116,
    "forward-64-window": 40,
    "forward-64-widewindow": 40,
    "forward-96-shifted": 24,
    "forward-96-widewindow": 48,
    "forward-192-window": 84,
    "forward-256-window": 84,
    "backward-64-window": 120,
    "backward-128-causal": 32,
    "backward-128-half": 32,
}


def boxes(head_dim: int) -> int:
    """TMA copies of a tile's rows: 128 bytes each, of one piece of the head dim."""
    return sum(-(-columns // 64) for columns in head_dim_pieces(head_dim))


def forward_counts(head_dim: int, variant: str) -> dict[str, int]:
    """The instructions that the schedule asks for."""
    tile = forward_tile_of(spec_of(head_dim, **VARIANTS[variant]))
    loops = 3 if variant.endswith("window") else 2 if variant.endswith("shifted") else 1  # of full blocks; cut ones; those cut at the left
    if VARIANTS[variant].get("causal") and tile.rows_together > tile.block_kv:
        loops = 2  # the diagonal cuts more than one block
    scores = head_dim // 16 * (loops + 2)  # in a loop, for the first block, for the next tile's first
    products = tile.block_kv // 16 * (loops + 1)  # in a loop, for the last block
    value_dim = VARIANTS[variant].get("value_dim", head_dim)
    pieces = 2 if head_dim_pieces(value_dim)[1] else 1
    places = tile.q_slots  # where K and V are loaded: with two Q buffers the last block, behind which the next tile is claimed, is peeled
    return {
        "HGMMA": tile.consumers * (scores + products * pieces),
        "UTMALDG": tile.consumers * boxes(head_dim) + places * (boxes(head_dim) + boxes(value_dim)),
        "UTMASTG": tile.consumers * pieces,
        "ATOMG": 1,
    }


def backward_counts(head_dim: int, variant: str) -> dict[str, int]:
    tile = backward_tile(head_dim)
    scores = 2 * head_dim // 16  # S and dP
    keys = 2 * tile.block_q // 16  # dV and dK
    rows, columns = tile.dq_block(head_dim)
    queries = tile.block_kv // 16 * (rows // 64)  # dQ, 64 rows an instruction
    sums = 2 * columns * 4 // 128  # copies of the halves of dQ: TMA takes 128 bytes of a row at a time
    loads = 2 * boxes(head_dim) + 3 * (2 * boxes(head_dim) + 2)  # K and V; Q, dO, lse and delta, whose loop is unrolled into three
    return {"HGMMA": 2 * (scores + keys + queries), "UTMALDG": loads, "UTMAREDG": sums, "UTMASTG": sums + 4, "RED": 0, "ATOMG": 1}


def problems_of(name: str, facts: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel."""
    kernel, head_dim, variant = name.split("-")
    found = []
    if facts["serialised"]:
        found.append(f"ptxas serialises wgmma: {facts['serialised']}")
    allowed = SPILLS.get(name, 0)
    if not facts["triton"].startswith(support.TRITONS):
        allowed = max(allowed, LATER_SPILLS.get(name, 0))
    if facts["spilled_bytes"] > allowed:
        found.append(f"{facts['spilled_bytes']} bytes spill, {allowed} allowed")
    ctas = forward_tile_of(spec_of(int(head_dim), **VARIANTS[variant])).ctas if kernel == "forward" else 1
    most = SHARED_BYTES // ctas - 1024
    if facts["shared_bytes"] > most:
        found.append(f"{facts['shared_bytes']} bytes of shared memory, {most} at most")
    found += [f"ptxas forgot to set what it reads: {line}" for line in facts["unset"]]
    counts = facts["counts"]
    wanted = {"forward": forward_counts, "backward": backward_counts}.get(kernel, lambda *_: {})(int(head_dim), variant)
    found += [f"{counts[name]} {name}, expected {count}" for name, count in wanted.items() if counts[name] != count]
    if kernel in ("pre", "post") and not counts["LDG.E.128"]:
        found.append("its loads are narrower than 16 bytes")
    return found


@pytest.mark.kernels
@needs_triton
@pytest.mark.parametrize("names", PROCESSES, ids=[names[0] for names in PROCESSES])
def test_kernels_compile_tight(names: tuple[str, ...]) -> None:
    facts = compile_all(SCRIPT, names)
    problems = [f"{name}: {problem}" for name in names for problem in problems_of(name, facts[name])]
    assert not problems, "\n".join(problems)


def test_problems_are_seen() -> None:
    counts = forward_counts(128, "dense") | {"HGMMA": 79, "UTMALDG": 11}
    facts = {"triton": "3.6.0", "serialised": ["C7511"], "spilled_bytes": 8, "shared_bytes": 232449, "counts": counts, "unset": ["UR16"]}
    assert len(problems_of("forward-128-dense", facts)) == 6, f"six things are wrong, found {problems_of('forward-128-dense', facts)}"


def test_ctas_of_a_multiprocessor_share_its_memory() -> None:
    facts = {"triton": "3.6.0", "serialised": [], "spilled_bytes": 0, "counts": forward_counts(64, "window"), "unset": []}
    assert not problems_of("forward-64-window", {**facts, "shared_bytes": 76800})
    assert problems_of("forward-64-window", {**facts, "shared_bytes": 76801}) == ["76801 bytes of shared memory, 76800 at most"]


def test_counts_follow_a_changed_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every causal kernel: with 64 keys a block the diagonal cuts two, which takes a second loop."""
    monkeypatch.setitem(globals(), "forward_tile_of", lambda _: ForwardTile(64, 2, 4, 4))
    assert forward_counts(128, "half") == forward_counts(128, "causal")
    assert forward_counts(128, "causal")["HGMMA"] > forward_counts(128, "dense")["HGMMA"]


def test_the_page_compiles_what_it_says() -> None:
    """docs/hopper.md tells a newcomer what to run after a change of a tile: it must not leave out what compiles."""
    (command,) = re.findall(r"^    pytest (.*test_hopper_aot.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [sys.executable, "-m", "pytest", *command.split(), "--collect-only", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(listed, cwd=PAGE.parents[1], capture_output=True, text=True, check=True).stdout
    for test in ("test_hopper_aot.py::test_kernels_compile_tight[forward-128-dense]", "test_hopper_sparse.py::test_kernels_compile_tight"):
        assert test in found, f"pytest {command} does not select {test}"


@pytest.mark.parametrize(
    ("tile", "change", "reason"),
    [
        (forward_tile(128, is_masked=True), dict(consumers=4), "consumers is 4, it takes 1 to 3"),
        (forward_tile(128, is_masked=True), dict(consumers=3), "ping_pong is for 2 consumers that compute the same blocks"),
        (forward_tile(128, is_masked=True), dict(own_blocks=True), "ping_pong is for 2 consumers that compute the same blocks"),
        (forward_tile(128, is_masked=True), dict(stages=5), "stages is 5, it takes 1 to 4"),
        (forward_tile(128, is_masked=True), dict(v_stages=5), "v_stages is 5, it takes 1 to 4"),
        (forward_tile(128, is_masked=True), dict(stages=0), "stages is 0, it takes 1 to 4"),
        (forward_tile(128, is_masked=True), dict(q_slots=3), "q_slots is 3, it takes 1 or 2"),
        (forward_tile(128, is_masked=True), dict(ctas=0), "ctas is 0, it takes 1 to 3"),
        (forward_tile(128, is_masked=True), dict(block_kv=96), "block_kv is 96, it takes 64, 128 or 256"),
        (forward_tile(128, is_masked=True), dict(ctas=2), "its warpgroups take 64512 registers, a CTA has 30720"),
        (forward_tile(64, is_masked=True, keys=512), dict(consumer_registers=64), "is 64, one consumer of 3 CTAs gets 136"),
        (forward_tile(64, is_masked=True, keys=512), dict(consumer_registers=144), "its warpgroups take 21504 registers, a CTA has 20480"),
        (forward_tile(64, is_masked=False, keys=8192), dict(consumer_registers=240), "95232 registers, a CTA has 65536"),
        (forward_tile(128, is_masked=True), dict(consumer_registers=225), "registers are 225 and 24, it takes multiples of 8"),
        (backward_tile(64), dict(stages=3), "stages is 3, it takes 1 or 2"),
        (backward_tile(64), dict(block_q=256), "block_q is 256, it takes 64 or 128"),
        (backward_tile(64), dict(block_q=32), "block_q is 32, it takes 64 or 128"),
        (backward_tile(64), dict(block_kv=64), "block_kv is 64, it takes 128"),
        (backward_tile(64), dict(consumer_registers=248), "66560 registers, a CTA has 65536"),
    ],
)
def test_a_tile_that_would_hang_or_not_launch_is_refused(tile: ForwardTile | BackwardTile, change: dict[str, Any], reason: str) -> None:
    """It compiles: a named barrier that is another's too, or one that never fills, shows on a card alone."""
    with pytest.raises(ValueError, match=re.escape(reason)):
        dataclasses.replace(tile, **change)


@pytest.mark.parametrize(("head_dim", "padded"), [(8, 64), (64, 64), (72, 128), (96, 128), (128, 128), (136, 256), (256, 256)])
def test_head_dims_are_padded_to_a_power_of_two(head_dim: int, padded: int) -> None:
    assert padded_head_dim(head_dim) == padded, f"head_dim {head_dim} gives tiles of {padded_head_dim(head_dim)} columns, expected {padded}"
