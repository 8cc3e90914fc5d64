"""tiled: FlashAttention's online softmax in plain PyTorch, tile by tile. O(N) extra memory; the default without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo.backend import FEATURES, Capabilities
from attnzoo.backends.head_chunks import HeadChunk, head_chunks
from attnzoo.backends.online_softmax import SoftmaxState, exp_, finish, finite_pivot, online_softmax_step, positive_sum, sink_state
from attnzoo.backends.recompute import Gradients, RecomputingBackend, empty_output
from attnzoo.backends.tile_scores import TileBuffer, add_bias_and_mask, capped_products, dropout_kept
from attnzoo.backends.tiles import Tile, TileSizes, choose_sizes, query_tiles
from attnzoo.inputs import AttentionInputs
from attnzoo.masks import tile_of
from attnzoo.spec import DTYPES, AttentionSpec

__all__ = ["Tiled"]

Saved = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""o, lse, grad_o and grad_lse of a chunk, `(b, h, Sq, ...)`."""


class Tiled(RecomputingBackend):
    """Queries in the outer loop, keys in the inner, several heads side by side; the backward rebuilds P from the lse.

    Args:
        sizes: of the tiles; by default they are chosen for the problem and the device.
    """

    name = "tiled"
    capabilities = Capabilities(
        dtypes=frozenset(DTYPES),
        head_dims=(1, 2**31),
        forward=frozenset(FEATURES),
        backward=frozenset(FEATURES),
    )

    def __init__(self, sizes: TileSizes | None = None) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        sizes = self.sizes or choose_sizes(spec)
        o = empty_output(spec, inputs.q)
        lse = o.new_empty(o.shape[:3], dtype=spec.accumulator_dtype)
        buffer = TileBuffer()
        for chunk in head_chunks(spec, inputs, sizes.heads):
            forward_chunk(chunk, sizes, buffer, chunk.of_queries(o), chunk.of_queries(lse))
        return o, lse

    def backward(
        self,
        spec: AttentionSpec,
        inputs: AttentionInputs,
        o: Tensor,
        lse: Tensor,
        grad_o: Tensor,
        grad_lse: Tensor | None,
    ) -> Gradients:
        sizes = self.sizes or choose_sizes(spec)
        totals = zero_gradients(spec, inputs)
        buffers = TileBuffer(), TileBuffer()
        for chunk in head_chunks(spec, inputs, sizes.heads):
            of = chunk.of_queries
            saved = (of(o), of(lse), of(grad_o), None if grad_lse is None else of(grad_lse))
            backward_chunk(chunk, sizes, buffers, saved, totals)
        return in_input_dtypes(totals, inputs)


def forward_chunk(chunk: HeadChunk, sizes: TileSizes, buffer: TileBuffer, o: Tensor, lse: Tensor) -> None:
    """Write the chunk's `o` and `lse`."""
    spec, inputs = chunk.spec, chunk.inputs
    k, v = chunk.keys(inputs.k), chunk.keys(inputs.v)
    for rows, tiles in query_tiles(spec, inputs, sizes, chunk.layout_head):
        q = chunk.fold(inputs.q, rows)
        state = start_of_rows(chunk, rows, value_dim=spec.value_dim)
        for tile in tiles:
            scores = capped_products(chunk, q, tile.keys_of(k), buffer)
            add_bias_and_mask(chunk, tile, scores)
            state, _ = online_softmax_step(state, scores, tile.keys_of(v), dropout_kept(chunk, tile))
        if state is None:
            o[:, :, rows], lse[:, :, rows] = 0.0, -torch.inf
            continue
        output, row_lse = finish(state)
        if spec.dropout_p:
            output.div_(1.0 - spec.dropout_p)
        o[:, :, rows] = chunk.unfold(output)
        lse[:, :, rows] = chunk.unfold(row_lse)[..., 0]


def start_of_rows(chunk: HeadChunk, rows: slice, *, value_dim: int) -> SoftmaxState | None:
    """The state before the first tile."""
    return None if chunk.inputs.sinks is None else sink_state(sinks_of_rows(chunk, rows), value_dim)


def sinks_of_rows(chunk: HeadChunk, rows: slice) -> Tensor:
    """The sink of every row of a tile: `(n, group * rows, 1)`."""
    assert chunk.inputs.sinks is not None
    batch, heads = chunk.batch.stop - chunk.batch.start, len(chunk.inputs.sinks)
    spread = chunk.inputs.sinks[None, :, None].expand(batch, heads, rows.stop - rows.start)
    return spread.reshape(chunk.n, -1, 1).to(chunk.spec.accumulator_dtype)


@dataclass(frozen=True, eq=False, slots=True)
class BackwardRows:
    """What a tile's backward needs of its rows, each `(n, group * rows, ...)`.

    Attributes:
        q, grad_o: of the call.
        pivot, total: `P = exp(S - pivot) / total`: the lse and None, or a maximum and its sum.
        delta: `rowsum(dO * O) - dLSE`: what dS subtracts from dP.
        grad_q: filled tile by tile.
    """

    q: Tensor
    grad_o: Tensor
    pivot: Tensor
    total: Tensor | None
    delta: Tensor
    grad_q: Tensor

    @classmethod
    def of(cls, chunk: HeadChunk, rows: slice, q: Tensor, saved: Saved, state: SoftmaxState | None) -> BackwardRows:
        o, lse, grad_o, grad_lse = saved
        grad, row_lse = chunk.fold(grad_o, rows), chunk.fold(lse[..., None], rows)
        delta = (grad * chunk.fold(o, rows)).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - chunk.fold(grad_lse[..., None], rows)
        is_empty = row_lse == -torch.inf
        delta.masked_fill_(is_empty, 0.0)
        if state is not None:
            return cls(q, grad, finite_pivot(state.m), positive_sum(state.l), delta, torch.zeros_like(q))
        return cls(q, grad, row_lse.masked_fill(is_empty, torch.inf), None, delta, torch.zeros_like(q))

    def probabilities_(self, scores: Tensor) -> Tensor:
        """P in place of scores; 0 in a row with no key."""
        p = exp_(scores.sub_(self.pivot))
        return p if self.total is None else p.div_(self.total)


