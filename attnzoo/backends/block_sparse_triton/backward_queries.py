"""backward_queries_kernel: dQ of a tile of queries, past which the blocks of its row stream."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.block_sparse_triton.launch import SparseProblem, layout_of, over_keys, tile_of, tiles_of
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
def sparse_backward_queries_kernel(
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
    FOLDED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`dQ = scale dS K` over the blocks of a row, with `P = exp(S - pivot)` and `dS = P (dO V^T - delta)`.

    Tensors: as in the forward; grad_q like q; pivot, delta `(B, Hq, padded Sq)` fp32. One program a tile of queries.
    """
    batches, q_heads, group, q_len, kv_len, wave = sizes
    lengths = (q_len, kv_len)
    left, right, diagonal = band
    ROW_TILES: tl.constexpr = (BLOCK_Q + BLOCK_M - 1) // BLOCK_M
    KEY_TILES: tl.constexpr = (BLOCK_KV + BLOCK_N - 1) // BLOCK_N
    batch, head, block_row, tile, line = line_of(tl.program_id(0), lists, shape, ROW_TILES, q_heads, batches * q_heads, wave)
    row = block_row * BLOCK_Q + tile * BLOCK_M
    row_end = tl.minimum(q_len, (block_row + 1) * BLOCK_Q)
    rows = row + tl.arange(0, BLOCK_M)
    i = rows[:, None]
    q_head, q_row = head_of(q, batch, head)
    k_head, k_row = head_of(k, batch, head // group)
    v_head, v_row = head_of(v, batch, head // group)
    g_head, g_row = head_of(grad_o, batch, head)
    stat = first_stat(batch, head, q_heads, q_len) + rows
    q_tile = load_rows(q_head, q_row, row, row_end, HEAD_DIM, VALUE_DIM, BLOCK_M, True, WIDE)  # (BLOCK_M, D)
    g_tile = load_rows(g_head, g_row, row, row_end, VALUE_DIM, HEAD_DIM, BLOCK_M, True, WIDE)  # (BLOCK_M, Dv)
    pivot = row_stat(pivot_ptr, stat, rows, row_end, float("inf"), BLOCK_M, BLOCK_Q)[:, None]
    delta = row_stat(delta_ptr, stat, rows, row_end, 0.0, BLOCK_M, BLOCK_Q)[:, None]
    dq = tl.zeros([BLOCK_M, padded(HEAD_DIM, VALUE_DIM)], tl.float32)

    last = tl.maximum(tl.minimum(row + BLOCK_M, row_end) - 1, row)
    start, free_start, free_stop, stop = visible(row, last, kv_len, left, right, diagonal, BLOCK_KV)
    if segments is not None:
        start, stop = segment_walk(segments[6], q_len, segments[7], kv_len, batch, row, last, start, stop, BLOCK_KV)
    walk = walk_of(lists, line, (start, free_start, free_stop, stop), BLOCK_KV, EDGES, FREE)
    for part in tl.static_range(0, 2 if FREE else 1):
        for step in tl.range(0, (walk[5] if part == 0 else walk[7]) * KEY_TILES):
            if part == 0:
                block, is_partial, place = tested_block(lists, walk, step // KEY_TILES)
            else:
                block = tl.load(lists[1] + walk[6] + step // KEY_TILES)
            within = step % KEY_TILES * BLOCK_N
            column = block * BLOCK_KV + within
            column_end = tl.minimum(kv_len, (block + 1) * BLOCK_KV)
            j = (column + tl.arange(0, BLOCK_N))[None, :]
            k_tile = load_rows(k_head, k_row, column, column_end, HEAD_DIM, VALUE_DIM, BLOCK_N, part == 0, WIDE)
            v_tile = load_rows(v_head, v_row, column, column_end, VALUE_DIM, HEAD_DIM, BLOCK_N, part == 0, WIDE)
            product = dot(q_tile, tl.trans(k_tile), None, PRECISION)
            s, slope = score_tile(
                product, i, j, batch, head, mask, bias, segments, lengths, band, scale, softcap, part == 0, FOLDED
            )  # (BLOCK_M, BLOCK_N)
            if part == 0:
                kept = rule_tile(
                    i, j, batch, lengths, rule, place, is_partial, tile * BLOCK_M, within, BLOCK_M, BLOCK_N, BLOCK_Q, BLOCK_KV, False
                )
                s = tl.where(kept & (j < column_end), s, -float("inf"))
            p = exp_above(s, pivot, scale, FOLDED)
            if norm_ptr is not None:
                p *= row_stat(norm_ptr, stat, rows, row_end, 0.0, BLOCK_M, BLOCK_Q)[:, None]
            dp = dot(g_tile, tl.trans(v_tile), None, PRECISION)
            if dropout is not None:
                dp = tl.where(dropout_kept(dropout, batch, head, i, column, BLOCK_N, BLOCK_KV), dp * dropout[2], 0.0)
            ds = p * (dp - delta) * slope
            dq = dot(ds.to(k_tile.dtype), k_tile, dq, PRECISION)

    dq_head, dq_row = head_of(grad_q, batch, head)
    store_rows(dq_head, dq_row, row, row_end, dq * grad_scale, HEAD_DIM, BLOCK_M, WIDE)


KERNEL = Kernel(sparse_backward_queries_kernel)


def plan(facts: Facts, wide: bool, types: tuple[object, ...]) -> Plan:
    spec, layout = facts.spec, layout_of(facts)
    tile = tile_of(facts, "backward_queries")
    constants = {**facts.constants(tile, **over_keys(facts, tile)), "WIDE": wide}
    streamed = spec.kv_len * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize // spec.group
    programs = spec.batch * spec.q_heads * tiles_of(spec.q_len, layout.block_q, tile.block_m)
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(streamed, spec.q_heads), programs, types)


def backward_queries(sparse: SparseProblem, grad_o: Tensor, stats: RowStatistics, grad_q: Tensor) -> None:
    """Fill `grad_q`."""
    problem, schedule = sparse.problem, sparse.schedule
    facts, g_rows, dq_rows = problem.facts, strided(grad_o), strided(grad_q)
    planned = facts.plan(plan, facts.is_wide or is_wide(g_rows, dq_rows), schedule.types)
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
        schedule.rows,
        schedule.rule,
        schedule.row_shape,
        planned.sizes,
        facts.band,
        facts.scale,
        problem.spec.softcap,
        problem.spec.scale,
    )
    planned.launch(arguments, problem.aligned(g_rows, dq_rows), problem.types)
