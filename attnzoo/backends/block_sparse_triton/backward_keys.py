"""backward_keys_kernel: dK and dV of a tile of keys, past which the blocks of its column stream."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.block_sparse_triton.launch import SparseProblem, layout_of, over_queries, tile_of, tiles_of
from attnzoo.backends.block_sparse_triton.tiles import dropout_kept, line_of, row_stat, rule_tile, tested_block, walk_of
from attnzoo.backends.triton.delta import RowStatistics
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, is_wide, strided
from attnzoo.backends.triton.tiles import (
    dot,
    exp_above,
    first_stat,
    head_of,
    load_rows,
    padded,
    score_tile,
    segment_walk,
    store_rows,
    visible,
)


@triton.jit
def sparse_backward_keys_kernel(
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
    lists,
    rule,
    shape,
    sizes,
    band,
    scale,
    softcap,
    grad_scale,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    EDGES: tl.constexpr,
    FREE: tl.constexpr,
    GROUPED: tl.constexpr,
    FOLDED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`dV = P^T dO` and `dK = scale dS^T Q` over the blocks of a column, with `P = exp(S - pivot)`, `dS = P (dO V^T - delta)`.

    Tiles are keys by queries, so that P^T and dS^T are operands as they stand. Tensors: as in the forward; grad_k, grad_v
    like k and v, either may be None; pivot, delta `(B, Hq, padded Sq)` fp32. One program a tile of keys of one kv head; it
    walks the columns of all query heads of the group, and nothing is added to memory that others write.
    """
    batches, q_heads, group, q_len, kv_len, wave = sizes
    lengths = (q_len, kv_len)
    left, right, diagonal = band
    lines, batch_stride, head_stride = shape
    ROW_TILES: tl.constexpr = (BLOCK_Q + BLOCK_M - 1) // BLOCK_M
    KEY_TILES: tl.constexpr = (BLOCK_KV + BLOCK_N - 1) // BLOCK_N
    kv_heads = q_heads // group
    first_heads = (lines, batch_stride, head_stride * group)  # the order is that of the group's first head
    batch, kv_head, block_column, tile, line = line_of(tl.program_id(0), lists, first_heads, KEY_TILES, kv_heads, batches * kv_heads, wave)
    column = block_column * BLOCK_KV + tile * BLOCK_N
    column_end = tl.minimum(kv_len, (block_column + 1) * BLOCK_KV)
    j = (column + tl.arange(0, BLOCK_N))[:, None]
    k_head, k_row = head_of(k, batch, kv_head)
    v_head, v_row = head_of(v, batch, kv_head)
    k_tile = load_rows(k_head, k_row, column, column_end, HEAD_DIM, VALUE_DIM, BLOCK_N, True, WIDE)  # (BLOCK_N, D)
    v_tile = load_rows(v_head, v_row, column, column_end, VALUE_DIM, HEAD_DIM, BLOCK_N, True, WIDE)  # (BLOCK_N, Dv)
    dk = tl.zeros([BLOCK_N, padded(HEAD_DIM, VALUE_DIM)], tl.float32)
    dv = tl.zeros([BLOCK_N, padded(VALUE_DIM, HEAD_DIM)], tl.float32)

    last = tl.maximum(tl.minimum(column + BLOCK_N, column_end) - 1, column)
    start, free_start, free_stop, stop = visible(column, last, q_len, right, left, -diagonal, BLOCK_Q)
    if segments is not None:
        start, stop = segment_walk(segments[7], kv_len, segments[6], q_len, batch, column, last, start, stop, BLOCK_Q)
    for member in range(0, group if GROUPED else 1):
        head = kv_head * group + member
        walk = walk_of(lists, line + member * head_stride, (start, free_start, free_stop, stop), BLOCK_Q, EDGES, FREE)
        q_head, q_row = head_of(q, batch, head)
        g_head, g_row = head_of(grad_o, batch, head)
        for part in tl.static_range(0, 2 if FREE else 1):
            for step in tl.range(0, (walk[5] if part == 0 else walk[7]) * ROW_TILES):
                if part == 0:
                    block, is_partial, place = tested_block(lists, walk, step // ROW_TILES)
                else:
                    block = tl.load(lists[1] + walk[6] + step // ROW_TILES)
                within = step % ROW_TILES * BLOCK_M
                row = block * BLOCK_Q + within
                row_end = tl.minimum(q_len, (block + 1) * BLOCK_Q)
                rows = tl.multiple_of(row, BLOCK_M) + tl.arange(0, BLOCK_M) if BLOCK_Q % BLOCK_M == 0 else row + tl.arange(0, BLOCK_M)
                stat = first_stat(batch, head, q_heads, q_len) + rows
                i = rows[None, :]
                q_tile = load_rows(q_head, q_row, row, row_end, HEAD_DIM, VALUE_DIM, BLOCK_M, True, WIDE)
                product = dot(k_tile, tl.trans(q_tile), None, PRECISION)
                s, slope = score_tile(
                    product, i, j, batch, head, mask, bias, segments, lengths, band, scale, softcap, part == 0, FOLDED
                )  # (BLOCK_N, BLOCK_M)
                if part == 0:
                    kept = rule_tile(
                        i, j, batch, lengths, rule, place, is_partial, within, tile * BLOCK_N, BLOCK_M, BLOCK_N, BLOCK_Q, BLOCK_KV, True
                    )
                    s = tl.where(kept, s, -float("inf"))
                p = exp_above(s, row_stat(pivot_ptr, stat, rows, row_end, float("inf"), BLOCK_M, BLOCK_Q)[None, :], scale, FOLDED)
                if norm_ptr is not None:
                    p *= row_stat(norm_ptr, stat, rows, row_end, 0.0, BLOCK_M, BLOCK_Q)[None, :]
                g_tile = load_rows(g_head, g_row, row, row_end, VALUE_DIM, HEAD_DIM, BLOCK_M, True, WIDE)
                dp = dot(v_tile, tl.trans(g_tile), None, PRECISION)  # (BLOCK_N, BLOCK_M)
                kept_p = p
                if dropout is not None:
                    kept = tl.trans(dropout_kept(dropout, batch, head, rows[:, None], column, BLOCK_N, BLOCK_KV))
                    kept_p = tl.where(kept, p * dropout[2], 0.0)
                    dp = tl.where(kept, dp * dropout[2], 0.0)
                if grad_v is not None:
                    dv = dot(kept_p.to(g_tile.dtype), g_tile, dv, PRECISION)
                if grad_k is not None:
                    delta = row_stat(delta_ptr, stat, rows, row_end, 0.0, BLOCK_M, BLOCK_Q)
                    ds = p * (dp - delta[None, :]) * slope
                    dk = dot(ds.to(q_tile.dtype), q_tile, dk, PRECISION)

    if grad_k is not None:
        dk_head, dk_row = head_of(grad_k, batch, kv_head)
        store_rows(dk_head, dk_row, column, column_end, dk * grad_scale, HEAD_DIM, BLOCK_N, WIDE)
    if grad_v is not None:
        dv_head, dv_row = head_of(grad_v, batch, kv_head)
        store_rows(dv_head, dv_row, column, column_end, dv, VALUE_DIM, BLOCK_N, WIDE)


KERNEL = Kernel(sparse_backward_keys_kernel)


def plan(facts: Facts, wide: bool, has_grad_k: bool, has_grad_v: bool, types: tuple[object, ...]) -> Plan:
    spec, layout = facts.spec, layout_of(facts)
    tile = tile_of(facts, "backward_keys")
    constants = {**facts.constants(tile, **over_queries(facts), GROUPED=spec.group > 1), "WIDE": wide}
    streamed = spec.q_len * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize * spec.group
    programs = spec.batch * spec.kv_heads * tiles_of(spec.kv_len, layout.block_kv, tile.block_n)
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(streamed, spec.kv_heads), programs, has_grad_k, has_grad_v, types)


def backward_keys(sparse: SparseProblem, grad_o: Tensor, stats: RowStatistics, grad_k: Tensor | None, grad_v: Tensor | None) -> None:
    """Fill `grad_k` and `grad_v`, either of which may be None."""
    problem, schedule = sparse.problem, sparse.schedule
    facts, g_rows = problem.facts, strided(grad_o)
    dk_rows, dv_rows = [None if grad is None else strided(grad) for grad in (grad_k, grad_v)]
    given = [rows for rows in (g_rows, dk_rows, dv_rows) if rows is not None]
    planned = facts.plan(plan, facts.is_wide or is_wide(*given), grad_k is not None, grad_v is not None, schedule.types)
    arguments = (
        problem.q,
        problem.k,
        problem.v,
        g_rows,
        dk_rows,
        dv_rows,
        *stats,
        problem.mask,
        problem.bias,
        problem.segments,
        problem.dropout,
        schedule.columns,
        schedule.rule,
        schedule.column_shape,
        planned.sizes,
        facts.band,
        facts.scale,
        problem.spec.softcap,
        problem.spec.scale,
    )
    planned.launch(arguments, problem.aligned(*given), problem.types)
