"""What the kernels share: where a program works, tiles in and out, scores, the online softmax step.

A tensor comes as a tuple: its pointer, then its strides in elements. The last stride of q, k, v and their
kin is 1. Broadcast dims of mask and bias have stride 0. A feature that the call doesn't use is None, an
absent mask or bias (None,).

Scores are FOLDED where nothing but a positive scale stands between the product and the softmax: they stay
raw products, and `scale` brings them to powers of two in one fused multiply-add. Otherwise they are in
natural units and only differences meet log2(e), which would overflow a bias of finfo.min.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SEGMENT_TILE = tl.constexpr(64)
ROW_PADDING = tl.constexpr(128)
COARSE = tl.constexpr(1024.0)
"""An lse beyond this is rounded to more than 2^-14, and from 1e8 on it no longer tells one key from a thousand."""


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
def load_rows(
    pointer,
    row_stride,
    first,
    length,
    DIM: tl.constexpr,
    OTHER_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CUT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A `(ROWS, padded DIM)` tile from row `first` on; zero beyond DIM and, where CUT, beyond `length`.

    OTHER_DIM is the other of the call's head dims, see `padded`.
    """
    BLOCK_D: tl.constexpr = padded(DIM, OTHER_DIM)
    addresses = pointer + tl.cast(first, tl.int64) * row_stride + row_offsets(row_stride, ROWS, BLOCK_D, WIDE)
    in_dim = (tl.arange(0, BLOCK_D) < DIM)[None, :]
    in_length = (first + tl.arange(0, ROWS) < length)[:, None]
    if CUT and DIM < BLOCK_D:
        return tl.load(addresses, mask=in_length & in_dim, other=0.0)
    if CUT:
        return tl.load(addresses, mask=in_length, other=0.0)
    if DIM < BLOCK_D:
        return tl.load(addresses, mask=in_dim, other=0.0)
    return tl.load(addresses)


