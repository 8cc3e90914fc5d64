"""Block lists from contiguous column ranges, one or two a row: time and memory in the number of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.layout import BlockLists, check_block_count

__all__ = ["lists_of_ranges"]


def lists_of_ranges(*ranges: tuple[Tensor, Tensor]) -> BlockLists:
    """The blocks `first <= column < last` of every row, over ranges that ascend and don't overlap.

    Args:
        ranges: `(first, last)` pairs of `(rows,)` int64; `last <= first` is no block.
    """
    first = torch.stack([first for first, _ in ranges], dim=1).flatten()
    counts = torch.stack([(last - first).clamp(min=0) for first, last in ranges], dim=1)
    ends = counts.flatten().cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    check_block_count(total)
    starts = ends - counts.flatten()
    shift = torch.repeat_interleave((first - starts).to(torch.int32), counts.flatten(), output_size=total)
    indices = torch.arange(total, dtype=torch.int32, device=first.device).add_(shift)
    offsets = torch.nn.functional.pad(counts.sum(1).cumsum(0), (1, 0))
    return BlockLists(offsets.to(torch.int32), indices)
