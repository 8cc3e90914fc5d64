"""What the kernels of both packages compute of a tile: its scores, the softmax, dropout, and the gradients' parts.

`call` is what a call says of each pair: `(mask, bias, segments, dropout, lengths, band, scale, softcap)`. Broadcast dims of
mask and bias have stride 0. A feature that the call doesn't use is None, an absent mask or bias (None,). `i` and `j` are
index tiles of queries and keys that broadcast to the tile's shape.

Scores are FOLDED where nothing but a positive scale stands between the product and the softmax: they stay
raw products, and `scale` brings them to powers of two in one fused multiply-add. Otherwise they are in
natural units and only differences meet log2(e), which would overflow a bias of finfo.min.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.backends.triton.tiles import load_rows, row_stat

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
COARSE = tl.constexpr(1024.0)
"""An lse beyond this is rounded to more than 2^-14, and from 1e8 on it no longer tells one key from a thousand."""


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """`a @ b + acc` in fp32. "upcast" is for Triton's interpreter, whose bfloat16 product is wrong."""
    if PRECISION == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


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
def keep_tile(i, j, batch, head, mask, segments, lengths, band):
    """Which pairs attend."""
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
def score_tile(own, streamed, i, j, batch, head, call, MASKED: tl.constexpr, FOLDED: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of two tiles of queries and keys, or of keys and queries, and their slope: the derivative by the scaled product.

    `(rows of own, rows of streamed)`; where MASKED, -inf for a pair that may not attend.
    """
    mask, bias, segments, _, lengths, band, scale, softcap = call
    product = dot(own, tl.trans(streamed), None, PRECISION)
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
def dropout_tile(dropout, batch, head, i, first, COLUMNS: tl.constexpr, FOURS: tl.constexpr):
    """Keep-tile `(rows of i, COLUMNS)` from key `first` on, a multiple of 4 if FOURS: then one Philox call serves four keys.

    It serves one pair where the tile has 16 rows or columns: behind a `tl.join` and a load of 8 bits, a product over 16
    counts each element twice in Triton 3.6 and 3.7.
    """
    if not FOURS or min(i.shape[0], COLUMNS) < 32:
        return dropout_pairs(dropout, batch, head, i, (first + tl.arange(0, COLUMNS))[None, :])
    seed_ptr, threshold, _ = dropout
    quad = (first // 4 + tl.arange(0, COLUMNS // 4))[None, :]
    zero = (i + quad) * 0
    words = (zero + quad, zero + i, zero + head.to(tl.int32), zero + batch.to(tl.int32))
    lane0, lane1, lane2, lane3 = tl.philox(tl.load(seed_ptr), words[0], words[1], words[2], words[3])
    bits = tl.reshape(tl.join(tl.join(lane0, lane2), tl.join(lane1, lane3)), [zero.shape[0], COLUMNS])
    return bits >= tl.cast(tl.cast(threshold, tl.int32), tl.uint32, bitcast=True)


@triton.jit
def first_state(sinks_ptr, head, ROWS: tl.constexpr):
    """Maximum and sum of rows of one head before their first key. A sink is a key with this score and no value."""
    m_i = tl.full([ROWS], -float("inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        m_i = tl.zeros([ROWS], tl.float32) + sink
        l_i += tl.where(sink == -float("inf"), 0.0, 1.0)
    return m_i, l_i


@triton.jit
def add_values(
    s,
    m_i,
    l_i,
    acc,
    v_rows,
    column,
    end,
    i,
    batch,
    head,
    call,
    VALUE_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    FOURS: tl.constexpr,
    FOLDED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`m_i`, `l_i` and `acc` with the values of the keys from `column` to `end`, whose scores are `s`."""
    _, bias, _, dropout, _, _, scale, _ = call
    p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, scale, MASKED or (bias[0] is not None), FOLDED)
    if dropout is not None:
        p = tl.where(dropout_tile(dropout, batch, head, i, column, s.shape[1], FOURS), p, 0.0)
    v_tile = load_rows(v_rows, column, end, VALUE_DIM, acc.shape[1], s.shape[1], MASKED, WIDE)
    return m_i, l_i, dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], PRECISION)  # (rows of i, Dv)


@triton.jit
def normalised(acc, l_i, dropout):
    """The output rows of the sums `acc` and `l_i`: 0 for a row that saw no key."""
    kept_scale = 1.0 if dropout is None else dropout[2]
    return acc * (kept_scale / tl.where(l_i == 0.0, 1.0, l_i))[:, None]


@triton.jit
def weights(s, pivot, norm_ptr, stat, in_rows, scale, KEYS_FIRST: tl.constexpr, FOLDED: tl.constexpr):
    """`P = norm exp(S - pivot)`, of a tile `(keys, queries)` if KEYS_FIRST; the norm of the rows at `stat`, see `row_stat`."""
    p = exp_above(s, pivot, scale, FOLDED)
    if norm_ptr is not None:
        norm = row_stat(norm_ptr, stat, in_rows, 0.0)
        p *= norm[None, :] if KEYS_FIRST else norm[:, None]
    return p


@triton.jit
def dropped(p, dp, dropout, batch, head, rows, column, FOURS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Weights as they met the values, and the gradients `dp` of those as gradients of `p`."""
    kept_p = p
    if dropout is not None:
        kept = dropout_tile(dropout, batch, head, rows[:, None], column, p.shape[0 if KEYS_FIRST else 1], FOURS)
        if KEYS_FIRST:
            kept = tl.trans(kept)
        kept_p = tl.where(kept, p * dropout[2], 0.0)
        dp = tl.where(kept, dp * dropout[2], 0.0)
    return kept_p, dp
