"""forward_kernel: a tile of queries stays on chip, and the blocks of its row stream past it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.block_sparse_triton.launch import SparseProblem, layout_of, over_keys, tile_of, tiles_of
from attnzoo.backends.block_sparse_triton.tiles import own_tile, rule_scores, streamed_tile, walk_of
from attnzoo.backends.triton.calls import call_forward
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts
from attnzoo.backends.triton.steps import add_values, first_state, log_sum_exp, normalised, score_tile
from attnzoo.backends.triton.tiles import head_of, load_rows, padded, segment_walk, store_rows, visible


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
    q_rows = head_of(q, batch, head)
    k_rows, v_rows = head_of(k, batch, head // group), head_of(v, batch, head // group)
    m_i, l_i = first_state(sinks_ptr, head, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    q_tile = load_rows(q_rows, row, row_end, HEAD_DIM, BLOCK_D, BLOCK_M, True, WIDE)  # (BLOCK_M, D)

    last = tl.maximum(tl.minimum(row + BLOCK_M, row_end) - 1, row)
    bounds = visible(row, last, kv_len, left, right, diagonal, BLOCK_KV)
    bounds = segment_walk(segments, lengths, batch, row, last, bounds, BLOCK_KV, False)
    walk = walk_of(lists, line, bounds, BLOCK_KV, EDGES, FREE)
    for part in tl.static_range(0, 2 if FREE else 1):
        for step in tl.range(0, (walk[5] if part == 0 else walk[7]) * KEY_TILES):
            column, column_end, within, is_partial, place = streamed_tile(lists, walk, step, kv_len, part == 0, BLOCK_N, BLOCK_KV)
            j = (column + tl.arange(0, BLOCK_N))[None, :]
            k_tile = load_rows(k_rows, column, column_end, HEAD_DIM, BLOCK_D, BLOCK_N, part == 0, WIDE)
            s, _slope = score_tile(q_tile, k_tile, i, j, batch, head, call, part == 0, FOLDED, PRECISION)  # (BLOCK_M, BLOCK_N)
            if part == 0:
                s = rule_scores(s, i, j, batch, lengths, rule, place, is_partial, row_within, within, column_end, BLOCK_Q, BLOCK_KV, False)
            m_i, l_i, acc = add_values(
                s, m_i, l_i, acc, v_rows, column, column_end, i, batch, head, call, VALUE_DIM, part == 0, FOURS, FOLDED, PRECISION, WIDE
            )

    acc = normalised(acc, l_i, dropout)
    store_rows(head_of(o, batch, head), row, row_end, acc, VALUE_DIM, BLOCK_M, WIDE)
    tl.store(lse_ptr + (batch * q_heads + head) * q_len + rows, log_sum_exp(m_i, l_i, FOLDED), mask=rows < row_end)


KERNEL = Kernel(sparse_forward_kernel)


def plan(facts: Facts, wide: bool, types: tuple[object, ...]) -> Plan:
    spec, layout = facts.spec, layout_of(facts)
    tile = tile_of(facts, "forward")
    constants = facts.constants(tile, **over_keys(facts, tile))
    streamed = spec.kv_len * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize // spec.group
    programs = spec.batch * spec.q_heads * tiles_of(spec.q_len, layout.block_q, tile.block_m)
    return facts.new_plan(KERNEL, tile, {**constants, "WIDE": wide}, facts.sizes(streamed, spec.q_heads), programs, types)


def forward(problem: SparseProblem, o: Tensor, lse: Tensor) -> None:
    """Fill `o` and `lse`."""
    call_forward(plan, problem, o, lse)