@triton.jit
def store_rows(pointer, row_stride, first, length, tile, DIM: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Store a `(ROWS, padded DIM)` tile, cut at DIM and at `length`."""
    BLOCK_D: tl.constexpr = tile.shape[1]
    addresses = pointer + tl.cast(first, tl.int64) * row_stride + row_offsets(row_stride, ROWS, BLOCK_D, WIDE)
    kept = (first + tl.arange(0, ROWS) < length)[:, None] & (tl.arange(0, BLOCK_D) < DIM)[None, :]
    tl.store(addresses, tile.to(pointer.dtype.element_ty), mask=kept)


@triton.jit
def load_pairs(table, batch, head, i, j, q_len, kv_len):
    """The `(i, j)` elements of a mask or bias; 64-bit offsets, for it may hold more than 2^31 of them.

    Its row stride is None where all rows are one, its column stride where columns are neighbours.
    """
    pointer, batch_stride, head_stride, row_stride, column_stride = table
    address = pointer + batch * batch_stride + head * head_stride
    in_range = j < kv_len
    if row_stride is not None:
        address += i.to(tl.int64) * row_stride
        in_range = in_range & (i < q_len)
    if column_stride is not None:
        return tl.load(address + j.to(tl.int64) * column_stride, mask=in_range, other=0)
    return tl.load(address + j, mask=in_range, other=0)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """`a @ b + acc` in fp32. "upcast" is for Triton's interpreter, whose bfloat16 product is wrong."""
    if PRECISION == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


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
def keep_tile(i, j, batch, head, mask, segments, lengths, band):
    """Which pairs attend; i and j are index tiles that broadcast to the tile's shape."""
    q_len, kv_len = lengths
    left, right, diagonal = band
    kept = j < kv_len
    if left is not None:
        kept = kept & (j - i >= diagonal - left)
    if right is not None:
        kept = kept & (j - i <= diagonal + right)
    if mask[0] is not None:
        kept = kept & (load_pairs(mask, batch, head, i, j, q_len, kv_len) != 0)
    if segments is not None:
        q_ids, q_batch, q_row, kv_ids, kv_batch, kv_row, _, _ = segments
        q_id = tl.load(q_ids + batch * q_batch + i.to(tl.int64) * q_row, mask=i < q_len, other=0)
        kv_id = tl.load(kv_ids + batch * kv_batch + j.to(tl.int64) * kv_row, mask=j < kv_len, other=0)
        if q_id.dtype != kv_id.dtype:  # int8 and uint8 would be compared bit by bit
            q_id = q_id.to(tl.int64)
            kv_id = kv_id.to(tl.int64)
        kept = kept & (q_id == kv_id)
    return kept


@triton.jit
def tanh(x):
    """Good to fp32 near 0 too, where 1 - exp(-2 |x|) cancels."""
    square = x * x
    series = x * (1.0 + square * (-0.33333333 + square * (0.13333333 + square * (-0.053968254 + square * 0.021869489))))
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    ratio = (1.0 - decay) / (1.0 + decay)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def score_tile(product, i, j, batch, head, mask, bias, segments, lengths, band, scale, softcap, MASKED: tl.constexpr, FOLDED: tl.constexpr):
    """Scores, -inf where a pair may not attend, and their slope: the derivative by the scaled product."""
    s = product
    slope = 1.0
    if not FOLDED:
        s = product * scale
        if softcap is not None:
            capped = tanh(s / softcap)
            s = capped * softcap
            slope = 1.0 - capped * capped
        if bias[0] is not None:
            s += load_pairs(bias, batch, head, i, j, lengths[0], lengths[1]).to(tl.float32)
    if MASKED:
        s = tl.where(keep_tile(i, j, batch, head, mask, segments, lengths, band), s, -float("inf"))
    return s, slope


@triton.jit
def exp_above(s, pivot, scale, FOLDED: tl.constexpr):
    """exp(score - pivot); the pivot of FOLDED scores is in log2 units."""
    if FOLDED:
        return tl.exp2(s * scale - pivot)
    return tl.exp2((s - pivot) * LOG2E)


@triton.jit
def online_softmax(s, m_i, l_i, scale, GUARDED: tl.constexpr, FOLDED: tl.constexpr):
    """One step: weights `p` of the tile, factor `alpha` of what came before, new maximum and sum."""
    row_max = tl.max(s, 1)
    if FOLDED:
        row_max *= scale
    m_new = tl.maximum(m_i, row_max)
    pivot = m_new
    if GUARDED:
        pivot = tl.where(m_new == -float("inf"), 0.0, m_new)  # finite: a row with no key yet would give nan
    p = exp_above(s, pivot[:, None], scale, FOLDED)
    alpha = exp_above(m_i, pivot, 1.0, FOLDED)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def log_sum_exp(m_i, l_i, FOLDED: tl.constexpr):
    """Natural log-sum-exp of each row, -inf where it saw no key."""
    log2_sum = tl.log2(tl.where(l_i == 0.0, 1.0, l_i))
    lse = (m_i + log2_sum) * LN2 if FOLDED else m_i + log2_sum * LN2
    return tl.where(l_i == 0.0, -float("inf"), lse)


@triton.jit
def first_stat(batch, head, heads, q_len):
    """Where a head's rows begin in pivot and delta, which are padded so that loads need no mask and are vectors."""
    return (batch * heads + head) * (tl.cdiv(q_len, ROW_PADDING) * ROW_PADDING)


@triton.jit
def dropout_pairs(dropout, batch, head, i, j):
    """As `dropout_tile`, of any pairs: one Philox call for each."""
    seed_ptr, threshold, _ = dropout
    zero = (i + j) * 0
    words = (zero + j // 4, zero + i, zero + head.to(tl.int32), zero + batch.to(tl.int32))
    lane0, lane1, lane2, lane3 = tl.philox(tl.load(seed_ptr), words[0], words[1], words[2], words[3])
    lane = zero + j % 4
    bits = tl.where(lane < 2, tl.where(lane == 0, lane0, lane1), tl.where(lane == 2, lane2, lane3))
    return bits >= tl.cast(tl.cast(threshold, tl.int32), tl.uint32, bitcast=True)


@triton.jit
def dropout_tile(dropout, batch, head, i, first, COLUMNS: tl.constexpr):
    """Keep-tile `(rows of i, COLUMNS)` from key `first` on, a multiple of 4: one Philox call for four keys.

    One for each pair where the tile has 16 rows or columns: behind a `tl.join` and a load of 8 bits, a product over 16
    counts each element twice in Triton 3.6 and 3.7.
    """
    if min(i.shape[0], COLUMNS) < 32:
        return dropout_pairs(dropout, batch, head, i, (first + tl.arange(0, COLUMNS))[None, :])
    seed_ptr, threshold, _ = dropout
    quad = (first // 4 + tl.arange(0, COLUMNS // 4))[None, :]
    zero = (i + quad) * 0
    words = (zero + quad, zero + i, zero + head.to(tl.int32), zero + batch.to(tl.int32))
    lane0, lane1, lane2, lane3 = tl.philox(tl.load(seed_ptr), words[0], words[1], words[2], words[3])
    bits = tl.reshape(tl.join(tl.join(lane0, lane2), tl.join(lane1, lane3)), [zero.shape[0], COLUMNS])
    return bits >= tl.cast(tl.cast(threshold, tl.int32), tl.uint32, bitcast=True)


@triton.jit
def id_range(bounds_ptr, tiles, first, last):
    """Smallest and largest segment id of positions first..last, or of a few more around them."""
    tile = first // SEGMENT_TILE + tl.arange(0, 8)
    within = (tile <= last // SEGMENT_TILE) & (tile < tiles)
    smallest = tl.load(bounds_ptr + 2 * tile, mask=within, other=2**63 - 1)
    largest = tl.load(bounds_ptr + 2 * tile + 1, mask=within, other=-(2**63))
    return tl.min(smallest, 0), tl.max(largest, 0)


@triton.jit
def segment_walk(here_ptr, here_len, there_ptr, there_len, batch, first, last, start, stop, STEP: tl.constexpr):
    """The part of start..stop outside of which no id equals one of positions first..last."""
    here_tiles = tl.cdiv(here_len, SEGMENT_TILE)
    there_tiles = tl.cdiv(there_len, SEGMENT_TILE)
    low, high = id_range(here_ptr + batch * here_tiles * 2, here_tiles, first, last)
    first_tile = there_tiles
    end_tile = there_tiles * 0
    for chunk in range(0, there_tiles, 128):
        tile = chunk + tl.arange(0, 128)
        bounds = there_ptr + (batch * there_tiles + tile) * 2
        smallest = tl.load(bounds, mask=tile < there_tiles, other=2**63 - 1)
        largest = tl.load(bounds + 1, mask=tile < there_tiles, other=-(2**63))
        meets = (largest >= low) & (smallest <= high)
        first_tile = tl.minimum(first_tile, tl.min(tl.where(meets, tile, there_tiles), 0))
        end_tile = tl.maximum(end_tile, tl.max(tl.where(meets, tile + 1, 0), 0))
    start = tl.maximum(start, first_tile * SEGMENT_TILE // STEP * STEP)
    return start, tl.maximum(tl.minimum(stop, end_tile * SEGMENT_TILE), start)
