"""A layout as FlashAttention 4's lists of blocks, for the forward and, transposed, for the backward; made once a layout."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from attnzoo import BlockLayout
from attnzoo.layout import BlockLists
from attnzoo.layouts.convert import padded_lists

__all__ = ["BLOCK", "lists_of", "transposed_lists"]

BLOCK = 128

Made = tuple[Any, Any]

_made: weakref.WeakKeyDictionary[BlockLayout, dict[tuple[int, int], Made]] = weakref.WeakKeyDictionary()


def lists_of(layout: BlockLayout, batch: int, heads: int) -> Made:
    """`BlockSparseTensorsTorch` of the forward and of the backward, for a call of that batch and so many query heads."""
    layout.check_unmodified()
    kept = _made.setdefault(layout, {})
    if (batch, heads) not in kept:
        forward = padded_lists(layout)
        kept[batch, heads] = (
            _wide(forward.full_counts, forward.full_indices, batch, heads),
            _wide(*transposed_lists(layout), batch, heads),
        )
    return kept[batch, heads]


def transposed_lists(layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """Of the full blocks: how many block rows each block column has, `(batch, heads, columns)`, and which, padded."""
    full: BlockLists = layout.transposed[0]
    lines = layout.batch * layout.heads * layout.columns
    line = full.row_of_each()
    table = full.indices.new_zeros(lines, max(layout.rows, 1))
    table[line, torch.arange(len(line), device=line.device) - full.offsets.long()[line]] = full.indices
    shape = (layout.batch, layout.heads, layout.columns)
    return full.offsets.diff().view(shape), table.view(*shape, layout.rows)


def _wide(counts: Tensor, indices: Tensor, batch: int, heads: int) -> Any:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    counts = counts.expand(batch, heads, -1).contiguous()
    indices = indices.expand(batch, heads, -1, -1).contiguous()
    return BlockSparseTensorsTorch(torch.zeros_like(counts), torch.zeros_like(indices), counts, indices, block_size=(BLOCK, BLOCK))
