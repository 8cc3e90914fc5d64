"""Layouts to and from other libraries' forms: padded lists (FlashAttention-4, FlexAttention), `BlockMask`, BSR."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.layout import ID_DTYPES, BlockLayout, BlockLists, ElementRule, pack_bits
from attnzoo.layouts.build import band_keep, partial_blocks
from attnzoo.layouts.mask_mod import MaskMod, evaluate_blocks, of_single_pairs
from attnzoo.layouts.validation import LARGEST, block_size, check_readable

__all__ = ["PaddedLists", "from_block_mask", "from_bsr", "from_padded_lists", "mask_mod_of", "padded_lists", "to_block_mask", "to_bsr"]

ABSENT, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False)
class PaddedLists:
    """Block columns a row, padded to one width: what FlexAttention and FlashAttention-4 take.

    Attributes:
        partial_counts, full_counts: `(batch, heads, rows)` int32.
        partial_indices, full_indices: `(batch, heads, rows, columns)` int32; entries past the count carry no meaning.
    """

    partial_counts: Tensor
    partial_indices: Tensor
    full_counts: Tensor
    full_indices: Tensor


def padded_lists(layout: BlockLayout) -> PaddedLists:
    """The layout's lists, padded with 0 to the number of block columns."""
    layout.check_unmodified()
    shape = (layout.batch, layout.heads, layout.rows)

    def padded(lists: BlockLists) -> tuple[Tensor, Tensor]:
        row = lists.row_of_each()
        table = lists.indices.new_zeros(shape[0] * shape[1] * shape[2], layout.columns)
        table[row, torch.arange(len(row), device=row.device) - lists.offsets.long()[row]] = lists.indices
        return lists.offsets.diff().view(shape), table.view(*shape, layout.columns)

    return PaddedLists(*padded(layout.partial), *padded(layout.full))


def from_padded_lists(
    lists: PaddedLists, *, q_len: int, kv_len: int, block: int | tuple[int, int], mask_mod: MaskMod | None = None
) -> BlockLayout:
    """The layout of padded lists; partial blocks keep the pairs for which `mask_mod(b, h, i, j)` is True, a function of four
    0-dim int64 tensors that is called under `torch.vmap`, as FlexAttention calls it.

    Raises:
        TypeError, ValueError: lists that don't fit one another, an index out of range, a block listed twice, partial blocks
            without a mask_mod.
    """
    _check_padded(lists)
    block_q, block_kv = block_size(block)
    batch, heads, _ = lists.full_counts.shape
    full, partial = _compressed(lists.full_counts, lists.full_indices), _compressed(lists.partial_counts, lists.partial_indices)
    rule = ElementRule(band=(None, None, 0))  # every pair, until the function has been asked
    draft = BlockLayout(q_len, kv_len, block_q, block_kv, full, partial, rule, batch, heads)  # validates the lists
    if not len(partial.indices):
        return replace(draft, rule=ElementRule())
    if mask_mod is None:
        raise ValueError("mask_mod is None, but there are partial blocks; give the function that says which pairs they keep")
    return replace(draft, rule=ElementRule(bits=evaluate_blocks(of_single_pairs(mask_mod), draft.partial, draft)))


def _check_padded(lists: object) -> None:
    if not isinstance(lists, PaddedLists):
        raise TypeError(f"lists is a {type(lists).__name__}, not PaddedLists")
    for name in ("full_counts", "full_indices", "partial_counts", "partial_indices"):
        tensor = getattr(lists, name)
        if not isinstance(tensor, Tensor) or tensor.dtype not in ID_DTYPES:
            found = getattr(tensor, "dtype", type(tensor).__name__)
            raise TypeError(f"lists.{name} is {found}; it takes int8, int16, int32, int64 or uint8")
        check_readable(f"lists.{name}", tensor)
        if tensor.ndim != (3 if name.endswith("counts") else 4) or tensor.shape[:3] != lists.full_counts.shape:
            raise ValueError(
                f"lists.{name} has shape {tuple(tensor.shape)}, full_counts {tuple(lists.full_counts.shape)}; counts take "
                "(batch, heads, rows), indices (batch, heads, rows, columns)"
            )
        if tensor.device != lists.full_counts.device:
            raise ValueError(f"lists.{name} is on {tensor.device}, full_counts on {lists.full_counts.device}; they need one device")


def _compressed(counts: Tensor, indices: Tensor) -> BlockLists:
    """Ascending columns of each row, without the padding."""
    width = indices.shape[-1]
    if bool((counts < 0).any()) or bool((counts > width).any()):
        raise ValueError(f"counts run from {int(counts.min())} to {int(counts.max())}; the lists hold up to {width} a row")
    used = torch.arange(width, device=counts.device) < counts[..., None]
    found = indices[used]
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < LARGEST:  # before 32 bits could make another index of it
        raise ValueError(f"indices run from {int(found.min())} to {int(found.max())}, beyond every block column")
    ordered = torch.where(used, indices.long(), LARGEST).sort(dim=-1).values
    offsets = torch.nn.functional.pad(counts.flatten().cumsum(0), (1, 0))
    return BlockLists(offsets.to(torch.int32), ordered[used].to(torch.int32))


