"""forward_kernel: a tile of queries stays on chip, keys and values stream past it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.calls import call_forward
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, Problem
from attnzoo.backends.triton.steps import add_values, first_state, log_sum_exp, normalised, score_tile
from attnzoo.backends.triton.tiles import head_of, load_rows, padded, place, segment_walk, store_rows, visible


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
    BLOCK_D: tl.constexpr = padded(HEAD_DIM, VALUE_DIM)
    BLOCK_DV: tl.constexpr = padded(VALUE_DIM, HEAD_DIM)
    batches, q_heads, group, q_len, kv_len, wave = sizes
    left, right, diagonal = band
    lengths = (q_len, kv_len)
    call = (mask, bias, segments, dropout, lengths, band, scale, softcap)
    tiles = tl.cdiv(q_len, BLOCK_M)
    tile, batch, head = place(tl.program_id(0), tiles, q_heads, batches * q_heads, wave)
    row = (tiles - 1 - tile) * BLOCK_M  # under causal the last tiles are the longest, so they go first
    rows = row + tl.arange(0, BLOCK_M)
    i = rows[:, None]
    q_rows = head_of(q, batch, head)
    k_rows, v_rows = head_of(k, batch, head // group), head_of(v, batch, head // group)
    m_i, l_i = first_state(sinks_ptr, head, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    q_tile = load_rows(q_rows, row, q_len, HEAD_DIM, BLOCK_D, BLOCK_M, True, WIDE)  # (BLOCK_M, D)

    walk = visible(row, tl.minimum(row + BLOCK_M, q_len) - 1, kv_len, left, right, diagonal, BLOCK_N)
    walk = segment_walk(segments, lengths, batch, row, row + BLOCK_M - 1, walk, BLOCK_N, False)
    for phase in tl.static_range(FIRST_PHASE, 3):
        begin = walk[phase] if phase > FIRST_PHASE else walk[0]
        for step in tl.range(0, tl.cdiv(walk[phase + 1] - begin, BLOCK_N)):  # from 0: other bounds make ptxas serialize wgmma (C7515)
            column = begin + step * BLOCK_N
            j = (column + tl.arange(0, BLOCK_N))[None, :]
            k_tile = load_rows(k_rows, column, kv_len, HEAD_DIM, BLOCK_D, BLOCK_N, phase != 1, WIDE)
            s, _slope = score_tile(q_tile, k_tile, i, j, batch, head, call, phase != 1, FOLDED, PRECISION)  # (BLOCK_M, BLOCK_N)
            m_i, l_i, acc = add_values(
                s, m_i, l_i, acc, v_rows, column, kv_len, i, batch, head, call, VALUE_DIM, phase != 1, True, FOLDED, PRECISION, WIDE
            )

    acc = normalised(acc, l_i, dropout)
    store_rows(head_of(o, batch, head), row, q_len, acc, VALUE_DIM, BLOCK_M, WIDE)
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
    call_forward(plan, problem, o, lse)
