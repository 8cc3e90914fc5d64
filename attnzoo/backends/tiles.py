"""Which tiles of the score matrix are computed, and what each of them still has to mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo.inputs import AttentionInputs
from attnzoo.layout import BlockLayout, BlockLists
from attnzoo.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Largest tile: queries, keys, and how many (batch, query head) pairs are computed side by side."""

    rows: int
    columns: int
    heads: int


@dataclass(frozen=True, slots=True)
class PartialBlocks:
    """Some of a layout's partial blocks, and the rows and columns within each that a tile takes."""

    which: slice
    rows: slice
    columns: slice


@dataclass(frozen=True, eq=False, slots=True)
class Tile:
    """A tile to compute.

    Attributes:
        rows: its queries.
        runs: its keys, as ascending ranges.
        columns: its keys, as what indexes a tensor: the one run, or int64 indices where there are several.
        partial: the layout's partial blocks that it consists of; None where it has no element rule.
        crosses_band: some pair lies outside causal or window.
        crosses_segments: some pair may lie in two segments.
    """

    rows: slice
    runs: tuple[slice, ...]
    columns: slice | Tensor
    partial: PartialBlocks | None = None
    crosses_band: bool = False
    crosses_segments: bool = False

    @classmethod
    def of_run(cls, rows: slice, run: slice, partial: PartialBlocks | None = None) -> Tile:
        return cls(rows, (run,), run, partial)

    def keys_of(self, tensor: Tensor) -> Tensor:
        """The tile's part of `(n, Skv, D)`: a view where its keys are neighbours."""
        return tensor[:, self.columns] if isinstance(self.columns, slice) else tensor.index_select(1, self.columns)


