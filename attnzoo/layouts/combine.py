"""Union, intersection and complement of layouts, and stacks of one layout a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo.layout import BlockLayout, BlockLists, ElementRule, pack_bits
from attnzoo.layouts.build import partial_words

__all__ = ["complement", "intersection", "stack_heads", "union"]


@dataclass(frozen=True, eq=False)
class _Blocks:
    """A layout as sorted sets of flat block numbers (over batch, heads, rows, columns), and the kept pairs of
    its partial blocks, packed: `(partial blocks, block_q, words)` int32."""

    full: Tensor
    partial: Tensor
    kept: Tensor

    @classmethod
    def of(cls, layout: BlockLayout, batch: int, heads: int) -> _Blocks:
        """Repeated over the batch and heads that the layout shares."""
        layout.check_unmodified()
        kept = partial_words(layout)
        full, _ = _numbers(layout.full, layout, batch, heads)
        partial, source = _numbers(layout.partial, layout, batch, heads)
        return cls(full, partial, kept[source])

    def kept_at(self, numbers: Tensor) -> Tensor:
        """The kept pairs of these blocks, present or not: all in full ones, none in absent ones."""
        kept = -torch.isin(numbers, self.full).to(torch.int32)[:, None, None].repeat(1, *self.kept.shape[1:])
        if len(self.partial) and len(numbers):
            place = torch.searchsorted(self.partial, numbers).clamp(max=len(self.partial) - 1)
            hit = self.partial[place] == numbers
            kept[hit] = self.kept[place[hit]]
        return kept


def _numbers(lists: BlockLists, layout: BlockLayout, batch: int, heads: int) -> tuple[Tensor, Tensor]:
    """Flat block numbers in ascending order, and the entry of `lists` that each repeats."""
    per_head = layout.rows * layout.columns
    row = lists.row_of_each()
    head, row = torch.div(row, max(layout.rows, 1), rounding_mode="floor"), row % max(layout.rows, 1)
    b, h = torch.div(head, layout.heads, rounding_mode="floor"), head % layout.heads
    repeat_b = torch.arange(batch if layout.batch == 1 else 1, device=lists.indices.device)
    repeat_h = torch.arange(heads if layout.heads == 1 else 1, device=lists.indices.device)
    heads_of = (b + repeat_b[:, None, None]) * heads + (h + repeat_h[:, None])
    numbers = (heads_of * per_head + row * layout.columns + lists.indices).flatten()
    order = numbers.argsort()
    return numbers[order], order % max(len(lists.indices), 1)


def _layout(like: BlockLayout, batch: int, heads: int, full: Tensor, partial: Tensor, kept: Tensor) -> BlockLayout:
    """From flat numbers in ascending order; partial blocks that keep nothing are dropped, those that keep every pair are full."""
    inside = _inside(partial, like)
    kept = kept & inside
    has_any, has_all = (kept != 0).flatten(1).any(1), (kept == inside).flatten(1).all(1)
    full = torch.cat([full, partial[has_all]]).sort().values
    partial, kept = partial[has_any & ~has_all], kept[has_any & ~has_all]
    rows = batch * heads * like.rows

    def lists(numbers: Tensor) -> BlockLists:
        row = torch.div(numbers, max(like.columns, 1), rounding_mode="floor")
        offsets = torch.nn.functional.pad(torch.bincount(row, minlength=rows).cumsum(0), (1, 0))
        return BlockLists(offsets.to(torch.int32), (numbers % max(like.columns, 1)).to(torch.int32))

    return BlockLayout._trusted(
        q_len=like.q_len,
        kv_len=like.kv_len,
        block_q=like.block_q,
        block_kv=like.block_kv,
        full=lists(full),
        partial=lists(partial),
        rule=ElementRule(bits=kept) if len(partial) else ElementRule(),
        batch=batch,
        heads=heads,
    )


def _inside(numbers: Tensor, like: BlockLayout) -> Tensor:
    """The pairs of these blocks that lie within the lengths, packed."""
    row = torch.div(numbers, max(like.columns, 1), rounding_mode="floor") % max(like.rows, 1)
    column = numbers % max(like.columns, 1)
    cut_q, cut_kv = like.q_len - (like.rows - 1) * like.block_q, like.kv_len - (like.columns - 1) * like.block_kv
    places = torch.arange(max(like.block_q, like.block_kv), device=numbers.device)
    queries = places[: like.block_q] < torch.where(row == like.rows - 1, cut_q, like.block_q)[:, None]
    keys = pack_bits((places[: like.block_kv] < torch.where(column == like.columns - 1, cut_kv, like.block_kv)[:, None])[:, None])
    return torch.where(queries[:, :, None], keys, 0)


def _common(a: BlockLayout, b: BlockLayout) -> tuple[int, int]:
    for name in ("q_len", "kv_len", "block_q", "block_kv", "device"):
        if getattr(a, name) != getattr(b, name):
            raise ValueError(f"{name} is {getattr(a, name)} in one layout and {getattr(b, name)} in the other; they need one")
    for name in ("batch", "heads"):
        if len({getattr(a, name), getattr(b, name)} - {1}) > 1:
            raise ValueError(f"{name} is {getattr(a, name)} in one layout and {getattr(b, name)} in the other; they need one, or 1")
    return (b.batch if a.batch == 1 else a.batch), (b.heads if a.heads == 1 else a.heads)


def intersection(a: BlockLayout, b: BlockLayout) -> BlockLayout:
    """`a & b`: the pairs that attend in both. Lengths, block sizes and device must be the same."""
    batch, heads = _common(a, b)
    one, other = _Blocks.of(a, batch, heads), _Blocks.of(b, batch, heads)
    full = one.full[torch.isin(one.full, other.full)]
    candidates = torch.cat([one.partial, one.full[torch.isin(one.full, other.partial)]]).unique()
    partial = candidates[torch.isin(candidates, torch.cat([other.partial, other.full]))]
    return _layout(a, batch, heads, full, partial, one.kept_at(partial) & other.kept_at(partial))


def union(a: BlockLayout, b: BlockLayout) -> BlockLayout:
    """`a | b`: the pairs that attend in either. Lengths, block sizes and device must be the same."""
    batch, heads = _common(a, b)
    one, other = _Blocks.of(a, batch, heads), _Blocks.of(b, batch, heads)
    full = torch.cat([one.full, other.full]).unique()
    partial = torch.cat([one.partial, other.partial]).unique()
    partial = partial[~torch.isin(partial, full)]
    return _layout(a, batch, heads, full, partial, one.kept_at(partial) | other.kept_at(partial))


def complement(layout: BlockLayout) -> BlockLayout:
    """`~layout`: the pairs that don't attend."""
    blocks = _Blocks.of(layout, layout.batch, layout.heads)
    everything = torch.arange(layout.batch * layout.heads * layout.rows * layout.columns, device=layout.device)
    present = torch.cat([blocks.full, blocks.partial])
    return _layout(layout, layout.batch, layout.heads, everything[~torch.isin(everything, present)], blocks.partial, ~blocks.kept)


