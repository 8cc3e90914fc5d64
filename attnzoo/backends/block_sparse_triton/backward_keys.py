"""backward_keys_kernel: dK and dV of a tile of keys, past which the blocks of its column stream."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.block_sparse_triton.launch import SparseProblem, layout_of, over_queries, tile_of, tiles_of
from attnzoo.backends.block_sparse_triton.tiles import leaves_block, own_tile, rule_scores, streamed_tile, walk_of
from attnzoo.backends.triton.calls import call_backward_keys
from attnzoo.backends.triton.delta import RowStatistics
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts
from attnzoo.backends.triton.steps import dot, dropped, score_tile, weights
from attnzoo.backends.triton.tiles import first_stat, head_of, load_rows, padded, row_stat, segment_walk, store_rows, visible


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
    BLOCK_D: tl.constexpr = padded(HEAD_DIM, VALUE_DIM)
    BLOCK_DV: tl.constexpr = padded(VALUE_DIM, HEAD_DIM)
    ROW_TILES: tl.constexpr = (BLOCK_Q + BLOCK_M - 1) // BLOCK_M
    FOURS: tl.constexpr = BLOCK_KV % 4 == 0
    batches, q_heads, group, q_len, kv_len, wave = sizes
    lengths = (q_len, kv_len)
    left, right, diagonal = band
    call = (mask, bias, segments, dropout, lengths, band, scale, softcap)
    lines, batch_stride, head_stride = shape
    kv_heads = q_heads // group
    first_heads = (lines, batch_stride, head_stride * group)  # the order is that of the group's first head
    batch, kv_head, line, column, column_end, column_within = own_tile(
        tl.program_id(0), lists, first_heads, kv_heads, batches * kv_heads, wave, kv_len, BLOCK_N, BLOCK_KV
    )
    j = (column + tl.arange(0, BLOCK_N))[:, None]
    k_rows, v_rows = head_of(k, batch, kv_head), head_of(v, batch, kv_head)
    k_tile = load_rows(k_rows, column, column_end, HEAD_DIM, BLOCK_D, BLOCK_N, True, WIDE)  # (BLOCK_N, D)
    v_tile = load_rows(v_rows, column, column_end, VALUE_DIM, BLOCK_DV, BLOCK_N, True, WIDE)  # (BLOCK_N, Dv)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    last = tl.maximum(tl.minimum(column + BLOCK_N, column_end) - 1, column)
    bounds = visible(column, last, q_len, right, left, -diagonal, BLOCK_Q)
    bounds = segment_walk(segments, lengths, batch, column, last, bounds, BLOCK_Q, True)
    for member in range(0, group if GROUPED else 1):
        head = kv_head * group + member
        walk = walk_of(lists, line + member * head_stride, bounds, BLOCK_Q, EDGES, FREE)
        q_rows, g_rows = head_of(q, batch, head), head_of(grad_o, batch, head)
        for part in tl.static_range(0, 2 if FREE else 1):
            for step in tl.range(0, (walk[5] if part == 0 else walk[7]) * ROW_TILES):
                row, row_end, within, is_partial, place = streamed_tile(lists, walk, step, q_len, part == 0, BLOCK_M, BLOCK_Q)
                rows = tl.multiple_of(row, BLOCK_M) + tl.arange(0, BLOCK_M) if BLOCK_Q % BLOCK_M == 0 else row + tl.arange(0, BLOCK_M)
                stat = first_stat(batch, head, q_heads, q_len) + rows
                i = rows[None, :]
                q_tile = load_rows(q_rows, row, row_end, HEAD_DIM, BLOCK_D, BLOCK_M, True, WIDE)
                s, slope = score_tile(k_tile, q_tile, i, j, batch, head, call, part == 0, FOLDED, PRECISION)  # (BLOCK_N, BLOCK_M)
                if part == 0:
                    s = rule_scores(s, i, j, batch, lengths, rule, place, is_partial, within, column_within, None, BLOCK_Q, BLOCK_KV, True)
                in_rows = rows < row_end if leaves_block(BLOCK_M, BLOCK_Q) else None
                pivot = row_stat(pivot_ptr, stat, in_rows, float("inf"))
                p = weights(s, pivot[None, :], norm_ptr, stat, in_rows, scale, True, FOLDED)
                g_tile = load_rows(g_rows, row, row_end, VALUE_DIM, BLOCK_DV, BLOCK_M, True, WIDE)
                dp = dot(v_tile, tl.trans(g_tile), None, PRECISION)  # (BLOCK_N, BLOCK_M)
                kept_p, dp = dropped(p, dp, dropout, batch, head, rows, column, FOURS, True)
                if grad_v is not None:
                    dv = dot(kept_p.to(g_tile.dtype), g_tile, dv, PRECISION)
                if grad_k is not None:
                    ds = p * (dp - row_stat(delta_ptr, stat, in_rows, 0.0)[None, :]) * slope
                    dk = dot(ds.to(q_tile.dtype), q_tile, dk, PRECISION)

    if grad_k is not None:
        store_rows(head_of(grad_k, batch, kv_head), column, column_end, dk * grad_scale, HEAD_DIM, BLOCK_N, WIDE)
    if grad_v is not None:
        store_rows(head_of(grad_v, batch, kv_head), column, column_end, dv, VALUE_DIM, BLOCK_N, WIDE)


KERNEL = Kernel(sparse_backward_keys_kernel)


def plan(facts: Facts, wide: bool, has_grad_k: bool, has_grad_v: bool, types: tuple[object, ...]) -> Plan:
    spec, layout = facts.spec, layout_of(facts)
    tile = tile_of(facts, "backward_keys")
    constants = {**facts.constants(tile, **over_queries(facts), GROUPED=spec.group > 1), "WIDE": wide}
    streamed = spec.q_len * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize * spec.group
    programs = spec.batch * spec.kv_heads * tiles_of(spec.kv_len, layout.block_kv, tile.block_n)
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(streamed, spec.kv_heads), programs, has_grad_k, has_grad_v, types)


def backward_keys(problem: SparseProblem, grad_o: Tensor, stats: RowStatistics, grad_k: Tensor | None, grad_v: Tensor | None) -> None:
    """Fill `grad_k` and `grad_v`, either of which may be None."""
    call_backward_keys(plan, problem, grad_o, stats, grad_k, grad_v)