def choose_sizes(spec: AttentionSpec) -> TileSizes:
    """Sizes that keep a tile in cache on a CPU, and keep a GPU busy.

    On CPU 2**20 scores, 4 MiB in fp32: they stay in L3 between the twenty operations on them, which are in turn
    long enough to hide what it costs to launch them.
    """
    scores, rows, columns = (2**20, 256, 512) if spec.device.type == "cpu" else (2**24, 1024, 2048)
    if spec.batch * spec.q_heads * rows * columns < scores:
        rows *= 2
    if spec.layout is not None and spec.layout.block_q < rows:
        rows, columns = spec.layout.block_q, columns * min(rows // spec.layout.block_q, 4)
    rows = max(1, min(rows, spec.q_len, max(scores // (columns * spec.group), 16)))
    columns = max(1, min(columns, spec.kv_len))
    return TileSizes(rows, columns, max(1, scores // (rows * columns)))


def query_tiles(spec: AttentionSpec, inputs: AttentionInputs, sizes: TileSizes, layout_head: int = 0) -> Iterator[tuple[slice, list[Tile]]]:
    """Every range of queries, with the tiles that causal, window, segments and layout leave.

    Segment ids are read on CPU alone: elsewhere that would wait for the device, so there they skip nothing.

    Args:
        inputs: of the heads that are computed side by side; a tile is skipped if none of them needs it.
        layout_head: place of these heads in the layout's `(batch, heads)`.
    """
    has_segments = inputs.q_segment_ids is not None
    for rows in row_ranges(spec, inputs.layout, sizes):
        reach = SegmentReach.of(inputs, rows) if has_segments and spec.device.type == "cpu" else None
        visible = visible_keys(spec, rows) if reach is None else reach.trim(visible_keys(spec, rows))
        if inputs.layout is None:
            tiles = column_tiles(rows, visible, sizes)
        else:
            tiles = layout_tiles(inputs.layout, layout_head, rows, visible, sizes)
        yield rows, [_with_crossings(spec, tile, reach, has_segments) for tile in tiles if reach is None or reach.meets(tile)]


def row_ranges(spec: AttentionSpec, layout: BlockLayout | None, sizes: TileSizes) -> Iterator[slice]:
    """Ranges of queries, none across two block rows of a layout."""
    step = spec.q_len if layout is None else layout.block_q
    for start in range(0, spec.q_len, max(step, 1)):
        stop = min(start + step, spec.q_len)
        for first in range(start, stop, sizes.rows):
            yield slice(first, min(first + sizes.rows, stop))


def visible_keys(spec: AttentionSpec, rows: slice) -> slice:
    """The keys that causal and window leave to at least one of the rows."""
    left, right = spec.band
    first = 0 if left is None else max(0, rows.start + spec.diagonal - left)
    stop = spec.kv_len if right is None else min(spec.kv_len, rows.stop + spec.diagonal + right)
    return slice(first, max(first, stop))


def column_tiles(rows: slice, visible: slice, sizes: TileSizes) -> Iterator[Tile]:
    for first in range(visible.start, visible.stop, sizes.columns):
        yield Tile.of_run(rows, slice(first, min(first + sizes.columns, visible.stop)))


def _with_crossings(spec: AttentionSpec, tile: Tile, reach: SegmentReach | None, has_segments: bool) -> Tile:
    left, right = spec.band
    above = right is not None and tile.runs[-1].stop - 1 > tile.rows.start + spec.diagonal + right
    below = left is not None and tile.runs[0].start < tile.rows.stop - 1 + spec.diagonal - left
    crosses_segments = has_segments and (reach is None or not reach.covers(tile))
    if not (above or below or crosses_segments):
        return tile
    return Tile(tile.rows, tile.runs, tile.columns, tile.partial, above or below, crosses_segments)


@dataclass(frozen=True, eq=False, slots=True)
class SegmentReach:
    """Which keys some rows may reach through their segment ids. Ids need not be sorted.

    Attributes:
        kv_ids: `(B, Skv)`.
        only_id: `(B, 1)` the one id of the rows; None if they have several.
        reached: `(Skv,)` True where the key's id lies between the lowest and the highest of the rows, in any batch.
    """

    kv_ids: Tensor
    only_id: Tensor | None
    reached: Tensor

    @classmethod
    def of(cls, inputs: AttentionInputs, rows: slice) -> SegmentReach:
        assert inputs.q_segment_ids is not None
        assert inputs.kv_segment_ids is not None
        kv_ids = inputs.kv_segment_ids.long()  # some unsigned types can't be ordered
        low, high = inputs.q_segment_ids[:, rows].long().aminmax(dim=1, keepdim=True)
        reached = ((kv_ids >= low) & (kv_ids <= high)).any(0)
        return cls(kv_ids, low if bool((low == high).all()) else None, reached)

    def trim(self, visible: slice) -> slice:
        """From the first to the last of the visible keys that is reached."""
        places = self.reached[visible].nonzero()
        if not len(places):
            return slice(visible.start, visible.start)
        return slice(visible.start + int(places[0]), visible.start + int(places[-1]) + 1)

    def meets(self, tile: Tile) -> bool:
        return bool(self.reached[tile.columns].any())

    def covers(self, tile: Tile) -> bool:
        """Every pair of the tile lies in one segment."""
        return self.only_id is not None and bool((self.kv_ids[:, tile.columns] == self.only_id).all())


def layout_tiles(layout: BlockLayout, head: int, rows: slice, visible: slice, sizes: TileSizes) -> Iterator[Tile]:
    """The blocks of one block row, as many to a tile as its columns hold, full and partial ones apart."""
    row = head * layout.rows + rows.start // layout.block_q
    blocks_per_tile = max(1, sizes.columns // layout.block_kv)
    for on_host, lists, is_partial in zip(layout.host_lists, (layout.full, layout.partial), (False, True)):
        first, stop = on_host.offsets[row : row + 2].tolist()
        edges = on_host.indices.new_tensor([visible.start // layout.block_kv, -(-visible.stop // layout.block_kv)])
        low, high = (first + torch.searchsorted(on_host.indices[first:stop], edges)).tolist()
        for place in range(low, high, blocks_per_tile):
            which = slice(place, min(place + blocks_per_tile, high))
            blocks = on_host.indices[which].tolist()
            if blocks[-1] - blocks[0] == len(blocks) - 1:
                yield from _neighbouring_blocks(layout, rows, visible, which, blocks, is_partial, sizes)
            else:
                yield _gathered_blocks(layout, rows, lists, which, blocks, is_partial)


def _neighbouring_blocks(
    layout: BlockLayout, rows: slice, visible: slice, which: slice, blocks: list[int], is_partial: bool, sizes: TileSizes
) -> Iterator[Tile]:
    start, stop = blocks[0] * layout.block_kv, min((blocks[-1] + 1) * layout.block_kv, layout.kv_len)
    if not is_partial:
        yield from column_tiles(rows, slice(max(start, visible.start), min(stop, visible.stop)), sizes)
    elif len(blocks) > 1:
        yield Tile.of_run(rows, slice(start, stop), _within(layout, rows, which, slice(0, layout.block_kv)))
    else:
        for first in range(start, stop, sizes.columns):
            run = slice(first, min(first + sizes.columns, stop))
            if run.start < visible.stop and run.stop > visible.start:
                yield Tile.of_run(rows, run, _within(layout, rows, which, slice(run.start - start, run.stop - start)))


def _gathered_blocks(layout: BlockLayout, rows: slice, lists: BlockLists, which: slice, blocks: list[int], is_partial: bool) -> Tile:
    size = layout.block_kv
    runs = tuple([slice(block * size, min((block + 1) * size, layout.kv_len)) for block in blocks])
    starts = lists.indices[which].long()[:, None] * size
    keys = (starts + torch.arange(size, device=starts.device)).flatten()
    cut = size - (runs[-1].stop - runs[-1].start)  # of a last block that is cut
    return Tile(rows, runs, keys[: len(keys) - cut], _within(layout, rows, which, slice(0, size)) if is_partial else None)


def _within(layout: BlockLayout, rows: slice, which: slice, columns: slice) -> PartialBlocks:
    block_start = rows.start // layout.block_q * layout.block_q
    return PartialBlocks(which, slice(rows.start - block_start, rows.stop - block_start), columns)
