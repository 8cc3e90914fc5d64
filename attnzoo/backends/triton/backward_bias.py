"""backward_bias_kernel: the gradient of a bias, summed over the dims in which it is broadcast."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.bias_sums import bias_programs, owned_sum, seen_in_band, summand
from attnzoo.backends.triton.calls import call_backward_bias
from attnzoo.backends.triton.delta import RowStatistics
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, Problem
from attnzoo.backends.triton.steps import dot, dropped, score_tile, weights
from attnzoo.backends.triton.tiles import first_stat, head_of, load_rows, padded


@triton.jit
def backward_bias_kernel(
    q,
    k,
    v,
    grad_o,
    grad_bias,
    pivot_ptr,
    delta_ptr,
    norm_ptr,
    mask,
    bias,
    segments,
    dropout,
    sizes,
    band,
    walk,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUMMED: tl.constexpr,
    FOLDED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`dbias = sum of P (dO V^T - delta)` over the batches, heads, rows and columns that share an element.

    A program owns one tile of the result and walks what is summed into it, so nothing is added to memory
    that others write. SUMMED: "rows" or "columns", along which the walk goes, or None. Tensors: as in the
    forward; grad_bias `(B or 1, Hq or 1, Sq or 1, Skv or 1)`.
    """
    BLOCK_D: tl.constexpr = padded(HEAD_DIM, VALUE_DIM)
    BLOCK_DV: tl.constexpr = padded(VALUE_DIM, HEAD_DIM)
    _, q_heads, group, q_len, kv_len, _ = sizes
    call = (mask, bias, segments, dropout, (q_len, kv_len), band, scale, softcap)
    walk_batches, walk_heads, walk_rows, walk_columns = walk  # how many of each one program sums over
    row_programs = tl.cdiv(tl.cdiv(q_len, BLOCK_M), walk_rows)
    column_programs = tl.cdiv(tl.cdiv(kv_len, BLOCK_N), walk_columns)
    first = owned_sum(walk, row_programs, column_programs, q_heads)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    for step in range(0, walk_batches * walk_heads * walk_rows * walk_columns):
        batch, head, row_tile, column_tile = summand(first, walk, step)
        row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
        if seen_in_band(True, row, column, band, BLOCK_M, BLOCK_N):
            rows = row + tl.arange(0, BLOCK_M)
            i = rows[:, None]
            j = (column + tl.arange(0, BLOCK_N))[None, :]
            q_rows, k_rows = head_of(q, batch, head), head_of(k, batch, head // group)
            v_rows, g_rows = head_of(v, batch, head // group), head_of(grad_o, batch, head)
            stat = first_stat(batch, head, q_heads, q_len) + rows
            q_tile = load_rows(q_rows, row, q_len, HEAD_DIM, BLOCK_D, BLOCK_M, True, WIDE)
            k_tile = load_rows(k_rows, column, kv_len, HEAD_DIM, BLOCK_D, BLOCK_N, True, WIDE)
            s, _slope = score_tile(q_tile, k_tile, i, j, batch, head, call, True, FOLDED, PRECISION)  # (BLOCK_M, BLOCK_N)
            p = weights(s, tl.load(pivot_ptr + stat)[:, None], norm_ptr, stat, None, scale, False, FOLDED)
            g_tile = load_rows(g_rows, row, q_len, VALUE_DIM, BLOCK_DV, BLOCK_M, True, WIDE)
            v_tile = load_rows(v_rows, column, kv_len, VALUE_DIM, BLOCK_DV, BLOCK_N, True, WIDE)
            dp = dot(g_tile, tl.trans(v_tile), None, PRECISION)
            _kept_p, dp = dropped(p, dp, dropout, batch, head, rows, column, True, False)
            acc += p * (dp - tl.load(delta_ptr + stat)[:, None])

    pointer, batch_stride, head_stride, row_stride, column_stride = grad_bias
    target = pointer + first[0].to(tl.int64) * batch_stride + first[1].to(tl.int64) * head_stride
    rows = first[2] * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = first[3] * BLOCK_N + tl.arange(0, BLOCK_N)
    if SUMMED == "rows":
        tl.store(target + columns.to(tl.int64) * column_stride, tl.sum(acc, 0), mask=columns < kv_len)
    elif SUMMED == "columns":
        tl.store(target + rows.to(tl.int64) * row_stride, tl.sum(acc, 1), mask=rows < q_len)
    else:
        offsets = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
        kept = (rows < q_len)[:, None] & (columns < kv_len)[None, :]
        tl.store(target + offsets, acc.to(pointer.dtype.element_ty), mask=kept)


KERNEL = Kernel(backward_bias_kernel)


def score_tiles(facts: Facts) -> tuple[int, int]:
    spec, tile = facts.spec, facts.tile("backward_bias")
    return -(-spec.q_len // tile.block_m), -(-spec.kv_len // tile.block_n)


def plan(facts: Facts, wide: bool, summed: str | None) -> Plan:
    spec, tile = facts.spec, facts.tile("backward_bias")
    constants = {**facts.constants(tile, SUMMED=summed), "WIDE": wide}
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(1, spec.q_heads), bias_programs(spec, score_tiles(facts)))


def backward_bias(problem: Problem, grad_o: Tensor, stats: RowStatistics) -> Tensor:
    """The gradient of the bias, in its shape and dtype."""
    return call_backward_bias(plan, problem, grad_o, stats, score_tiles(problem.facts))
