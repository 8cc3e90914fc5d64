"""Layouts from bool tables and dense masks, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.layout import WORD_BITS, BlockLayout, BlockLists, ElementRule, pack_bits, unpack_bits
from attnzoo.layouts.validation import block_size, check_int, check_readable

WHOLE = slice(None)
ELEMENTS_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}  # of partial blocks


def _four_dims(name: str, table: Tensor) -> Tensor:
    if not isinstance(table, Tensor):
        raise TypeError(f"{name} is a {type(table).__name__}, not a tensor")
    if table.dtype != torch.bool:
        raise TypeError(f"{name} has dtype {table.dtype}, not torch.bool")
    if table.ndim not in (2, 4):
        raise ValueError(f"{name} has {table.ndim} dims, shape {tuple(table.shape)}; it takes 2 or 4")
    check_readable(name, table)
    return table if table.ndim == 4 else table[None, None]


def _empty_lists(rows: int, device: torch.device) -> BlockLists:
    zeros = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    return BlockLists(zeros, zeros[:0].clone())


def _tokens(what: str, count: int, name: str, length: int | None, block: int) -> int:
    """The length in tokens that `count` blocks stand for, the last of them cut if `length` says so."""
    if length is None:
        return count * block
    check_int(name, length, least=0)
    if -(-length // block) != count:
        raise ValueError(f"blocks has {count} {what}; {name} {length} in blocks of {block} has {-(-length // block)}")
    return length


def from_blocks(blocks: Tensor, *, block: int | tuple[int, int], q_len: int | None, kv_len: int | None) -> BlockLayout:
    table = _four_dims("blocks", blocks)
    block_q, block_kv = block_size(block)
    batch, heads, rows, columns = table.shape
    q_len = _tokens("rows", rows, "q_len", q_len, block_q)
    kv_len = _tokens("columns", columns, "kv_len", kv_len, block_kv)
    return BlockLayout(
        q_len=q_len,
        kv_len=kv_len,
        block_q=block_q,
        block_kv=block_kv,
        full=BlockLists.from_bool(table.reshape(batch * heads * rows, columns)),
        partial=_empty_lists(batch * heads * rows, table.device),
        batch=batch,
        heads=heads,
    )


def from_dense(mask: Tensor, *, block: int | tuple[int, int]) -> BlockLayout:
    dense = _four_dims("mask", mask)
    block_q, block_kv = block_size(block)
    batch, heads, q_len, kv_len = dense.shape
    rows, columns = -(-q_len // block_q), -(-kv_len // block_kv)
    spare = (0, columns * block_kv - kv_len, 0, rows * block_q - q_len)

    def tiles(value: bool) -> Tensor:
        """`(batch * heads * rows, columns, block_q, block_kv)`, the cut tail filled with `value`."""
        padded = torch.nn.functional.pad(dense, spare, value=value)
        split = padded.reshape(batch * heads * rows, block_q, columns, block_kv)
        return split.transpose(1, 2)

    full = tiles(True).all(-1).all(-1)
    kept = tiles(False)
    partial = kept.any(-1).any(-1) & ~full
    return BlockLayout._trusted(
        q_len=q_len,
        kv_len=kv_len,
        block_q=block_q,
        block_kv=block_kv,
        full=BlockLists.from_bool(full),
        partial=BlockLists.from_bool(partial),
        rule=ElementRule(bits=pack_bits(kept[partial])) if bool(partial.any()) else ElementRule(),
        batch=batch,
        heads=heads,
    )


def to_dense(layout: BlockLayout) -> Tensor:
    batch, heads, rows, columns = layout.batch, layout.heads, layout.rows, layout.columns
    block_q, block_kv = min(layout.block_q, layout.q_len), min(layout.block_kv, layout.kv_len)  # one that is longer is cut
    tiles = torch.zeros(batch * heads * rows, columns, block_q, block_kv, dtype=torch.bool, device=layout.device)
    everything = tiles.new_ones(())  # True itself would be copied from the CPU, which no graph can capture
    tiles[layout.full.row_of_each(), layout.full.indices.long()] = everything
    kept = partial_blocks(layout, WHOLE, slice(block_q), slice(block_kv))
    tiles[layout.partial.row_of_each(), layout.partial.indices.long()] = kept
    split = tiles.transpose(1, 2).reshape(batch, heads, rows * block_q, columns * block_kv)
    return split[:, :, : layout.q_len, : layout.kv_len]


def partial_blocks(layout: BlockLayout, which: slice = WHOLE, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
    """The kept pairs of partial blocks: `(blocks, block_q, block_kv)` bool, or the part that is asked for.

    Pairs beyond `q_len` and `kv_len` in a cut block carry no meaning.

    Args:
        which: of the blocks, in the order of `layout.partial`.
        rows, columns: within each block.
    """
    rule, device = layout.rule, layout.device
    places = _places(which, len(layout.partial.indices), device).to(torch.int32)
    row = torch.searchsorted(layout.partial.offsets, places, right=True) - 1
    i = (row % max(layout.rows, 1) * layout.block_q)[:, None] + _places(rows, layout.block_q, device)
    j = (layout.partial.indices[which].long() * layout.block_kv)[:, None] + _places(columns, layout.block_kv, device)
    kept = torch.ones(len(row), i.shape[1], j.shape[1], dtype=torch.bool, device=device)
    if rule.bits is not None:
        kept &= unpack_bits(rule.bits[which, rows], layout.block_kv)[..., columns]
    if rule.band is not None:
        kept &= band_keep(i[:, :, None], j[:, None, :], rule.band)
    if rule.segments is not None:
        q_ids, kv_ids = rule.segments
        b = row // max(layout.rows * layout.heads, 1) % q_ids.shape[0]
        q_tile = q_ids[b[:, None], i.clamp(max=layout.q_len - 1)]
        kept &= q_tile[:, :, None] == kv_ids[b[:, None], j.clamp(max=layout.kv_len - 1)][:, None, :]
    return kept


def _places(part: slice, size: int, device: torch.device) -> Tensor:
    stop = size if part.stop is None else min(part.stop, size)  # slice.indices is beyond the Dynamo of torch 2.11
    return torch.arange(part.start or 0, stop, device=device)


def partial_words(layout: BlockLayout) -> Tensor:
    """The kept pairs of all partial blocks, packed as `ElementRule.bits` are."""
    rule = layout.rule
    if rule.segments is None and rule.parts:
        words = [*([] if rule.bits is None else [rule.bits]), *([] if rule.band is None else [_band_words(layout, rule.band)])]
        return words[0] if len(words) == 1 else words[0] & words[1]
    step = blocks_at_once(layout)
    parts = [pack_bits(partial_blocks(layout, slice(first, first + step))) for first in range(0, len(layout.partial.indices), step)]
    return torch.cat(parts) if parts else pack_bits(partial_blocks(layout))


def _band_words(layout: BlockLayout, band: tuple[int | None, int | None, int]) -> Tensor:
    """What a band keeps of partial blocks, a word at a time: bits `left .. right` of it, as far as they lie within."""
    left, right, diagonal = band
    row, column = layout.partial.row_of_each() % max(layout.rows, 1), layout.partial.indices.long()
    firsts = WORD_BITS * torch.arange(-(-layout.block_kv // WORD_BITS), device=layout.device)
    i = (row * layout.block_q + diagonal)[:, None, None] + torch.arange(layout.block_q, device=layout.device)[:, None]
    place = i - (column * layout.block_kv)[:, None, None] - firsts  # of the diagonal in the word

    def lowest(count: Tensor) -> Tensor:
        return (torch.ones_like(count) << count.clamp(0, WORD_BITS)) - 1

    words = torch.full_like(place, -1) if right is None else lowest(place + (right + 1))
    return (words if left is None else words & ~lowest(place - left)).to(torch.int32)


def blocks_at_once(layout: BlockLayout) -> int:
    """So many that what is computed for each of their pairs takes little memory."""
    return max(1, ELEMENTS_AT_ONCE.get(layout.device.type, 2**20) // (layout.block_q * layout.block_kv))


def band_keep(i: Tensor, j: Tensor, band: tuple[int | None, int | None, int]) -> Tensor:
    """`i + diagonal - left <= j <= i + diagonal + right`, an open bound left out."""
    left, right, diagonal = band
    distance = j - i - diagonal
    kept = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        kept = kept & (distance >= -left)
    if right is not None:
        kept = kept & (distance <= right)
    return kept
