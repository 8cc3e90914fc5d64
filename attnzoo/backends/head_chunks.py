"""Heads that are computed side by side: how many, and their part of every tensor of a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec


@dataclass(frozen=True, eq=False, slots=True)
class HeadChunk:
    """Some heads of a call. The query heads of one key-value head are folded into the rows of its tiles, so that
    keys and values are read where they lie: a tile is `(n, group * rows, columns)`.

    Attributes:
        spec, inputs: the call's, the inputs narrowed to these heads but for k and v (see `keys`).
        bandless: the spec without causal and window.
        batch, q_heads, kv_heads: their ranges in the call.
        n: key-value heads in the chunk, over its batch.
        group: query heads in the chunk that share one of them.
        layout_head: place of these heads in the layout's `(batch, heads)`.
    """

    spec: AttentionSpec
    bandless: AttentionSpec
    inputs: AttentionInputs
    batch: slice
    q_heads: slice
    kv_heads: slice
    n: int
    group: int
    layout_head: int

    def of_queries(self, tensor: Tensor) -> Tensor:
        """The chunk's part of a `(B, Hq, ...)` tensor."""
        return tensor[self.batch, self.q_heads]

    def keys(self, tensor: Tensor) -> Tensor:
        """The chunk's part of a `(B, Hkv, Skv, D)` tensor, as `(n, Skv, D)` in the accumulator's dtype: a view where it can be."""
        return tensor[self.batch, self.kv_heads].reshape(self.n, *tensor.shape[2:]).to(self.spec.accumulator_dtype)

    def of_table(self, table: Tensor) -> Tensor:
        """The chunk's part of a table whose dims are 1 or full."""
        if table.shape[0] != 1:
            table = table[self.batch]
        return table if table.shape[1] == 1 else table[:, self.q_heads]

    def fold(self, tensor: Tensor, rows: slice) -> Tensor:
        """Rows of a `(b, h, Sq, D)` tensor of the chunk, as `(n, group * rows, D)` in the accumulator's dtype."""
        part = tensor[:, :, rows]
        return part.reshape(self.n, self.group * part.shape[2], part.shape[3]).to(self.spec.accumulator_dtype)

    def unfold(self, tile: Tensor) -> Tensor:
        """`(n, group * rows, D)` as `(b, h, rows, D)`: a view."""
        batch = self.batch.stop - self.batch.start
        return tile.view(batch, self.q_heads.stop - self.q_heads.start, tile.shape[1] // self.group, tile.shape[2])

    def unsegmented(self) -> AttentionInputs:
        """The inputs without segment ids."""
        return self.inputs if self.inputs.q_segment_ids is None else replace(self.inputs, q_segment_ids=None, kv_segment_ids=None)


def head_chunks(spec: AttentionSpec, inputs: AttentionInputs, heads: int) -> Iterator[HeadChunk]:
    """All heads, up to `heads` query heads at a time; one at a time where the layout has one for each."""
    layout_batch, layout_heads = (1, 1) if spec.layout is None else (spec.layout.batch, spec.layout.heads)
    bandless = spec if spec.band == (None, None) else replace(spec, causal=False, window=None)
    kv_step = max(1, heads // spec.group)
    batch_step = 1 if layout_batch > 1 or kv_step < spec.kv_heads else max(1, heads // max(spec.q_heads, 1))
    q_step = kv_step * spec.group
    if layout_heads > 1:
        batch_step = q_step = 1
    for b in range(0, spec.batch, batch_step):
        batch = slice(b, min(b + batch_step, spec.batch))
        for h in range(0, spec.q_heads, q_step):
            q_heads = slice(h, min(h + q_step, spec.q_heads))
            layout_head = (b if layout_batch > 1 else 0) * layout_heads + (h if layout_heads > 1 else 0)
            yield _chunk(spec, bandless, inputs, batch, q_heads, layout_head)


def _chunk(
    spec: AttentionSpec, bandless: AttentionSpec, inputs: AttentionInputs, batch: slice, q_heads: slice, layout_head: int
) -> HeadChunk:
    kv_heads = slice(q_heads.start // spec.group, (q_heads.stop - 1) // spec.group + 1)
    n = (batch.stop - batch.start) * (kv_heads.stop - kv_heads.start)
    group = (q_heads.stop - q_heads.start) // (kv_heads.stop - kv_heads.start)
    chunk = HeadChunk(spec, bandless, inputs, batch, q_heads, kv_heads, n, group, layout_head)
    if n * group == spec.batch * spec.q_heads:
        return chunk
    narrowed = replace(
        inputs,
        q=inputs.q[batch, q_heads],
        mask=None if inputs.mask is None else chunk.of_table(inputs.mask),
        bias=None if inputs.bias is None else chunk.of_table(inputs.bias),
        q_segment_ids=None if inputs.q_segment_ids is None else inputs.q_segment_ids[batch],
        kv_segment_ids=None if inputs.kv_segment_ids is None else inputs.kv_segment_ids[batch],
        sinks=None if inputs.sinks is None else inputs.sinks[q_heads],
    )
    return replace(chunk, inputs=narrowed)
