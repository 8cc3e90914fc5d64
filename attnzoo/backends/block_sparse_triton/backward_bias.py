"""backward_bias_kernel: the gradient of a bias, 0 outside of the layout's blocks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.block_sparse_triton.launch import SparseProblem, layout_of, tile_of, tiles_of
from attnzoo.backends.block_sparse_triton.tiles import find_block, leaves_block, rule_scores
from attnzoo.backends.triton.bias_sums import bias_programs, owned_sum, seen_in_band, summand
from attnzoo.backends.triton.calls import call_backward_bias
from attnzoo.backends.triton.delta import RowStatistics
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts
from attnzoo.backends.triton.steps import dot, dropped, score_tile, weights
from attnzoo.backends.triton.tiles import first_stat, head_of, load_rows, padded, row_stat


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
    BLOCK_D: tl.constexpr = padded(HEAD_DIM, VALUE_DIM)
    BLOCK_DV: tl.constexpr = padded(VALUE_DIM, HEAD_DIM)
    KEY_TILES: tl.constexpr = (BLOCK_KV + BLOCK_N - 1) // BLOCK_N
    ROW_TILES: tl.constexpr = (BLOCK_Q + BLOCK_M - 1) // BLOCK_M
    FOURS: tl.constexpr = BLOCK_KV % 4 == 0
    _, q_heads, group, q_len, kv_len, _ = sizes
    lengths = (q_len, kv_len)
    call = (mask, bias, segments, dropout, lengths, band, scale, softcap)
    _, batch_stride, head_stride = shape
    walk_batches, walk_heads, walk_rows, walk_columns = walk  # how many of each one program sums over
    row_programs = tl.cdiv(q_len, BLOCK_Q) * ROW_TILES // walk_rows
    column_programs = tl.cdiv(kv_len, BLOCK_KV) * KEY_TILES // walk_columns
    first = owned_sum(walk, row_programs, column_programs, q_heads)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    for step in range(0, walk_batches * walk_heads * walk_rows * walk_columns):
        batch, head, row_tile, column_tile = summand(first, walk, step)
        block_row, block_column = row_tile // ROW_TILES, column_tile // KEY_TILES
        row_within, within = row_tile % ROW_TILES * BLOCK_M, column_tile % KEY_TILES * BLOCK_N
        row, column = block_row * BLOCK_Q + row_within, block_column * BLOCK_KV + within
        line = batch * batch_stride + head * head_stride + block_row
        is_seen, is_partial, place = find_block(lists, line, block_column)
        if seen_in_band(is_seen, row, column, band, BLOCK_M, BLOCK_N):
            row_end, column_end = tl.minimum(q_len, (block_row + 1) * BLOCK_Q), tl.minimum(kv_len, (block_column + 1) * BLOCK_KV)
            rows = row + tl.arange(0, BLOCK_M)
            i = rows[:, None]
            j = (column + tl.arange(0, BLOCK_N))[None, :]
            q_rows, k_rows = head_of(q, batch, head), head_of(k, batch, head // group)
            v_rows, g_rows = head_of(v, batch, head // group), head_of(grad_o, batch, head)
            stat = first_stat(batch, head, q_heads, q_len) + rows
            q_tile = load_rows(q_rows, row, row_end, HEAD_DIM, BLOCK_D, BLOCK_M, True, WIDE)
            k_tile = load_rows(k_rows, column, column_end, HEAD_DIM, BLOCK_D, BLOCK_N, True, WIDE)
            s, _slope = score_tile(q_tile, k_tile, i, j, batch, head, call, True, FOLDED, PRECISION)  # (BLOCK_M, BLOCK_N)
            s = rule_scores(s, i, j, batch, lengths, rule, place, is_partial, row_within, within, column_end, BLOCK_Q, BLOCK_KV, False)
            in_rows = rows < row_end if leaves_block(BLOCK_M, BLOCK_Q) else None
            p = weights(s, row_stat(pivot_ptr, stat, in_rows, float("inf"))[:, None], norm_ptr, stat, in_rows, scale, False, FOLDED)
            g_tile = load_rows(g_rows, row, row_end, VALUE_DIM, BLOCK_DV, BLOCK_M, True, WIDE)
            v_tile = load_rows(v_rows, column, column_end, VALUE_DIM, BLOCK_DV, BLOCK_N, True, WIDE)
            dp = dot(g_tile, tl.trans(v_tile), None, PRECISION)
            _kept_p, dp = dropped(p, dp, dropout, batch, head, rows, column, FOURS, False)
            acc += p * (dp - row_stat(delta_ptr, stat, in_rows, 0.0)[:, None])

    pointer, grad_batch, grad_head, row_stride, column_stride = grad_bias
    target = pointer + first[0].to(tl.int64) * grad_batch + first[1].to(tl.int64) * grad_head
    block_row, block_column = first[2] // ROW_TILES, first[3] // KEY_TILES
    rows = block_row * BLOCK_Q + first[2] % ROW_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_column * BLOCK_KV + first[3] % KEY_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
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


def score_tiles(facts: Facts) -> tuple[int, int]:
    spec, layout, tile = facts.spec, layout_of(facts), tile_of(facts, "backward_bias")
    return tiles_of(spec.q_len, layout.block_q, tile.block_m), tiles_of(spec.kv_len, layout.block_kv, tile.block_n)


def plan(facts: Facts, wide: bool, summed: str | None, types: tuple[object, ...]) -> Plan:
    spec, layout = facts.spec, layout_of(facts)
    tile = tile_of(facts, "backward_bias")
    blocks = {"BLOCK_Q": layout.block_q, "BLOCK_KV": layout.block_kv}
    constants = {**facts.constants(tile, **blocks, SUMMED=summed), "WIDE": wide}
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(1, spec.q_heads), bias_programs(spec, score_tiles(facts)), types)


def backward_bias(problem: SparseProblem, grad_o: Tensor, stats: RowStatistics) -> Tensor:
    """The gradient of the bias, in its shape and dtype."""
    return call_backward_bias(plan, problem, grad_o, stats, score_tiles(problem.facts))
