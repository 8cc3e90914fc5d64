"""Where the kernels of both packages work, and how their tiles come in and out.

A tensor comes as a tuple: its pointer, then its strides in elements. The last stride of q, k, v and their
kin is 1, and one head's rows are `(pointer, stride)`.
"""

from __future__ import annotations

import triton
import triton.language as tl

SEGMENT_TILE = tl.constexpr(64)
ROW_PADDING = tl.constexpr(128)


@triton.jit
def place(program, tiles, heads, total_heads, wave):
    """Tile, batch and head of a program: `wave` heads at a time, tile by tile, so that their keys stay in L2."""
    per_wave = tiles * wave
    first_head = program // per_wave * wave
    width = tl.minimum(total_heads - first_head, wave)
    within = program % per_wave
    flat = first_head + within % width
    return within // width, (flat // heads).to(tl.int64), (flat % heads).to(tl.int64)


@triton.jit
def head_of(tensor, batch, head):
    """Pointer to one head's rows, and their stride."""
    pointer, batch_stride, head_stride, row_stride = tensor
    return pointer + batch * batch_stride + head * head_stride, row_stride


@triton.jit
def row_offsets(row_stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Offsets within a tile: 64 bits only where its rows lie so far apart."""
    rows = tl.arange(0, ROWS)[:, None]
    steps = rows.to(tl.int64) * row_stride if WIDE else rows * tl.cast(row_stride, tl.int32)
    return steps + tl.arange(0, BLOCK_D)[None, :]


@triton.constexpr_function
def padded(dim, other):
    """The side of a tile of head dim `dim`: a power of two from 16 on.

    Where a tile of head dim `other` may take its place in shared memory, both have one swizzle, which 64 columns or more
    of 16 bits share: ptxas 12.8 shares the address of their wgmma descriptors, and then forgets to set it if they differ.
    """
    return max(16, triton.next_power_of_2(dim), min(64, triton.next_power_of_2(other)))


@triton.jit
def load_rows(head_rows, first, end, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CUT: tl.constexpr, WIDE: tl.constexpr):
    """A `(ROWS, BLOCK_D)` tile from row `first` on; zero beyond DIM and, where CUT, from row `end` on."""
    pointer, row_stride = head_rows
    addresses = pointer + tl.cast(first, tl.int64) * row_stride + row_offsets(row_stride, ROWS, BLOCK_D, WIDE)
    in_dim = (tl.arange(0, BLOCK_D) < DIM)[None, :]
    in_length = (first + tl.arange(0, ROWS) < end)[:, None]
    if CUT and DIM < BLOCK_D:
        return tl.load(addresses, mask=in_length & in_dim, other=0.0)
    if CUT:
        return tl.load(addresses, mask=in_length, other=0.0)
    if DIM < BLOCK_D:
        return tl.load(addresses, mask=in_dim, other=0.0)
    return tl.load(addresses)


@triton.jit
def store_rows(head_rows, first, end, tile, DIM: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Store a `(ROWS, BLOCK_D)` tile, cut at DIM and at row `end`."""
    pointer, row_stride = head_rows
    BLOCK_D: tl.constexpr = tile.shape[1]
    addresses = pointer + tl.cast(first, tl.int64) * row_stride + row_offsets(row_stride, ROWS, BLOCK_D, WIDE)
    kept = (first + tl.arange(0, ROWS) < end)[:, None] & (tl.arange(0, BLOCK_D) < DIM)[None, :]
    tl.store(addresses, tile.to(pointer.dtype.element_ty), mask=kept)


@triton.jit
def visible(first, last, length, before, after, shift, STEP: tl.constexpr):
    """Bounds of the walk for positions first..last: p sees p + shift - before .. p + shift + after.

    Returns start, free_start, free_stop, stop: from free_start to free_stop whole STEPs are seen by all.
    """
    start = first * 0
    free_start = start
    stop = start + length
    free_stop = length // STEP * STEP
    if before is not None:
        start = tl.minimum(tl.maximum(first + shift - before, 0), length) // STEP * STEP
        free_start = tl.maximum(tl.cdiv(last + shift - before, STEP) * STEP, start)
    if after is not None:
        stop = tl.maximum(tl.minimum(length, last + shift + after + 1), start)
        free_stop = tl.minimum(free_stop, tl.maximum(first + shift + after + 1, 0) // STEP * STEP)
    free_start = tl.minimum(free_start, tl.cdiv(stop, STEP) * STEP)
    free_stop = tl.maximum(free_stop, free_start)
    return start, free_start, free_stop, tl.maximum(stop, start)


@triton.jit
def first_stat(batch, head, heads, q_len):
    """Where a head's rows begin in pivot and delta, which are padded so that loads need no mask and are vectors."""
    return (batch * heads + head) * (tl.cdiv(q_len, ROW_PADDING) * ROW_PADDING)


@triton.jit
def row_stat(pointer, stat, in_rows, other):
    """Pivot, delta or norm of the rows at `stat`; `other` for those that `in_rows` leaves out, if it isn't None."""
    return tl.load(pointer + stat, mask=in_rows, other=None if in_rows is None else other)


@triton.jit
def id_range(bounds_ptr, tiles, first, last):
    """Smallest and largest segment id of positions first..last, or of a few more around them."""
    tile = first // SEGMENT_TILE + tl.arange(0, 8)
    within = (tile <= last // SEGMENT_TILE) & (tile < tiles)
    smallest = tl.load(bounds_ptr + 2 * tile, mask=within, other=2**63 - 1)
    largest = tl.load(bounds_ptr + 2 * tile + 1, mask=within, other=-(2**63))
    return tl.min(smallest, 0), tl.max(largest, 0)


@triton.jit
def segment_walk(segments, lengths, batch, first, last, bounds, STEP: tl.constexpr, OF_KEYS: tl.constexpr):
    """The bounds of `visible`, start and stop moved to where an id equals one of positions first..last.

    These are keys, past which queries stream, if OF_KEYS, else queries.
    """
    start, free_start, free_stop, stop = bounds
    if segments is not None:
        here_ptr = segments[7] if OF_KEYS else segments[6]
        there_ptr = segments[6] if OF_KEYS else segments[7]
        here_tiles = tl.cdiv(lengths[1] if OF_KEYS else lengths[0], SEGMENT_TILE)
        there_tiles = tl.cdiv(lengths[0] if OF_KEYS else lengths[1], SEGMENT_TILE)
        low, high = id_range(here_ptr + batch * here_tiles * 2, here_tiles, first, last)
        first_tile = there_tiles
        end_tile = there_tiles * 0
        for chunk in range(0, there_tiles, 128):
            tile = chunk + tl.arange(0, 128)
            addresses = there_ptr + (batch * there_tiles + tile) * 2
            smallest = tl.load(addresses, mask=tile < there_tiles, other=2**63 - 1)
            largest = tl.load(addresses + 1, mask=tile < there_tiles, other=-(2**63))
            meets = (largest >= low) & (smallest <= high)
            first_tile = tl.minimum(first_tile, tl.min(tl.where(meets, tile, there_tiles), 0))
            end_tile = tl.maximum(end_tile, tl.max(tl.where(meets, tile + 1, 0), 0))
        start = tl.maximum(start, first_tile * SEGMENT_TILE // STEP * STEP)
        stop = tl.maximum(tl.minimum(stop, end_tile * SEGMENT_TILE), start)
    return start, free_start, free_stop, stop
