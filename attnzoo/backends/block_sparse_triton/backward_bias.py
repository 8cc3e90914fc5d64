"""backward_bias_kernel: the gradient of a bias, 0 outside of the layout's blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.block_sparse_triton.launch import SparseProblem, layout_of, tile_of, tiles_of
from attnzoo.backends.block_sparse_triton.tiles import dropout_kept, find_block, row_stat, rule_tile
from attnzoo.backends.triton.delta import RowStatistics
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, is_wide, strided
from attnzoo.backends.triton.tiles import dot, exp_above, first_stat, head_of, load_rows, score_tile


@triton.jit
def sparse_backward_bias_kernel(
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
    lists,
    rule,
    shape,
    sizes,
    band,
    walk,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    SUMMED: tl.constexpr,
    FOLDED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`dbias = sum of P (dO V^T - delta)` over the batches, heads, rows and columns that share an element.

    A program owns one tile of the result and walks what is summed into it, leaving out blocks that the layout doesn't have;
    nothing is added to memory that others write. SUMMED: "rows" or "columns", along which the walk goes, or None. Tensors:
    as in the forward; grad_bias `(B or 1, Hq or 1, Sq or 1, Skv or 1)`.
    """
    _, q_heads, group, q_len, kv_len, _ = sizes
    lengths = (q_len, kv_len)
    left, right, diagonal = band
    _, batch_stride, head_stride = shape
    ROW_TILES: tl.constexpr = (BLOCK_Q + BLOCK_M - 1) // BLOCK_M
    KEY_TILES: tl.constexpr = (BLOCK_KV + BLOCK_N - 1) // BLOCK_N
    walk_batches, walk_heads, walk_rows, walk_columns = walk  # how many of each one program sums over
    row_programs = tl.cdiv(q_len, BLOCK_Q) * ROW_TILES // walk_rows
    column_programs = tl.cdiv(kv_len, BLOCK_KV) * KEY_TILES // walk_columns
    program = tl.program_id(0)
    first_column = program % column_programs * walk_columns
    first_row = program // column_programs % row_programs * walk_rows
    owner = program // (column_programs * row_programs)
    head_programs = q_heads // walk_heads
    first_head = owner % head_programs * walk_heads
    first_batch = owner // head_programs * walk_batches
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    for step in range(0, walk_batches * walk_heads * walk_rows * walk_columns):
        column_tile = first_column + step % walk_columns
        row_tile = first_row + step // walk_columns % walk_rows
        pair = step // (walk_columns * walk_rows)
        head = (first_head + pair % walk_heads).to(tl.int64)
        batch = (first_batch + pair // walk_heads).to(tl.int64)
        block_row, block_column = row_tile // ROW_TILES, column_tile // KEY_TILES
        row_within, within = row_tile % ROW_TILES * BLOCK_M, column_tile % KEY_TILES * BLOCK_N
        row, column = block_row * BLOCK_Q + row_within, block_column * BLOCK_KV + within
        line = batch * batch_stride + head * head_stride + block_row
        is_seen, is_partial, place = find_block(lists, line, block_column)
        if left is not None:
            is_seen = is_seen & (column + BLOCK_N - 1 >= row + diagonal - left)
        if right is not None:
            is_seen = is_seen & (column <= row + BLOCK_M - 1 + diagonal + right)
        if is_seen:
            row_end, column_end = tl.minimum(q_len, (block_row + 1) * BLOCK_Q), tl.minimum(kv_len, (block_column + 1) * BLOCK_KV)
            rows = row + tl.arange(0, BLOCK_M)
            i = rows[:, None]
            j = (column + tl.arange(0, BLOCK_N))[None, :]
            q_head, q_row = head_of(q, batch, head)
            k_head, k_row = head_of(k, batch, head // group)
            v_head, v_row = head_of(v, batch, head // group)
            g_head, g_row = head_of(grad_o, batch, head)
            stat = first_stat(batch, head, q_heads, q_len) + rows
            q_tile = load_rows(q_head, q_row, row, row_end, HEAD_DIM, VALUE_DIM, BLOCK_M, True, WIDE)
            k_tile = load_rows(k_head, k_row, column, column_end, HEAD_DIM, VALUE_DIM, BLOCK_N, True, WIDE)
            product = dot(q_tile, tl.trans(k_tile), None, PRECISION)
            s, _slope = score_tile(product, i, j, batch, head, mask, bias, segments, lengths, band, scale, softcap, True, FOLDED)
            kept = rule_tile(i, j, batch, lengths, rule, place, is_partial, row_within, within, BLOCK_M, BLOCK_N, BLOCK_Q, BLOCK_KV, False)
            s = tl.where(kept & (j < column_end), s, -float("inf"))
            p = exp_above(
                s, row_stat(pivot_ptr, stat, rows, row_end, float("inf"), BLOCK_M, BLOCK_Q)[:, None], scale, FOLDED
            )  # (BLOCK_M, BLOCK_N)
            if norm_ptr is not None:
                p *= row_stat(norm_ptr, stat, rows, row_end, 0.0, BLOCK_M, BLOCK_Q)[:, None]
            g_tile = load_rows(g_head, g_row, row, row_end, VALUE_DIM, HEAD_DIM, BLOCK_M, True, WIDE)
            v_tile = load_rows(v_head, v_row, column, column_end, VALUE_DIM, HEAD_DIM, BLOCK_N, True, WIDE)
            dp = dot(g_tile, tl.trans(v_tile), None, PRECISION)
            if dropout is not None:
                dp = tl.where(dropout_kept(dropout, batch, head, i, column, BLOCK_N, BLOCK_KV), dp * dropout[2], 0.0)
            acc += p * (dp - row_stat(delta_ptr, stat, rows, row_end, 0.0, BLOCK_M, BLOCK_Q)[:, None])

    pointer, grad_batch, grad_head, row_stride, column_stride = grad_bias
    target = pointer + first_batch.to(tl.int64) * grad_batch + first_head.to(tl.int64) * grad_head
    block_row, block_column = first_row // ROW_TILES, first_column // KEY_TILES
    rows = block_row * BLOCK_Q + first_row % ROW_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_column * BLOCK_KV + first_column % KEY_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = rows < tl.minimum(q_len, (block_row + 1) * BLOCK_Q)
    in_columns = columns < tl.minimum(kv_len, (block_column + 1) * BLOCK_KV)
    if SUMMED == "rows":
        tl.store(target + columns.to(tl.int64) * column_stride, tl.sum(acc, 0), mask=in_columns)
    elif SUMMED == "columns":
        tl.store(target + rows.to(tl.int64) * row_stride, tl.sum(acc, 1), mask=in_rows)
    else:
        offsets = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
        tl.store(target + offsets, acc.to(pointer.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


KERNEL = Kernel(sparse_backward_bias_kernel)


def plan(facts: Facts, wide: bool, summed: str | None, types: tuple[object, ...]) -> Plan:
    spec, layout = facts.spec, layout_of(facts)
    tile = tile_of(facts, "backward_bias")
    blocks = {"BLOCK_Q": layout.block_q, "BLOCK_KV": layout.block_kv}
    constants = {**facts.constants(tile, **blocks, SUMMED=summed), "WIDE": wide}
    batch, heads = (spec.bias or (1, 1))[:2] if summed is None else (spec.batch, spec.q_heads)
    row_programs = 1 if summed == "rows" else tiles_of(spec.q_len, layout.block_q, tile.block_m)
    column_programs = 1 if summed == "columns" else tiles_of(spec.kv_len, layout.block_kv, tile.block_n)
    programs = batch * heads * row_programs * column_programs
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(1, spec.q_heads), programs, types)


def backward_bias(sparse: SparseProblem, grad_o: Tensor, stats: RowStatistics) -> Tensor:
    """The gradient of the bias, in its shape and dtype."""
    problem, schedule = sparse.problem, sparse.schedule
    spec, facts, bias = problem.spec, problem.facts, problem.inputs.bias
    assert bias is not None
    if 0 in (spec.batch, spec.q_heads, spec.q_len, spec.kv_len):
        return torch.zeros_like(bias)
    layout, g_rows = layout_of(facts), strided(grad_o)
    tile = tile_of(facts, "backward_bias")
    batch, heads, rows, columns = bias.shape
    if columns == 1:  # fp32 parts, summed below: a walk over whole rows of one head keeps the card busy
        summed, parts = "columns", stats.pivot.new_empty(spec.batch, spec.q_heads, spec.q_len, 1)
        walk = (1, 1, 1, tiles_of(spec.kv_len, layout.block_kv, tile.block_n))
    elif rows == 1:
        summed, parts = "rows", stats.pivot.new_empty(spec.batch, spec.q_heads, 1, spec.kv_len)
        walk = (1, 1, tiles_of(spec.q_len, layout.block_q, tile.block_m), 1)
    else:
        summed, parts = None, bias.new_empty(bias.shape)
        walk = (spec.batch // batch, spec.q_heads // heads, 1, 1)
    planned = facts.plan(plan, facts.is_wide or is_wide(g_rows), summed, schedule.types)
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
        schedule.rows,
        schedule.rule,
        schedule.row_shape,
        planned.sizes,
        facts.band,
        walk,
        facts.scale,
        spec.softcap,
    )
    planned.launch(arguments, problem.aligned(g_rows), problem.types)
    return parts.sum_to_size(bias.shape).to(bias.dtype)
