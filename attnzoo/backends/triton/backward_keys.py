"""backward_keys_kernel: dK and dV of a tile of keys, past which the queries of its head group stream."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.calls import call_backward_keys
from attnzoo.backends.triton.delta import RowStatistics
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, Problem
from attnzoo.backends.triton.steps import dot, dropped, score_tile, weights
from attnzoo.backends.triton.tiles import first_stat, head_of, load_rows, padded, place, segment_walk, store_rows, visible


@triton.jit
def backward_keys_kernel(
    q,
    k,
    v,
    grad_o,
    grad_k,
    grad_v,
    pivot_ptr,
    delta_ptr,
    norm_ptr,
    mask,
    bias,
    segments,
    dropout,
    sizes,
    band,
    scale,
    softcap,
    grad_scale,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST_PHASE: tl.constexpr,
    LAST_PHASE: tl.constexpr,
    GROUPED: tl.constexpr,
    FOLDED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`dV = P^T dO` and `dK = scale dS^T Q`, with `P = exp(S - pivot)` and `dS = P (dO V^T - delta)`.

    Tiles are keys by queries, so that P^T and dS^T are operands as they stand. Tensors: as in the forward;
    grad_k, grad_v like k and v, either may be None; pivot, delta `(B, Hq, padded Sq)` fp32. One program a tile of keys
    of one kv head; it walks all query heads of the group, and nothing is added to memory that others write.
    """
    BLOCK_D: tl.constexpr = padded(HEAD_DIM, VALUE_DIM)
    BLOCK_DV: tl.constexpr = padded(VALUE_DIM, HEAD_DIM)
    batches, q_heads, group, q_len, kv_len, wave = sizes
    lengths = (q_len, kv_len)
    left, right, diagonal = band
    call = (mask, bias, segments, dropout, lengths, band, scale, softcap)
    kv_heads = q_heads // group
    tile, batch, kv_head = place(tl.program_id(0), tl.cdiv(kv_len, BLOCK_N), kv_heads, batches * kv_heads, wave)
    column = tile * BLOCK_N
    j = (column + tl.arange(0, BLOCK_N))[:, None]
    k_rows, v_rows = head_of(k, batch, kv_head), head_of(v, batch, kv_head)
    k_tile = load_rows(k_rows, column, kv_len, HEAD_DIM, BLOCK_D, BLOCK_N, True, WIDE)  # (BLOCK_N, D)
    v_tile = load_rows(v_rows, column, kv_len, VALUE_DIM, BLOCK_DV, BLOCK_N, True, WIDE)  # (BLOCK_N, Dv)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    walk = visible(column, tl.minimum(column + BLOCK_N, kv_len) - 1, q_len, right, left, -diagonal, BLOCK_M)
    walk = segment_walk(segments, lengths, batch, column, column + BLOCK_N - 1, walk, BLOCK_M, True)
    for phase in tl.static_range(FIRST_PHASE, LAST_PHASE + 1):
        begin = walk[phase] if phase > FIRST_PHASE else walk[0]
        end = walk[phase + 1] if phase < LAST_PHASE else walk[3]
        steps = tl.cdiv(end - begin, BLOCK_M)
        for step in tl.range(0, steps * group if GROUPED else steps):
            head = kv_head * group + step // steps if GROUPED else kv_head
            row = begin + (step % steps if GROUPED else step) * BLOCK_M
            q_rows, g_rows = head_of(q, batch, head), head_of(grad_o, batch, head)
            rows = tl.multiple_of(row, BLOCK_M) + tl.arange(0, BLOCK_M)
            stat = first_stat(batch, head, q_heads, q_len) + rows
            i = rows[None, :]
            q_tile = load_rows(q_rows, row, q_len, HEAD_DIM, BLOCK_D, BLOCK_M, True, WIDE)
            s, slope = score_tile(k_tile, q_tile, i, j, batch, head, call, phase != 1, FOLDED, PRECISION)  # (BLOCK_N, BLOCK_M)
            p = weights(s, tl.load(pivot_ptr + stat)[None, :], norm_ptr, stat, None, scale, True, FOLDED)
            g_tile = load_rows(g_rows, row, q_len, VALUE_DIM, BLOCK_DV, BLOCK_M, True, WIDE)
            dp = dot(v_tile, tl.trans(g_tile), None, PRECISION)  # (BLOCK_N, BLOCK_M)
            kept_p, dp = dropped(p, dp, dropout, batch, head, rows, column, True, True)
            if grad_v is not None:
                dv = dot(kept_p.to(g_tile.dtype), g_tile, dv, PRECISION)
            if grad_k is not None:
                ds = p * (dp - tl.load(delta_ptr + stat)[None, :]) * slope
                dk = dot(ds.to(q_tile.dtype), q_tile, dk, PRECISION)

    if grad_k is not None:
        store_rows(head_of(grad_k, batch, kv_head), column, kv_len, dk * grad_scale, HEAD_DIM, BLOCK_N, WIDE)
    if grad_v is not None:
        store_rows(head_of(grad_v, batch, kv_head), column, kv_len, dv, VALUE_DIM, BLOCK_N, WIDE)


KERNEL = Kernel(backward_keys_kernel)


def plan(facts: Facts, wide: bool, has_grad_k: bool, has_grad_v: bool) -> Plan:
    spec, tile = facts.spec, facts.tile("backward_keys")
    first, last = facts.query_phases
    constants = {**facts.constants(tile, FIRST_PHASE=first, LAST_PHASE=last, GROUPED=spec.group > 1), "WIDE": wide}
    streamed = spec.q_len * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize * spec.group
    programs = spec.batch * spec.kv_heads * -(-spec.kv_len // tile.block_n)
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(streamed, spec.kv_heads), programs, has_grad_k, has_grad_v)


def backward_keys(problem: Problem, grad_o: Tensor, stats: RowStatistics, grad_k: Tensor | None, grad_v: Tensor | None) -> None:
    """Fill `grad_k` and `grad_v`, either of which may be None."""
    call_backward_keys(plan, problem, grad_o, stats, grad_k, grad_v)
