"""Union, intersection and complement of layouts, and stacks of one layout a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo.layout import BlockLayout, BlockLists, ElementRule, pack_bits
from attnzoo.layouts.build import partial_blocks

__all__ = ["complement", "intersection", "stack_heads", "union"]


@dataclass(frozen=True, eq=False)
class _Blocks:
    """A layout as sorted sets of flat block numbers (over batch, heads, rows, columns), and the kept pairs of
    its partial blocks, `(partial blocks, block_q, block_kv)` bool."""

    full: Tensor
    partial: Tensor
    kept: Tensor

    @classmethod
    def of(cls, layout: BlockLayout, batch: int, heads: int) -> _Blocks:
        """Repeated over the batch and heads that the layout shares."""
        kept = partial_blocks(layout)
        full, _ = _numbers(layout.full, layout, batch, heads)
        partial, source = _numbers(layout.partial, layout, batch, heads)
        return cls(full, partial, kept[source])

    def kept_at(self, numbers: Tensor) -> Tensor:
        """The kept pairs of these blocks, present or not: all in full ones, none in absent ones."""
        kept = torch.isin(numbers, self.full)[:, None, None].repeat(1, *self.kept.shape[1:])
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
    """From flat numbers in ascending order; partial blocks that keep nothing are dropped."""
    has_any = kept.flatten(1).any(1)
    partial, kept = partial[has_any], kept[has_any]
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
        rule=ElementRule(bits=pack_bits(kept)) if len(partial) else ElementRule(),
        batch=batch,
        heads=heads,
    )


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
    if not layouts:
        raise ValueError("layouts is empty; a stack takes one layout a head")
    first = layouts[0]
    batch = max(layout.batch for layout in layouts)
    numbers: list[tuple[Tensor, Tensor, Tensor]] = []
    per_head = first.rows * first.columns
    for head, layout in enumerate(layouts):
        if layout.heads != 1:
            raise ValueError(f"layouts[{head}] has {layout.heads} heads; a stack takes layouts of one head")
        _common(first, layout)
        blocks = _Blocks.of(layout, batch, 1)

        def moved(flat: Tensor, head: int = head) -> Tensor:
            b = torch.div(flat, max(per_head, 1), rounding_mode="floor")
            return flat + (b * (len(layouts) - 1) + head) * per_head

        numbers.append((moved(blocks.full), moved(blocks.partial), blocks.kept))
    full = torch.cat([full for full, _, _ in numbers]).sort().values
    partial, order = torch.cat([partial for _, partial, _ in numbers]).sort()
    return _layout(first, batch, len(layouts), full, partial, torch.cat([kept for _, _, kept in numbers])[order])
