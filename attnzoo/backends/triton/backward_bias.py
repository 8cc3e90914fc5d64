"""backward_bias_kernel: the gradient of a bias, summed over the dims in which it is broadcast."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.delta import RowStatistics
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, Problem, is_wide, strided
from attnzoo.backends.triton.tiles import dot, dropout_tile, exp_above, first_stat, head_of, load_rows, score_tile


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
    _, q_heads, group, q_len, kv_len, _ = sizes
    lengths = (q_len, kv_len)
    left, right, diagonal = band
    walk_batches, walk_heads, walk_rows, walk_columns = walk  # how many of each one program sums over
    row_programs = tl.cdiv(tl.cdiv(q_len, BLOCK_M), walk_rows)
    column_programs = tl.cdiv(tl.cdiv(kv_len, BLOCK_N), walk_columns)
    program = tl.program_id(0)
    first_column = program % column_programs * walk_columns
    first_row = program // column_programs % row_programs * walk_rows
    owner = program // (column_programs * row_programs)
    head_programs = q_heads // walk_heads
    first_head = owner % head_programs * walk_heads
    first_batch = owner // head_programs * walk_batches
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    for step in range(0, walk_batches * walk_heads * walk_rows * walk_columns):
        column = (first_column + step % walk_columns) * BLOCK_N
        row = (first_row + step // walk_columns % walk_rows) * BLOCK_M
        pair = step // (walk_columns * walk_rows)
        head = (first_head + pair % walk_heads).to(tl.int64)
        batch = (first_batch + pair // walk_heads).to(tl.int64)
        is_seen = True
        if left is not None:
            is_seen = is_seen & (column + BLOCK_N - 1 >= row + diagonal - left)
        if right is not None:
            is_seen = is_seen & (column <= row + BLOCK_M - 1 + diagonal + right)
        if is_seen:
            rows = row + tl.arange(0, BLOCK_M)
            i = rows[:, None]
            j = (column + tl.arange(0, BLOCK_N))[None, :]
            q_head, q_row = head_of(q, batch, head)
            k_head, k_row = head_of(k, batch, head // group)
            v_head, v_row = head_of(v, batch, head // group)
            g_head, g_row = head_of(grad_o, batch, head)
            stat = first_stat(batch, head, q_heads, q_len) + rows
            q_tile = load_rows(q_head, q_row, row, q_len, HEAD_DIM, VALUE_DIM, BLOCK_M, True, WIDE)
            k_tile = load_rows(k_head, k_row, column, kv_len, HEAD_DIM, VALUE_DIM, BLOCK_N, True, WIDE)
            product = dot(q_tile, tl.trans(k_tile), None, PRECISION)
            s, _slope = score_tile(product, i, j, batch, head, mask, bias, segments, lengths, band, scale, softcap, True, FOLDED)
            p = exp_above(s, tl.load(pivot_ptr + stat)[:, None], scale, FOLDED)  # (BLOCK_M, BLOCK_N)
            if norm_ptr is not None:
                p *= tl.load(norm_ptr + stat)[:, None]
            g_tile = load_rows(g_head, g_row, row, q_len, VALUE_DIM, HEAD_DIM, BLOCK_M, True, WIDE)
            v_tile = load_rows(v_head, v_row, column, kv_len, VALUE_DIM, HEAD_DIM, BLOCK_N, True, WIDE)
            dp = dot(g_tile, tl.trans(v_tile), None, PRECISION)
            if dropout is not None:
                dp = tl.where(dropout_tile(dropout, batch, head, i, column, BLOCK_N), dp * dropout[2], 0.0)
            acc += p * (dp - tl.load(delta_ptr + stat)[:, None])

    pointer, batch_stride, head_stride, row_stride, column_stride = grad_bias
    target = pointer + first_batch.to(tl.int64) * batch_stride + first_head.to(tl.int64) * head_stride
    rows = first_row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = first_column * BLOCK_N + tl.arange(0, BLOCK_N)
    if SUMMED == "rows":
        tl.store(target + columns.to(tl.int64) * column_stride, tl.sum(acc, 0), mask=columns < kv_len)
    elif SUMMED == "columns":
        tl.store(target + rows.to(tl.int64) * row_stride, tl.sum(acc, 1), mask=rows < q_len)
    else:
        offsets = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
        kept = (rows < q_len)[:, None] & (columns < kv_len)[None, :]
        tl.store(target + offsets, acc.to(pointer.dtype.element_ty), mask=kept)


KERNEL = Kernel(backward_bias_kernel)


def plan(facts: Facts, wide: bool, summed: str | None) -> Plan:
    spec, tile = facts.spec, facts.tile("backward_bias")
    constants = {**facts.constants(tile, SUMMED=summed), "WIDE": wide}
    batch, heads = (facts.spec.bias or (1, 1))[:2] if summed is None else (spec.batch, spec.q_heads)
    row_programs = 1 if summed == "rows" else -(-spec.q_len // tile.block_m)
    column_programs = 1 if summed == "columns" else -(-spec.kv_len // tile.block_n)
    programs = batch * heads * row_programs * column_programs
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(1, spec.q_heads), programs)


def backward_bias(problem: Problem, grad_o: Tensor, stats: RowStatistics) -> Tensor:
    """The gradient of the bias, in its shape and dtype."""
    spec, facts, bias = problem.spec, problem.facts, problem.inputs.bias
    assert bias is not None
    if 0 in (spec.batch, spec.q_heads, spec.q_len, spec.kv_len):
        return torch.zeros_like(bias)
    batch, heads, rows, columns = bias.shape
    tile, g_rows = facts.tile("backward_bias"), strided(grad_o)
    if columns == 1:  # fp32 parts, summed below: a walk over whole rows of one head keeps the card busy
        summed, parts = "columns", stats.pivot.new_empty(spec.batch, spec.q_heads, spec.q_len, 1)
        walk = (1, 1, 1, -(-spec.kv_len // tile.block_n))
    elif rows == 1:
        summed, parts = "rows", stats.pivot.new_empty(spec.batch, spec.q_heads, 1, spec.kv_len)
        walk = (1, 1, -(-spec.q_len // tile.block_m), 1)
    else:
        summed, parts = None, bias.new_empty(bias.shape)
        walk = (spec.batch // batch, spec.q_heads // heads, 1, 1)
    planned = facts.plan(plan, facts.is_wide or is_wide(g_rows), summed)
    arguments = (
        problem.q,
        problem.k,
        problem.v,
        g_rows,
        (parts, *parts.stride()),
        *stats,
        problem.mask,
        problem.bias,
        problem.segments,
        problem.dropout,
        planned.sizes,
        facts.band,
        walk,
        facts.scale,
        spec.softcap,
    )
    planned.launch(arguments, problem.aligned(g_rows), problem.types)
    return parts.sum_to_size(bias.shape).to(bias.dtype)
