"""backward_queries_kernel: dQ of a tile of queries, past which keys and values stream."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.calls import call_backward_queries
from attnzoo.backends.triton.delta import RowStatistics
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, Problem
from attnzoo.backends.triton.steps import dot, dropped, score_tile, weights
from attnzoo.backends.triton.tiles import first_stat, head_of, load_rows, padded, place, segment_walk, store_rows, visible


@triton.jit
def backward_queries_kernel(
    q,
    k,
    v,
    grad_o,
    grad_q,
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
    FOLDED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`dQ = scale dS K`, with `P = exp(S - pivot)` and `dS = P (dO V^T - delta)`.

    Tensors: as in the forward; grad_q like q; pivot, delta `(B, Hq, padded Sq)` fp32. One program a tile of queries.
    """
    BLOCK_D: tl.constexpr = padded(HEAD_DIM, VALUE_DIM)
    BLOCK_DV: tl.constexpr = padded(VALUE_DIM, HEAD_DIM)
    batches, q_heads, group, q_len, kv_len, wave = sizes
    lengths = (q_len, kv_len)
    left, right, diagonal = band
    call = (mask, bias, segments, dropout, lengths, band, scale, softcap)
    tiles = tl.cdiv(q_len, BLOCK_M)
    tile, batch, head = place(tl.program_id(0), tiles, q_heads, batches * q_heads, wave)
    row = (tiles - 1 - tile) * BLOCK_M  # under causal the last tiles are the longest, so they go first
    rows = row + tl.arange(0, BLOCK_M)
    i = rows[:, None]
    q_rows, k_rows = head_of(q, batch, head), head_of(k, batch, head // group)
    v_rows, g_rows = head_of(v, batch, head // group), head_of(grad_o, batch, head)
    stat = first_stat(batch, head, q_heads, q_len) + rows
    q_tile = load_rows(q_rows, row, q_len, HEAD_DIM, BLOCK_D, BLOCK_M, True, WIDE)  # (BLOCK_M, D)
    g_tile = load_rows(g_rows, row, q_len, VALUE_DIM, BLOCK_DV, BLOCK_M, True, WIDE)  # (BLOCK_M, Dv)
    pivot = tl.load(pivot_ptr + stat)[:, None]
    delta = tl.load(delta_ptr + stat)[:, None]
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    walk = visible(row, tl.minimum(row + BLOCK_M, q_len) - 1, kv_len, left, right, diagonal, BLOCK_N)
    walk = segment_walk(segments, lengths, batch, row, row + BLOCK_M - 1, walk, BLOCK_N, False)
    for phase in tl.static_range(FIRST_PHASE, 3):
        begin = walk[phase] if phase > FIRST_PHASE else walk[0]
        for step in tl.range(0, tl.cdiv(walk[phase + 1] - begin, BLOCK_N)):  # from 0: other bounds make ptxas serialize wgmma (C7515)
            column = begin + step * BLOCK_N
            j = (column + tl.arange(0, BLOCK_N))[None, :]
            k_tile = load_rows(k_rows, column, kv_len, HEAD_DIM, BLOCK_D, BLOCK_N, phase != 1, WIDE)
            v_tile = load_rows(v_rows, column, kv_len, VALUE_DIM, BLOCK_DV, BLOCK_N, phase != 1, WIDE)
            s, slope = score_tile(q_tile, k_tile, i, j, batch, head, call, phase != 1, FOLDED, PRECISION)  # (BLOCK_M, BLOCK_N)
            p = weights(s, pivot, norm_ptr, stat, None, scale, False, FOLDED)
            dp = dot(g_tile, tl.trans(v_tile), None, PRECISION)
            _kept_p, dp = dropped(p, dp, dropout, batch, head, rows, column, True, False)
            ds = p * (dp - delta) * slope
            dq = dot(ds.to(k_tile.dtype), k_tile, dq, PRECISION)

    store_rows(head_of(grad_q, batch, head), row, q_len, dq * grad_scale, HEAD_DIM, BLOCK_M, WIDE)


KERNEL = Kernel(backward_queries_kernel)


def plan(facts: Facts, wide: bool) -> Plan:
    spec, tile = facts.spec, facts.tile("backward_queries")
    constants = {**facts.constants(tile, FIRST_PHASE=facts.key_phase), "WIDE": wide}
    streamed = spec.kv_len * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize // spec.group
    programs = spec.batch * spec.q_heads * -(-spec.q_len // tile.block_m)
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(streamed, spec.q_heads), programs)


def backward_queries(problem: Problem, grad_o: Tensor, stats: RowStatistics, grad_q: Tensor) -> None:
    """Fill `grad_q`."""
    call_backward_queries(plan, problem, grad_o, stats, grad_q)
