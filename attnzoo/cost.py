"""FLOPs, bytes and memory of a problem: the IO model of FlashAttention (Dao et al., arXiv 2205.14135)."""

from __future__ import annotations

from dataclasses import dataclass

from attnzoo.spec import AttentionSpec

__all__ = ["Cost", "attended_pairs", "predict"]

FORWARD_PRODUCTS_QK, FORWARD_PRODUCTS_V = 1, 1  # S = Q K^T; O = P V
BACKWARD_PRODUCTS_QK, BACKWARD_PRODUCTS_V = 3, 2  # S again, dQ, dK; dP, dV


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one call, its backward included where gradients are asked for.

    Attributes:
        flops: of the matrix products over attended pairs, a multiply-add counted as 2.
        hbm_bytes: bytes to and from device memory.
        extra_bytes: memory beyond inputs, output and gradients.
    """

    flops: int
    hbm_bytes: int
    extra_bytes: int


def attended_pairs(spec: AttentionSpec) -> int:
    """Query-key pairs that causal, window and layout leave, over batch and query heads.

    Masks, segments and -inf biases are data, so they are not counted; with a layout the share of its blocks
    stands for its pairs.
    """
    left, right = spec.band
    first = 0 if left is None else _clamped_sum(spec.diagonal - left, spec.q_len, spec.kv_len)
    last = spec.q_len * spec.kv_len if right is None else _clamped_sum(spec.diagonal + right + 1, spec.q_len, spec.kv_len)
    pairs = (last - first) * spec.batch * spec.q_heads
    if spec.layout is None or not pairs:
        return pairs
    blocks = spec.layout.full_blocks + spec.layout.partial_blocks
    rows, columns = -(-spec.q_len // spec.layout.block_q), -(-spec.kv_len // spec.layout.block_kv)
    return int(pairs * blocks / (rows * columns * spec.layout.batch * spec.layout.heads))


def _clamped_sum(start: int, count: int, limit: int) -> int:
    """The sum of `start + i`, each held between 0 and limit, over i from 0 to count - 1."""
    rises = min(max(-start, 0), count)  # from here on above 0,
    stops = min(max(limit - start, 0), count)  # and from here on at the limit
    return (stops - rises) * (2 * start + rises + stops - 1) // 2 + (count - stops) * limit


def predict(spec: AttentionSpec, *, materializes_scores: bool) -> Cost:
    """Standard attention if the scores are materialised, else FlashAttention with its compulsory bytes."""
    item, accumulator = spec.dtype.itemsize, spec.accumulator_dtype.itemsize
    pairs = attended_pairs(spec)
    q = spec.batch * spec.q_heads * spec.q_len * spec.head_dim
    o = spec.batch * spec.q_heads * spec.q_len * spec.value_dim
    kv = spec.batch * spec.kv_heads * spec.kv_len * (spec.head_dim + spec.value_dim)
    rows = spec.batch * spec.q_heads * spec.q_len
    scores = rows * spec.kv_len
    flops = 2 * pairs * (FORWARD_PRODUCTS_QK * spec.head_dim + FORWARD_PRODUCTS_V * spec.value_dim)
    moved = (q + kv + o) * item + rows * accumulator
    extra = rows * accumulator
    if materializes_scores:
        moved += 4 * scores * accumulator  # S written and read, P written and read
        extra += 2 * scores * accumulator
    if spec.grads:
        flops += 2 * pairs * (BACKWARD_PRODUCTS_QK * spec.head_dim + BACKWARD_PRODUCTS_V * spec.value_dim)
        moved += (2 * q + 2 * kv + 2 * o) * item + rows * accumulator  # q, k, v, o, dO and the lse read, dq, dk, dv written
        extra += rows * accumulator + q * accumulator
        if materializes_scores:
            moved += 7 * scores * accumulator  # P read twice, dP written and read, dS written and read twice
            extra += 2 * scores * accumulator
    return Cost(flops, moved, extra)
