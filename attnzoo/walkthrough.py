"""walkthrough: `tiled`'s own recurrence on a problem small enough to read, one record a tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo.backends.head_chunks import HeadChunk, head_chunks
from attnzoo.backends.naive import Naive
from attnzoo.backends.online_softmax import finish, online_softmax_step
from attnzoo.backends.tile_scores import TileBuffer, add_bias_and_mask, capped_products
from attnzoo.backends.tiles import Tile, TileSizes, query_tiles
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

__all__ = ["LENGTH", "HEAD_DIM", "SIZES", "Step", "Walk", "walk"]

LENGTH, HEAD_DIM = 8, 4
SIZES = TileSizes(rows=4, columns=4, heads=1)


@dataclass(frozen=True, eq=False)
class Step:
    """What one tile did to its rows.

    Attributes:
        queries, keys: the tile's ranges.
        scores: `(rows, columns)`, -inf where a pair may not attend.
        m: `(rows,)` running maximum after the tile.
        l: `(rows,)` running sum of `exp(score - m)`.
        rescale: `(rows,)` factor of the old sum and accumulator; None for a row's first tile.
        output: `(rows, D)` what the rows' output would be if no further key came.
    """

    queries: range
    keys: range
    scores: Tensor
    m: Tensor
    l: Tensor  # noqa: E741  the papers' letter
    rescale: Tensor | None
    output: Tensor


@dataclass(frozen=True, eq=False)
class Walk:
    """A whole forward pass of one head.

    Attributes:
        steps: one a tile, in the order in which they ran.
        skipped: tiles that no query can see, and that were never computed.
        output: `(LENGTH, HEAD_DIM)` by tiles.
        standard: the same by standard attention, which holds all scores at once.
    """

    steps: tuple[Step, ...]
    skipped: int
    output: Tensor
    standard: Tensor

    @property
    def difference(self) -> float:
        """The largest one between the two outputs."""
        return float((self.output - self.standard).abs().max())


def walk(*, causal: bool = False, seed: int = 2) -> Walk:
    """Run 8 tokens of 4 channels through tiles of 4 x 4, in float32."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 1, LENGTH, HEAD_DIM, generator=generator)
    spec = AttentionSpec.of(q, k, v, causal=causal)
    inputs = AttentionInputs.of(spec, q, k, v)
    (chunk,) = head_chunks(spec, inputs, SIZES.heads)
    steps: list[Step] = []
    for rows, tiles in query_tiles(spec, inputs, SIZES, chunk.layout_head):
        steps += _steps(chunk, rows, tiles)
    last = {step.queries: step.output for step in steps}
    standard, _ = Naive().attend(spec, inputs)
    tiles_in_all = (LENGTH // SIZES.rows) * (LENGTH // SIZES.columns)
    return Walk(tuple(steps), tiles_in_all - len(steps), torch.cat(list(last.values())), standard[0, 0])


def _steps(chunk: HeadChunk, rows: slice, tiles: list[Tile]) -> Iterator[Step]:
    """The inner loop of `tiled`'s forward, with a look at the state after each tile."""
    q, k, v = chunk.fold(chunk.inputs.q, rows), chunk.keys(chunk.inputs.k), chunk.keys(chunk.inputs.v)
    state = None
    for tile in tiles:
        scores = capped_products(chunk, q, tile.keys_of(k), TileBuffer())
        add_bias_and_mask(chunk, tile, scores)
        seen = scores[0].clone()  # the step overwrites them
        state, rescale = online_softmax_step(state, scores, tile.keys_of(v))
        output, _ = finish(state)
        keys = tile.runs[0]
        yield Step(
            range(rows.start, rows.stop),
            range(keys.start, keys.stop),
            seen,
            state.m[0, :, 0],
            state.l[0, :, 0],
            None if rescale is None else rescale[0, :, 0],
            output[0],
        )