def stack_heads(layouts: Sequence[BlockLayout]) -> BlockLayout:
    """One layout a head, in order: each must have one head of its own and agree in everything but its blocks."""
    layouts = _checked_stack(layouts)
    widest = next((layout for layout in layouts if layout.batch != 1), layouts[0])
    numbers: list[tuple[Tensor, Tensor, Tensor]] = []
    per_head = widest.rows * widest.columns
    for head, layout in enumerate(layouts):
        _common(widest, layout)
        blocks = _Blocks.of(layout, widest.batch, 1)

        def moved(flat: Tensor, head: int = head) -> Tensor:
            b = torch.div(flat, max(per_head, 1), rounding_mode="floor")
            return flat + (b * (len(layouts) - 1) + head) * per_head

        numbers.append((moved(blocks.full), moved(blocks.partial), blocks.kept))
    full = torch.cat([full for full, _, _ in numbers]).sort().values
    partial, order = torch.cat([partial for _, partial, _ in numbers]).sort()
    return _layout(widest, widest.batch, len(layouts), full, partial, torch.cat([kept for _, _, kept in numbers])[order])


def _checked_stack(layouts: object) -> Sequence[BlockLayout]:
    if not isinstance(layouts, Sequence):
        raise TypeError(f"layouts is a {type(layouts).__name__}; it takes a sequence of layouts, one a head")
    if not layouts:
        raise ValueError("layouts is empty; a stack takes one layout a head")
    for head, layout in enumerate(layouts):
        if not isinstance(layout, BlockLayout):
            raise TypeError(f"layouts[{head}] is a {type(layout).__name__}; a stack takes a BlockLayout a head")
        if layout.heads != 1:
            raise ValueError(f"layouts[{head}] has {layout.heads} heads; a stack takes layouts of one head")
    return layouts
