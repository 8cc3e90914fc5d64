"""What the launches over a layout have in common: tiles that fit its blocks, and what the kernels may count on."""

from __future__ import annotations

from attnzoo.backends.block_sparse_triton.schedule import Schedule
from attnzoo.backends.triton.problem import Facts, Problem
from attnzoo.backends.triton.table import Tile
from attnzoo.inputs import AttentionInputs
from attnzoo.layout import LayoutSummary
from attnzoo.spec import AttentionSpec

SMALLEST = 16  # rows that tl.dot takes
FOUR_WARPS = 64  # rows up to which four warps are enough
SMALLER = {Tile(128, 128, 8, 3): Tile(128, 128, 8, 2)}  # at D = 128 three stages leave nothing of an H200's 227 KiB


class SparseProblem(Problem):
    """The tensors of a call with a layout, and the layout's schedule."""

    def __init__(self, spec: AttentionSpec, inputs: AttentionInputs) -> None:
        assert inputs.layout is not None
        super().__init__(spec, inputs)
        schedule = Schedule.of(inputs.layout)
        self.row_lists = (schedule.rows, schedule.rule, schedule.row_shape)
        self.column_lists = (schedule.columns, schedule.rule, schedule.column_shape)
        self.layout_types = (schedule.types,)


def layout_of(facts: Facts) -> LayoutSummary:
    assert facts.spec.layout is not None
    return facts.spec.layout


def tile_of(facts: Facts, kernel: str) -> Tile:
    """The dense kernel's tile cut to the layout's blocks, with room in shared memory for what partial blocks are tested by."""
    tile = facts.tile(kernel)
    return fitted(SMALLER.get(tile, tile), layout_of(facts))


def fitted(tile: Tile, layout: LayoutSummary) -> Tile:
    """The tile cut to the layout's blocks: a tile lies within one block."""
    block_m, block_n = _within(tile.block_m, layout.block_q), _within(tile.block_n, layout.block_kv)
    if (block_m, block_n) == (tile.block_m, tile.block_n):
        return tile
    return Tile(block_m, block_n, min(tile.warps, 4) if max(block_m, block_n) <= FOUR_WARPS else tile.warps, tile.stages)


def _within(rows: int, block: int) -> int:
    """The largest power of two that divides the block; where that is below 16, the smallest that holds it."""
    divisor = block & -block
    return min(rows, divisor if divisor >= SMALLEST else max(SMALLEST, 1 << (block - 1).bit_length()))


def tiles_of(length: int, block: int, tile: int) -> int:
    """Tiles over the blocks of a length: each block begins a new one."""
    return -(-length // block) * -(-block // tile)


def over_keys(facts: Facts, tile: Tile) -> dict[str, int | bool]:
    """The layout's constexprs of a walk over keys: a tail, or tiles that leave their block, must be tested."""
    spec, layout = facts.spec, layout_of(facts)
    is_banded = facts.band[0] is not None or facts.band[1] is not None
    free = spec.mask is None and not spec.segments and layout.block_kv % tile.block_n == 0
    edges = is_banded or spec.segments or (free and spec.kv_len % layout.block_kv != 0)
    return {"BLOCK_Q": layout.block_q, "BLOCK_KV": layout.block_kv, "EDGES": edges, "FREE": free}


def over_queries(facts: Facts) -> dict[str, int | bool]:
    """Those of a walk over queries, where rows that are none have weight 0 and need no test."""
    spec, layout = facts.spec, layout_of(facts)
    is_banded = facts.band[0] is not None or facts.band[1] is not None
    free = spec.mask is None and not spec.segments
    return {"BLOCK_Q": layout.block_q, "BLOCK_KV": layout.block_kv, "EDGES": is_banded or spec.segments, "FREE": free}
