"""Schedule: what launches need of a layout beyond its own lists, made once a layout, on its device, without waiting for it."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnzoo.layout import BlockLayout, BlockLists

FARTHEST = 2**30  # no distance of two positions reaches it, and sums with one stay within 32 bits


@dataclass(frozen=True, eq=False)
class MergedLists:
    """Full and partial blocks of each line in one list: partial ones ascending, then full ones descending.

    Attributes:
        offsets, partial_offsets: `(lines + 1,)` int32, of this list and of its partial blocks alone.
        blocks: `(blocks,)` int32, at least one element.
    """

    offsets: Tensor
    partial_offsets: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, full: BlockLists, partial: BlockLists) -> MergedLists:
        line, partial_line = full.row_of_each(), partial.row_of_each()
        offsets = full.offsets + partial.offsets
        blocks = full.indices.new_zeros(max(1, len(full.indices) + len(partial.indices)))
        ends = offsets[1:].long() + full.offsets[:-1].long()  # a full block's entry, counted from the end of its line
        blocks[ends[line] - 1 - torch.arange(len(line), device=line.device)] = full.indices
        blocks[full.offsets.long()[partial_line] + torch.arange(len(partial_line), device=line.device)] = partial.indices
        return cls(offsets, partial.offsets, blocks)


class Longest:
    """Blocks of the longest row and of the longest column, on their way to the host: nobody waits for them.

    Args:
        found: `(2,)` int32 on the host, which holds them once `made` has happened; None for what will not be known.
        made: event and stream; None if they are there.
    """

    def __init__(self, found: Tensor | None, made: tuple[Any, Any] | None) -> None:
        self._found, self._made = found, made
        self._known: list[int] | None = None

    def __getitem__(self, axis: int) -> int | None:
        """Of rows (0) or columns (1); None as long as it isn't known. Once it is, the event is not asked again."""
        if self._known is None and self._found is not None and self._has_come():
            self._known = self._found.tolist()
        return None if self._known is None else self._known[axis]

    def _has_come(self) -> bool:
        if self._made is None:
            return True
        event, stream = self._made
        return not _is_capturing(stream.device) and event.query()  # under capture no event may be asked


@dataclass(frozen=True, eq=False)
class Schedule:
    """A layout as the kernels take it (see `tiles.py`).

    Attributes:
        rows, columns: the `lists` of rows and of columns of blocks.
        row_shape, column_shape: their `shape`.
        merged_rows, merged_columns: both as the Hopper kernels walk them.
        rule: packed bits; `low` and `high` of the stored band, which keeps `low <= j - i <= high`; q ids and the stride of
            their batches, kv ids and theirs. None for what the layout doesn't have.
        types: what of this decides the types of a kernel's arguments.
        longest: blocks of the longest row, and of the longest column.
        made: the event after which the tensors made here hold their values, and the stream that has it; None on CPU.
    """

    rows: tuple[Any, ...]
    columns: tuple[Any, ...]
    row_shape: tuple[int, int, int]
    column_shape: tuple[int, int, int]
    merged_rows: MergedLists
    merged_columns: MergedLists
    rule: tuple[Any, ...]
    types: tuple[Any, ...]
    longest: Longest
    made: tuple[Any, Any] | None

    @classmethod
    def of(cls, layout: BlockLayout) -> Schedule:
        """The layout's schedule. One that is made while a graph is captured holds values only once the graph has run, so it
        is not kept."""
        kept = _kept.get(layout)
        if kept is None:
            kept = _made(layout)
            if not _is_capturing(layout.device):
                _kept[layout] = kept
        elif kept.made is not None and not _is_capturing(layout.device):  # a capture begins with a wait for everything
            event, stream = kept.made
            current = torch.cuda.current_stream(stream.device)
            if current != stream:
                current.wait_event(event)
                for tensor in kept.tensors():
                    tensor.record_stream(current)  # nobody else can reach them: if the layout goes, their memory waits for this stream
        return kept

    def tensors(self) -> list[Tensor]:
        """Everything that kernels read of it."""
        merged = [(lists.offsets, lists.partial_offsets, lists.blocks) for lists in (self.merged_rows, self.merged_columns)]
        return [part for part in (*self.rows, *self.columns, *itertools.chain(*merged), *self.rule) if isinstance(part, Tensor)]


_kept: weakref.WeakKeyDictionary[BlockLayout, Schedule] = weakref.WeakKeyDictionary()


def _made(layout: BlockLayout) -> Schedule:
    by_column, by_column_partial, order = layout.transposed
    rule = layout.rule
    places = None if rule.bits is None else order.to(torch.int32)
    ids: tuple[Any, ...] = (None, None, None, None)
    if rule.segments is not None:
        ids = tuple([part for each in rule.segments for part in (each, each.stride(0) if layout.batch > 1 else 0)])
    parts = (rule.bits, *_band(layout), *ids)
    heads = layout.batch * layout.heads
    row_work = _work(layout.full, layout.partial, heads, layout.rows)
    column_work = _work(by_column, by_column_partial, heads, layout.columns)
    longest = _longest(row_work, column_work)
    made = _event(layout.device)
    return Schedule(
        rows=_lists(layout.full, layout.partial, row_work, None),
        columns=_lists(by_column, by_column_partial, column_work, places),
        row_shape=_shape(layout, layout.rows),
        column_shape=_shape(layout, layout.columns),
        merged_rows=MergedLists.of(layout.full, layout.partial),
        merged_columns=MergedLists.of(by_column, by_column_partial),
        rule=parts,
        types=tuple([part.dtype if isinstance(part, Tensor) else part is None for part in parts]),
        longest=Longest(longest, made),
        made=made,
    )


def _work(full: BlockLists, partial: BlockLists, heads: int, lines: int) -> Tensor:
    """`(heads, lines)` int32: each line's blocks."""
    return (full.offsets.diff() + partial.offsets.diff()).view(heads, lines)


def _longest(*works: Tensor) -> Tensor | None:
    """The most of each, on the host, for which nobody waits."""
    device = works[0].device
    if _is_capturing(device):
        return None  # which allows no pinned memory
    found = torch.stack([work.amax() if work.numel() else work.new_zeros(()) for work in works])
    return found if device.type != "cuda" else torch.empty_like(found, device="cpu", pin_memory=True).copy_(found, non_blocking=True)


def _lists(full: BlockLists, partial: BlockLists, work: Tensor, places: Tensor | None) -> tuple[Any, ...]:
    """Each head's lines in the order of their work, the longest first."""
    order = work.argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return full.offsets, full.indices, partial.offsets, partial.indices, order, places


def _shape(layout: BlockLayout, lines: int) -> tuple[int, int, int]:
    return lines, layout.heads * lines if layout.batch > 1 else 0, lines if layout.heads > 1 else 0


def _band(layout: BlockLayout) -> tuple[int | None, int | None]:
    if layout.rule.band is None:
        return None, None
    left, right, diagonal = layout.rule.band
    low = None if left is None else diagonal - left
    high = None if right is None else diagonal + right
    return _held(low), _held(high)


def _held(bound: int | None) -> int | None:
    return None if bound is None else max(-FARTHEST, min(bound, FARTHEST))


def _event(device: torch.device) -> tuple[Any, Any] | None:
    if device.type != "cuda" or _is_capturing(device):
        return None
    stream = torch.cuda.current_stream(device)
    return stream.record_event(), stream


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
