"""backward_queries_kernel: dQ of a tile of queries, past which the blocks of its row stream."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.block_sparse_triton.launch import SparseProblem, layout_of, over_keys, tile_of, tiles_of
from attnzoo.backends.block_sparse_triton.tiles import leaves_block, own_tile, rule_scores, streamed_tile, walk_of
from attnzoo.backends.triton.calls import call_backward_queries
from attnzoo.backends.triton.delta import RowStatistics
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts
from attnzoo.backends.triton.steps import dot, dropped, score_tile, weights
from attnzoo.backends.triton.tiles import first_stat, head_of, load_rows, padded, row_stat, segment_walk, store_rows, visible


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
    BLOCK_D: tl.constexpr = padded(HEAD_DIM, VALUE_DIM)
    BLOCK_DV: tl.constexpr = padded(VALUE_DIM, HEAD_DIM)
    KEY_TILES: tl.constexpr = (BLOCK_KV + BLOCK_N - 1) // BLOCK_N
    FOURS: tl.constexpr = BLOCK_KV % 4 == 0
    batches, q_heads, group, q_len, kv_len, wave = sizes
    lengths = (q_len, kv_len)
    left, right, diagonal = band
    call = (mask, bias, segments, dropout, lengths, band, scale, softcap)
    batch, head, line, row, row_end, row_within = own_tile(
        tl.program_id(0), lists, shape, q_heads, batches * q_heads, wave, q_len, BLOCK_M, BLOCK_Q
    )
    rows = row + tl.arange(0, BLOCK_M)
    i = rows[:, None]
    q_rows, k_rows = head_of(q, batch, head), head_of(k, batch, head // group)
    v_rows, g_rows = head_of(v, batch, head // group), head_of(grad_o, batch, head)
    stat = first_stat(batch, head, q_heads, q_len) + rows
    q_tile = load_rows(q_rows, row, row_end, HEAD_DIM, BLOCK_D, BLOCK_M, True, WIDE)  # (BLOCK_M, D)
    g_tile = load_rows(g_rows, row, row_end, VALUE_DIM, BLOCK_DV, BLOCK_M, True, WIDE)  # (BLOCK_M, Dv)
    in_rows = rows < row_end if leaves_block(BLOCK_M, BLOCK_Q) else None
    pivot = row_stat(pivot_ptr, stat, in_rows, float("inf"))[:, None]
    delta = row_stat(delta_ptr, stat, in_rows, 0.0)[:, None]
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    last = tl.maximum(tl.minimum(row + BLOCK_M, row_end) - 1, row)
    bounds = visible(row, last, kv_len, left, right, diagonal, BLOCK_KV)
    bounds = segment_walk(segments, lengths, batch, row, last, bounds, BLOCK_KV, False)
    walk = walk_of(lists, line, bounds, BLOCK_KV, EDGES, FREE)
    for part in tl.static_range(0, 2 if FREE else 1):
        for step in tl.range(0, (walk[5] if part == 0 else walk[7]) * KEY_TILES):
            column, column_end, within, is_partial, place = streamed_tile(lists, walk, step, kv_len, part == 0, BLOCK_N, BLOCK_KV)
            j = (column + tl.arange(0, BLOCK_N))[None, :]
            k_tile = load_rows(k_rows, column, column_end, HEAD_DIM, BLOCK_D, BLOCK_N, part == 0, WIDE)
            v_tile = load_rows(v_rows, column, column_end, VALUE_DIM, BLOCK_DV, BLOCK_N, part == 0, WIDE)
            s, slope = score_tile(q_tile, k_tile, i, j, batch, head, call, part == 0, FOLDED, PRECISION)  # (BLOCK_M, BLOCK_N)
            if part == 0:
                s = rule_scores(s, i, j, batch, lengths, rule, place, is_partial, row_within, within, column_end, BLOCK_Q, BLOCK_KV, False)
            p = weights(s, pivot, norm_ptr, stat, in_rows, scale, False, FOLDED)
            dp = dot(g_tile, tl.trans(v_tile), None, PRECISION)
            _kept_p, dp = dropped(p, dp, dropout, batch, head, rows, column, FOURS, False)
            ds = p * (dp - delta) * slope
            dq = dot(ds.to(k_tile.dtype), k_tile, dq, PRECISION)

    store_rows(head_of(grad_q, batch, head), row, row_end, dq * grad_scale, HEAD_DIM, BLOCK_M, WIDE)


KERNEL = Kernel(sparse_backward_queries_kernel)


def plan(facts: Facts, wide: bool, types: tuple[object, ...]) -> Plan:
    spec, layout = facts.spec, layout_of(facts)
    tile = tile_of(facts, "backward_queries")
    constants = {**facts.constants(tile, **over_keys(facts, tile)), "WIDE": wide}
    streamed = spec.kv_len * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize // spec.group
    programs = spec.batch * spec.q_heads * tiles_of(spec.q_len, layout.block_q, tile.block_m)
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(streamed, spec.q_heads), programs, types)


def backward_queries(problem: SparseProblem, grad_o: Tensor, stats: RowStatistics, grad_q: Tensor) -> None:
    """Fill `grad_q`."""
    call_backward_queries(plan, problem, grad_o, stats, grad_q)
