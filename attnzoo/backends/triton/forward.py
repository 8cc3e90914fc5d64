"""forward_kernel: a tile of queries stays on chip, keys and values stream past it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, Problem, is_wide, strided
from attnzoo.backends.triton.tiles import (
    dot,
    dropout_tile,
    head_of,
    load_rows,
    log_sum_exp,
    online_softmax,
    padded,
    place,
    score_tile,
    segment_walk,
    store_rows,
    visible,
)


@triton.jit
def forward_kernel(
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
    sizes,
    band,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST_PHASE: tl.constexpr,
    FOLDED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`O = softmax(S) V` and `lse = ln sum exp S` of BLOCK_M queries of one head.

    `m = max(m, rowmax S_j)`, `l = alpha l + rowsum P_j`, `acc = alpha acc + P_j V_j` with
    `P_j = exp(S_j - m)`, `alpha = exp(m_before - m)`; at the end `O = acc / l`, `lse = m + ln l`.
    Tensors: q `(B, Hq, Sq, D)`, k `(B, Hkv, Skv, D)`, v `(B, Hkv, Skv, Dv)`, o `(B, Hq, Sq, Dv)`,
    lse `(B, Hq, Sq)` fp32. Three phases of the walk: the masked left edge, the free middle, the masked right edge.
    """
    batches, q_heads, group, q_len, kv_len, wave = sizes
    lengths = (q_len, kv_len)
    left, right, diagonal = band
    tiles = tl.cdiv(q_len, BLOCK_M)
    tile, batch, head = place(tl.program_id(0), tiles, q_heads, batches * q_heads, wave)
    row = (tiles - 1 - tile) * BLOCK_M  # under causal the last tiles are the longest, so they go first
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
    q_tile = load_rows(q_head, q_row, row, q_len, HEAD_DIM, VALUE_DIM, BLOCK_M, True, WIDE)  # (BLOCK_M, D)

    bounds = visible(row, tl.minimum(row + BLOCK_M, q_len) - 1, kv_len, left, right, diagonal, BLOCK_N)
    start, stop = bounds[0], bounds[3]
    if segments is not None:
        start, stop = segment_walk(segments[6], q_len, segments[7], kv_len, batch, row, row + BLOCK_M - 1, start, stop, BLOCK_N)
    for phase in tl.static_range(FIRST_PHASE, 3):
        begin = bounds[phase] if phase > FIRST_PHASE else start
        end = bounds[phase + 1] if phase < 2 else stop
        for step in tl.range(0, tl.cdiv(end - begin, BLOCK_N)):  # from 0: other bounds make ptxas serialize wgmma (C7515)
            column = begin + step * BLOCK_N
            j = (column + tl.arange(0, BLOCK_N))[None, :]
            k_tile = load_rows(k_head, k_row, column, kv_len, HEAD_DIM, VALUE_DIM, BLOCK_N, phase != 1, WIDE)
            product = dot(q_tile, tl.trans(k_tile), None, PRECISION)
            s, _slope = score_tile(
                product, i, j, batch, head, mask, bias, segments, lengths, band, scale, softcap, phase != 1, FOLDED
            )  # (BLOCK_M, BLOCK_N)
            p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, scale, (phase != 1) or (bias[0] is not None), FOLDED)
            if dropout is not None:
                p = tl.where(dropout_tile(dropout, batch, head, i, column, BLOCK_N), p, 0.0)
            v_tile = load_rows(v_head, v_row, column, kv_len, VALUE_DIM, HEAD_DIM, BLOCK_N, phase != 1, WIDE)
            acc = dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], PRECISION)  # (BLOCK_M, Dv)

    kept_scale = 1.0 if dropout is None else dropout[2]
    acc *= (kept_scale / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    o_head, o_row = head_of(o, batch, head)
    store_rows(o_head, o_row, row, q_len, acc, VALUE_DIM, BLOCK_M, WIDE)
    tl.store(lse_ptr + (batch * q_heads + head) * q_len + rows, log_sum_exp(m_i, l_i, FOLDED), mask=rows < q_len)


KERNEL = Kernel(forward_kernel)


def plan(facts: Facts, wide: bool) -> Plan:
    spec, tile = facts.spec, facts.tile("forward")
    constants = {**facts.constants(tile, FIRST_PHASE=facts.key_phase), "WIDE": wide}
    streamed = spec.kv_len * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize // spec.group
    programs = spec.batch * spec.q_heads * -(-spec.q_len // tile.block_m)
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(streamed, spec.q_heads), programs)


def forward(problem: Problem, o: Tensor, lse: Tensor) -> None:
    """Fill `o` and `lse`."""
    facts, o_rows = problem.facts, strided(o)
    planned = facts.plan(plan, facts.is_wide or is_wide(o_rows))
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
        planned.sizes,
        facts.band,
        facts.scale,
        problem.spec.softcap,
    )
    planned.launch(arguments, problem.aligned(o_rows), problem.types)