def backward_chunk(chunk: HeadChunk, sizes: TileSizes, buffers: tuple[TileBuffer, TileBuffer], saved: Saved, totals: Gradients) -> None:
    """Add the chunk's gradients to the totals."""
    spec, inputs = chunk.spec, chunk.inputs
    k, v = chunk.keys(inputs.k), chunk.keys(inputs.v)
    for rows, tiles in query_tiles(spec, inputs, sizes, chunk.layout_head):
        q = chunk.fold(inputs.q, rows)
        state = statistics(chunk, rows, tiles, q, k, buffers[0]) if inputs.bias is not None else None
        row = BackwardRows.of(chunk, rows, q, saved, state)
        if totals.sinks is not None:
            through_sink = row.probabilities_(sinks_of_rows(chunk, rows).clone()).mul_(row.delta)
            totals.sinks[chunk.q_heads] -= chunk.unfold(through_sink).sum((0, 2, 3))
        if spec.grads == ("sinks",):
            continue
        for tile in tiles:
            backward_tile(chunk, tile, row, tile.keys_of(k), tile.keys_of(v), buffers, totals)
        if totals.q is not None:
            chunk.of_queries(totals.q)[:, :, rows] = chunk.unfold(row.grad_q)


def statistics(chunk: HeadChunk, rows: slice, tiles: list[Tile], q: Tensor, k: Tensor, buffer: TileBuffer) -> SoftmaxState | None:
    """The rows' maximum and sum anew. A bias can be so large (`finfo.min` is usual) that an lse, which adds the log of
    the sum to it, rounds that sum away."""
    state = start_of_rows(chunk, rows, value_dim=0)
    for tile in tiles:
        scores = capped_products(chunk, q, tile.keys_of(k), buffer)
        add_bias_and_mask(chunk, tile, scores)
        state, _ = online_softmax_step(state, scores, scores.new_empty(chunk.n, scores.shape[2], 0))
    return state


def backward_tile(
    chunk: HeadChunk,
    tile: Tile,
    row: BackwardRows,
    keys: Tensor,
    values: Tensor,
    buffers: tuple[TileBuffer, TileBuffer],
    totals: Gradients,
) -> None:
    """P again, then dV += P^T dO, dS = P * (dP - delta), dQ += scale dS K, dK += scale dS^T Q."""
    spec = chunk.spec
    scores = capped_products(chunk, row.q, keys, buffers[0])
    slope = None if spec.softcap is None else (scores / spec.softcap).square_().neg_().add_(1.0)
    add_bias_and_mask(chunk, tile, scores)
    p = row.probabilities_(scores)
    kept, spread = dropout_kept(chunk, tile), 1.0 / (1.0 - spec.dropout_p)
    if totals.v is not None:
        accumulate(chunk.keys(totals.v), tile, (p if kept is None else p * kept).mT, row.grad_o, spread)
    if totals.q is None and totals.k is None and totals.bias is None:
        return
    ds = buffers[1].product(row.grad_o, values.mT, spread)
    if kept is not None:
        ds.mul_(kept)
    ds.sub_(row.delta).mul_(p)
    if totals.bias is not None:
        accumulate_bias(chunk.of_table(totals.bias), tile, chunk.unfold(ds))
    if slope is not None:
        ds.mul_(slope)
    if totals.q is not None:
        row.grad_q.baddbmm_(ds, keys, alpha=spec.scale)
    if totals.k is not None:
        accumulate(chunk.keys(totals.k), tile, ds.mT, row.q, spec.scale)


def accumulate(total: Tensor, tile: Tile, a: Tensor, b: Tensor, scale: float) -> None:
    """`total[:, columns] += scale * a @ b`."""
    if isinstance(tile.columns, slice):
        total[:, tile.columns].baddbmm_(a, b, alpha=scale)
    else:
        total.index_add_(1, tile.columns, torch.bmm(a, b), alpha=scale)


def accumulate_bias(total: Tensor, tile: Tile, ds: Tensor) -> None:
    """Add dS `(b, h, rows, columns)` to the gradient of a bias, summed over the dims in which the bias is 1."""
    single = [dim for dim in range(4) if total.shape[dim] == 1]
    if single:
        ds = ds.sum(single, keepdim=True)
    if isinstance(tile.columns, slice) or total.shape[3] == 1:
        tile_of(total, tile.rows, tile.columns).add_(ds)
    else:
        tile_of(total, tile.rows, slice(None)).index_add_(3, tile.columns, ds)


def zero_gradients(spec: AttentionSpec, inputs: AttentionInputs) -> Gradients:
    """Totals for what `spec.grads` names: the accumulator's dtype, but for q, whose rows are written once."""
    zeros = {
        name: torch.zeros(getattr(inputs, name).shape, dtype=spec.accumulator_dtype, device=spec.device)
        for name in spec.grads
        if name != "q"
    }
    return Gradients(q=torch.empty_like(inputs.q) if "q" in spec.grads else None, **zeros)


def in_input_dtypes(totals: Gradients, inputs: AttentionInputs) -> Gradients:
    cast = {}
    for name in ("q", "k", "v", "bias", "sinks"):
        total = getattr(totals, name)
        cast[name] = None if total is None else total.to(getattr(inputs, name).dtype)
    return Gradients(**cast)
