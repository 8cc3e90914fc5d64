"""The scores of one tile, in place in one buffer: products, soft cap, bias, masks; and its dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.backends.head_chunks import HeadChunk
from attnzoo.backends.tiles import Tile
from attnzoo.dropout import dropout_keep
from attnzoo.layouts.build import partial_blocks
from attnzoo.masks import keep_mask, tile_of

LARGEST_ALPHA = 2.0**32
"""A factor beyond this is not left to a matrix product, which may bring it to an operand first and overflow."""


class TileBuffer:
    """One allocation that every tile of a pass is written to."""

    def __init__(self) -> None:
        self._flat: Tensor | None = None

    def product(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """`scale * a @ b`, batched, in the buffer."""
        if abs(scale) > LARGEST_ALPHA:
            return self.product(a, b, 1.0).mul_(scale)
        shape = (a.shape[0], a.shape[1], b.shape[2])
        size = shape[0] * shape[1] * shape[2]
        if self._flat is None or self._flat.numel() < size:
            self._flat = a.new_empty(size)
        out = self._flat[:size].view(shape)
        return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def capped_products(chunk: HeadChunk, q: Tensor, keys: Tensor, buffer: TileBuffer) -> Tensor:
    """`(n, group * rows, columns)`: scaled products of queries and keys, soft-capped."""
    scores = buffer.product(q, keys.mT, chunk.spec.scale)
    cap = chunk.spec.softcap
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def add_bias_and_mask(chunk: HeadChunk, tile: Tile, scores: Tensor) -> None:
    """Add the bias, and -inf where a pair may not attend; tiles whose pairs all attend are left alone."""
    by_head = chunk.unfold(scores)
    if chunk.inputs.bias is not None:
        by_head.add_(tile_of(chunk.inputs.bias, tile.rows, tile.columns).to(scores.dtype))
    kept = kept_pairs(chunk, tile)
    if kept is not None:
        # 1 - 1/x is 0 at 1 and -inf at 0; on CPU many times faster than masked_fill or where
        by_head.add_(kept.to(scores.dtype).reciprocal_().neg_().add_(1.0))


def kept_pairs(chunk: HeadChunk, tile: Tile) -> Tensor | None:
    """Bool, broadcastable to `(b, h, rows, columns)`: which pairs attend; None where all do."""
    spec = chunk.spec if tile.crosses_band else chunk.bandless
    inputs = chunk.inputs if tile.crosses_segments else chunk.unsegmented()
    kept = keep_mask(spec, inputs, tile.rows, tile.columns)
    if tile.partial is None:
        return kept
    assert chunk.inputs.layout is not None
    blocks = partial_blocks(chunk.inputs.layout, tile.partial.which, tile.partial.rows, tile.partial.columns)
    width = sum([run.stop - run.start for run in tile.runs])  # less than the blocks', where the last is cut
    by_layout = blocks.transpose(0, 1).flatten(1)[:, :width]
    return by_layout if kept is None else kept & by_layout


def dropout_kept(chunk: HeadChunk, tile: Tile) -> Tensor | None:
    """`(n, group * rows, columns)`: 1 where dropout keeps an element, else 0; None without dropout."""
    spec, seed = chunk.spec, chunk.inputs.dropout_seed
    if not spec.dropout_p or seed is None:
        return None
    batch, heads, rows = _range(chunk.batch), _range(chunk.q_heads), _range(tile.rows)
    runs = [dropout_keep(seed, spec.dropout_p, batch, heads, rows, _range(run)) for run in tile.runs]
    kept = runs[0] if len(runs) == 1 else torch.cat(runs, -1)
    return kept.to(spec.accumulator_dtype).view(chunk.n, -1, kept.shape[-1])


def _range(of: slice) -> range:
    return range(of.start, of.stop)
