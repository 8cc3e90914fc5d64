"""How many rows stream past the tiles that stay on chip: whole blocks, of those that causal, window or a layout leave."""

from __future__ import annotations

from collections.abc import Iterable

from attnzoo.spec import AttentionSpec

__all__ = ["keys_streamed", "queries_streamed"]


def keys_streamed(spec: AttentionSpec, block_q: int, block_kv: int) -> int:
    """Rows of k, or of v, that are loaded over all query tiles, batch and query heads: whole blocks that some pair meets."""
    if spec.layout is not None:
        return _blocks(spec) * spec.layout.block_kv * -(-spec.layout.block_q // block_q)
    left, right = spec.band
    heads = spec.batch * spec.q_heads
    if left is None and right is None:
        return heads * -(-spec.q_len // block_q) * spec.kv_len
    starts = range(0, spec.q_len, block_q)

    def span(start: int) -> tuple[int, int]:
        last = min(start + block_q, spec.q_len) - 1
        first = 0 if left is None else start + spec.diagonal - left
        return first, spec.kv_len if right is None else last + spec.diagonal + right + 1

    return heads * _covered(map(span, starts), block_kv, spec.kv_len)


def queries_streamed(spec: AttentionSpec, block_q: int, block_kv: int) -> int:
    """Rows of q, or of dO, that are loaded over all key tiles, batch and query heads."""
    if spec.layout is not None:
        return _blocks(spec) * spec.layout.block_q * -(-spec.layout.block_kv // block_kv)
    left, right = spec.band
    heads = spec.batch * spec.q_heads
    if left is None and right is None:
        return heads * -(-spec.kv_len // block_kv) * spec.q_len

    def span(start: int) -> tuple[int, int]:
        last = min(start + block_kv, spec.kv_len) - 1
        first = 0 if right is None else start - spec.diagonal - right
        return first, spec.q_len if left is None else last - spec.diagonal + left + 1

    return heads * _covered(map(span, range(0, spec.kv_len, block_kv)), block_q, spec.q_len)


def _covered(spans: Iterable[tuple[int, int]], block: int, length: int) -> int:
    """Rows of the whole blocks that the spans meet, cut at the length."""
    total = 0
    for first, stop in spans:
        first, stop = max(first, 0), min(stop, length)
        if first < stop:
            total += min(-(-stop // block) * block, length) - first // block * block
    return total


def _blocks(spec: AttentionSpec) -> int:
    """Blocks of the layout over batch and query heads. A cut tail counts whole."""
    layout = spec.layout
    assert layout is not None
    spread = spec.batch * spec.q_heads // (layout.batch * layout.heads)
    return (layout.full_blocks + layout.partial_blocks) * spread
