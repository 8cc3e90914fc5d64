"""backward_queries_kernel: dQ of a tile of queries, past which keys and values stream."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.delta import RowStatistics
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, Problem, is_wide, strided
from attnzoo.backends.triton.tiles import (
    dot,
    dropout_tile,
    exp_above,
    first_stat,
    head_of,
    load_rows,
    padded,
    place,
    score_tile,
    segment_walk,
    store_rows,
    visible,
)


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
    batches, q_heads, group, q_len, kv_len, wave = sizes
    lengths = (q_len, kv_len)
    left, right, diagonal = band
    tiles = tl.cdiv(q_len, BLOCK_M)
    tile, batch, head = place(tl.program_id(0), tiles, q_heads, batches * q_heads, wave)
    row = (tiles - 1 - tile) * BLOCK_M  # under causal the last tiles are the longest, so they go first
    rows = row + tl.arange(0, BLOCK_M)
    i = rows[:, None]
    q_head, q_row = head_of(q, batch, head)
    k_head, k_row = head_of(k, batch, head // group)
    v_head, v_row = head_of(v, batch, head // group)
    g_head, g_row = head_of(grad_o, batch, head)
    stat = first_stat(batch, head, q_heads, q_len) + rows
    q_tile = load_rows(q_head, q_row, row, q_len, HEAD_DIM, VALUE_DIM, BLOCK_M, True, WIDE)  # (BLOCK_M, D)
    g_tile = load_rows(g_head, g_row, row, q_len, VALUE_DIM, HEAD_DIM, BLOCK_M, True, WIDE)  # (BLOCK_M, Dv)
    pivot = tl.load(pivot_ptr + stat)[:, None]
    delta = tl.load(delta_ptr + stat)[:, None]
    dq = tl.zeros([BLOCK_M, padded(HEAD_DIM, VALUE_DIM)], tl.float32)

    bounds = visible(row, tl.minimum(row + BLOCK_M, q_len) - 1, kv_len, left, right, diagonal, BLOCK_N)
    start, stop = bounds[0], bounds[3]
    if segments is not None:
        start, stop = segment_walk(segments[6], q_len, segments[7], kv_len, batch, row, row + BLOCK_M - 1, start, stop, BLOCK_N)
    for phase in tl.static_range(FIRST_PHASE, 3):
        begin = bounds[phase] if phase > FIRST_PHASE else start
        end = bounds[phase + 1] if phase < 2 else stop
        for step in tl.range(0, tl.cdiv(end - begin, BLOCK_N)):  # from 0: other bounds make ptxas serialize wgmma (C7515)
            column = begin + step * BLOCK_N
            j = (column + tl.arange(0, BLOCK_N))[None, :]
            k_tile = load_rows(k_head, k_row, column, kv_len, HEAD_DIM, VALUE_DIM, BLOCK_N, phase != 1, WIDE)
            v_tile = load_rows(v_head, v_row, column, kv_len, VALUE_DIM, HEAD_DIM, BLOCK_N, phase != 1, WIDE)
            product = dot(q_tile, tl.trans(k_tile), None, PRECISION)
            s, slope = score_tile(
                product, i, j, batch, head, mask, bias, segments, lengths, band, scale, softcap, phase != 1, FOLDED
            )  # (BLOCK_M, BLOCK_N)
            p = exp_above(s, pivot, scale, FOLDED)
            if norm_ptr is not None:
                p *= tl.load(norm_ptr + stat)[:, None]
            dp = dot(g_tile, tl.trans(v_tile), None, PRECISION)
            if dropout is not None:
                dp = tl.where(dropout_tile(dropout, batch, head, i, column, BLOCK_N), dp * dropout[2], 0.0)
            ds = p * (dp - delta) * slope
            dq = dot(ds.to(k_tile.dtype), k_tile, dq, PRECISION)

    dq_head, dq_row = head_of(grad_q, batch, head)
    store_rows(dq_head, dq_row, row, q_len, dq * grad_scale, HEAD_DIM, BLOCK_M, WIDE)


KERNEL = Kernel(backward_queries_kernel)


def plan(facts: Facts, wide: bool) -> Plan:
    spec, tile = facts.spec, facts.tile("backward_queries")
    constants = {**facts.constants(tile, FIRST_PHASE=facts.key_phase), "WIDE": wide}
    streamed = spec.kv_len * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize // spec.group
    programs = spec.batch * spec.q_heads * -(-spec.q_len // tile.block_m)
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(streamed, spec.q_heads), programs)


def backward_queries(problem: Problem, grad_o: Tensor, stats: RowStatistics, grad_q: Tensor) -> None:
    """Fill `grad_q`."""
    facts, g_rows, dq_rows = problem.facts, strided(grad_o), strided(grad_q)
    planned = facts.plan(plan, facts.is_wide or is_wide(g_rows, dq_rows))
    arguments = (
        problem.q,
        problem.k,
        problem.v,
        g_rows,
        dq_rows,
        *stats,
        problem.mask,
        problem.bias,
        problem.segments,
        problem.dropout,
        planned.sizes,
        facts.band,
        facts.scale,
        problem.spec.softcap,
        problem.spec.scale,
    )
    planned.launch(arguments, problem.aligned(g_rows, dq_rows), problem.types)
