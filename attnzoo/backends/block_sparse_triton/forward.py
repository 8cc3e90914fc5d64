"""forward_kernel: a tile of queries stays on chip, and the blocks of its row stream past it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.block_sparse_triton.launch import SparseProblem, layout_of, over_keys, tile_of, tiles_of
from attnzoo.backends.block_sparse_triton.tiles import dropout_kept, line_of, rule_tile, tested_block, walk_of
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, is_wide, strided
from attnzoo.backends.triton.tiles import (
    dot,
    head_of,
    load_rows,
    log_sum_exp,
    online_softmax,
    padded,
    score_tile,
    segment_walk,
    store_rows,
    visible,
)


@triton.jit
def sparse_forward_kernel(
    q,
    k,
    v,
    o,
    lse_ptr,
    mask,
    bias,
    segments,
    sinks_ptr,
    dropout,
    lists,
    rule,
    shape,
    sizes,
    band,
    scale,
    softcap,
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
    """`O = softmax(S) V` and `lse = ln sum exp S` of BLOCK_M queries of one head, over the blocks of their row.

    Tensors: q `(B, Hq, Sq, D)`, k `(B, Hkv, Skv, D)`, v `(B, Hkv, Skv, Dv)`, o `(B, Hq, Sq, Dv)`, lse `(B, Hq, Sq)`
    fp32; lists, rule and shape as in `tiles.py`. A block of BLOCK_Q x BLOCK_KV is walked in tiles of BLOCK_M x BLOCK_N.
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

    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # a key with this score and no value
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        m_i = tl.zeros([BLOCK_M], tl.float32) + sink
        l_i += tl.where(sink == -float("inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_M, padded(VALUE_DIM, HEAD_DIM)], tl.float32)
    q_tile = load_rows(q_head, q_row, row, row_end, HEAD_DIM, VALUE_DIM, BLOCK_M, True, WIDE)  # (BLOCK_M, D)

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
            product = dot(q_tile, tl.trans(k_tile), None, PRECISION)
            s, _slope = score_tile(
                product, i, j, batch, head, mask, bias, segments, lengths, band, scale, softcap, part == 0, FOLDED
            )  # (BLOCK_M, BLOCK_N)
            if part == 0:
                kept = rule_tile(
                    i, j, batch, lengths, rule, place, is_partial, tile * BLOCK_M, within, BLOCK_M, BLOCK_N, BLOCK_Q, BLOCK_KV, False
                )
                s = tl.where(kept & (j < column_end), s, -float("inf"))
            p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, scale, (part == 0) or (bias[0] is not None), FOLDED)
            if dropout is not None:
                p = tl.where(dropout_kept(dropout, batch, head, i, column, BLOCK_N, BLOCK_KV), p, 0.0)
            v_tile = load_rows(v_head, v_row, column, column_end, VALUE_DIM, HEAD_DIM, BLOCK_N, part == 0, WIDE)
            acc = dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], PRECISION)  # (BLOCK_M, Dv)

    kept_scale = 1.0 if dropout is None else dropout[2]
    acc *= (kept_scale / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    o_head, o_row = head_of(o, batch, head)
    store_rows(o_head, o_row, row, row_end, acc, VALUE_DIM, BLOCK_M, WIDE)
    tl.store(lse_ptr + (batch * q_heads + head) * q_len + rows, log_sum_exp(m_i, l_i, FOLDED), mask=rows < row_end)


KERNEL = Kernel(sparse_forward_kernel)


def plan(facts: Facts, wide: bool, types: tuple[object, ...]) -> Plan:
    spec, layout = facts.spec, layout_of(facts)
    tile = tile_of(facts, "forward")
    constants = facts.constants(tile, **over_keys(facts, tile))
    streamed = spec.kv_len * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize // spec.group
    programs = spec.batch * spec.q_heads * tiles_of(spec.q_len, layout.block_q, tile.block_m)
    return facts.new_plan(KERNEL, tile, {**constants, "WIDE": wide}, facts.sizes(streamed, spec.q_heads), programs, types)


def forward(sparse: SparseProblem, o: Tensor, lse: Tensor) -> None:
    """Fill `o` and `lse`."""
    problem, schedule, o_rows = sparse.problem, sparse.schedule, strided(o)
    facts = problem.facts
    planned = facts.plan(plan, facts.is_wide or is_wide(o_rows), schedule.types)
    arguments = (
        problem.q,
        problem.k,
        problem.v,
        o_rows,
        lse,
        problem.mask,
        problem.bias,
        problem.segments,
        problem.inputs.sinks,
        problem.dropout,
        schedule.rows,
        schedule.rule,
        schedule.row_shape,
        planned.sizes,
        facts.band,
        facts.scale,
        problem.spec.softcap,
    )
    planned.launch(arguments, problem.aligned(o_rows), problem.types)