def mask_mod_of(layout: BlockLayout) -> MaskMod:
    """The function `(b, h, i, j) -> bool` that the layout stands for, as FlexAttention takes it; captures tensors."""
    layout.check_unmodified()
    rule, block_q, block_kv = layout.rule, layout.block_q, layout.block_kv
    states = torch.full((layout.batch * layout.heads * layout.rows, layout.columns), ABSENT, dtype=torch.int32, device=layout.device)
    places = torch.zeros_like(states)
    for lists, state in ((layout.full, FULL), (layout.partial, PARTIAL)):
        row = lists.row_of_each()
        states[row, lists.indices.long()] = state
    places[row, lists.indices.long()] = torch.arange(len(row), dtype=torch.int32, device=row.device)  # of partial blocks: those with bits
    has_bits = rule.bits is not None and len(rule.bits) > 0
    one_batch, one_head, heads, rows = layout.batch == 1, layout.heads == 1, layout.heads, layout.rows

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        b, h = b * 0 if one_batch else b, h * 0 if one_head else h
        row, column = (b * heads + h) * rows + i // block_q, j // block_kv
        state = states[row, column]
        kept = state == PARTIAL
        if rule.band is not None:
            kept = kept & band_keep(i, j, rule.band)
        if rule.segments is not None:
            kept = kept & (rule.segments[0][b, i] == rule.segments[1][b, j])
        if has_bits:
            assert rule.bits is not None
            word = rule.bits[places[row, column], i % block_q, j % block_kv // 32]
            kept = kept & ((word >> (j % block_kv % 32)) & 1).to(torch.bool)
        return (state == FULL) | kept

    return mask_mod


def to_block_mask(layout: BlockLayout) -> Any:
    """The same layout as FlexAttention's `BlockMask`."""
    from torch.nn.attention.flex_attention import BlockMask

    lists = padded_lists(layout)
    return BlockMask.from_kv_blocks(
        lists.partial_counts,
        lists.partial_indices,
        lists.full_counts,
        lists.full_indices,
        BLOCK_SIZE=(layout.block_q, layout.block_kv),
        mask_mod=mask_mod_of(layout),
        seq_lengths=(layout.q_len, layout.kv_len),
    )


def from_block_mask(block_mask: Any) -> BlockLayout:
    """The layout of FlexAttention's `BlockMask`: its lists, and its mask_mod evaluated in the partial blocks alone."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask is a {type(block_mask).__name__}, not a BlockMask of torch.nn.attention.flex_attention")
    counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
    full_counts, full_indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    if full_counts is None or full_indices is None:
        full_counts, full_indices = torch.zeros_like(counts), torch.zeros_like(indices)
    (q_len, kv_len), (block_q, block_kv) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    lists = PaddedLists(counts, indices, full_counts, full_indices)
    return from_padded_lists(lists, q_len=q_len, kv_len=kv_len, block=(block_q, block_kv), mask_mod=block_mask.mask_mod)


def to_bsr(layout: BlockLayout) -> Tensor:
    """The bool mask as a `torch.sparse_bsr` tensor `(q_len, kv_len)`, of a layout with one batch, one head and
    lengths in whole blocks (BSR has no cut blocks)."""
    if layout.batch != 1 or layout.heads != 1:
        raise ValueError(f"the layout has batch {layout.batch} and {layout.heads} heads; BSR takes one of each")
    if layout.q_len % layout.block_q or layout.kv_len % layout.block_kv:
        raise ValueError(f"lengths ({layout.q_len}, {layout.kv_len}) are not whole blocks of {layout.block_q} x {layout.block_kv}")
    layout.check_unmodified()
    partial = partial_blocks(layout)
    full = torch.ones(len(layout.full.indices), *partial.shape[1:], dtype=torch.bool, device=layout.device)
    row = torch.cat([layout.full.row_of_each(), layout.partial.row_of_each()])
    columns = torch.cat([layout.full.indices, layout.partial.indices]).long()
    order = (row * max(layout.columns, 1) + columns).argsort()
    offsets = (layout.full.offsets + layout.partial.offsets).long()
    return _sparse_bsr(offsets, columns[order], torch.cat([full, partial])[order], (layout.q_len, layout.kv_len))


def _sparse_bsr(offsets: Tensor, columns: Tensor, values: Tensor, size: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse BSR tensor support is in beta", category=UserWarning)
        return torch.sparse_bsr_tensor(offsets, columns, values, size=size, device=values.device, check_invariants=True)


def from_bsr(mask: Tensor) -> BlockLayout:
    """The layout of a `torch.sparse_bsr` tensor: a pair attends where a non-zero is stored."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is a {type(mask).__name__}, not a tensor")
    if mask.layout is not torch.sparse_bsr or mask.ndim != 2:
        raise TypeError(f"mask has layout {mask.layout} and {mask.ndim} dims; it takes a sparse_bsr tensor (q_len, kv_len)")
    offsets, columns, values = mask.crow_indices(), mask.col_indices(), mask.values()
    try:  # torch makes one of any numbers, unless it is asked
        _sparse_bsr(offsets, columns, values, mask.shape)
    except RuntimeError as error:
        raise ValueError(f"mask is not a well-formed sparse_bsr tensor: {error}") from None
    kept = values != 0
    row = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())
    is_full, has_any = kept.flatten(1).all(1), kept.flatten(1).any(1)

    def lists(which: Tensor) -> BlockLists:
        counts = torch.bincount(row[which], minlength=len(offsets) - 1)
        return BlockLists(torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32), columns[which].to(torch.int32))

    partial = has_any & ~is_full
    rule = ElementRule(bits=pack_bits(kept[partial])) if bool(partial.any()) else ElementRule()
    q_len, kv_len = mask.shape
    block_q, block_kv = kept.shape[1:]
    return BlockLayout(q_len, kv_len, block_q, block_kv, lists(is_full), lists(partial), rule)
