"""split_kernel: the forward of few queries, whose keys are split among programs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, Problem
from attnzoo.backends.triton.steps import add_values, log_sum_exp, normalised, score_tile
from attnzoo.backends.triton.table import Tile
from attnzoo.backends.triton.tiles import head_of, load_rows, padded, segment_walk, visible


@triton.jit
def split_kernel(
    q,
    k,
    v,
    o,
    lse_ptr,
    sum_ptr,
    mask,
    bias,
    segments,
    sinks_ptr,
    dropout,
    sizes,
    splits,
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
    """The forward over one of `splits` shares of the keys, each key read once for all heads of its group.

    The rows of a tile are queries times the heads of a group, heads running faster, so that its loads, sinks and stores are
    its own. Tensors: as in the forward, but o `(splits, B, Hq, Sq, Dv)`. Where sum_ptr is None, splits is 1, and these are the
    result itself; else a share's maximum and sum are kept apart, `(splits, B, Hq, Sq)` each, the maximum in place of the lse,
    which near finfo.min no longer tells one key from a thousand.
    """
    BLOCK_D: tl.constexpr = padded(HEAD_DIM, VALUE_DIM)
    BLOCK_DV: tl.constexpr = padded(VALUE_DIM, HEAD_DIM)
    batches, q_heads, group, q_len, kv_len, _ = sizes
    lengths = (q_len, kv_len)
    left, right, diagonal = band
    call = (mask, bias, segments, dropout, lengths, band, scale, softcap)
    program = tl.program_id(0)
    split = (program % splits).to(tl.int64)
    tiles = tl.cdiv(q_len * group, BLOCK_M)
    row = program // splits % tiles * BLOCK_M
    flat = (program // splits // tiles).to(tl.int64)
    kv_heads = q_heads // group
    batch, kv_head = flat // kv_heads, flat % kv_heads
    rows = row + tl.arange(0, BLOCK_M)
    in_range = rows < q_len * group
    queries = rows // group
    i = queries[:, None]
    heads = kv_head * group + rows % group
    q_ptr, q_batch, q_head, q_row = q
    dims = tl.arange(0, BLOCK_D)[None, :]
    q_rows = q_ptr + batch * q_batch + heads * q_head + queries.to(tl.int64) * q_row
    q_tile = tl.load(q_rows[:, None] + dims, mask=in_range[:, None] & (dims < HEAD_DIM), other=0.0)  # (BLOCK_M, D)
    k_rows, v_rows = head_of(k, batch, kv_head), head_of(v, batch, kv_head)

    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # a key with this score and no value, which belongs to the first split
        sink = tl.load(sinks_ptr + heads, mask=in_range & (split == 0), other=-float("inf")).to(tl.float32)
        m_i = tl.maximum(m_i, sink)
        l_i = tl.where(sink == -float("inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    first, last = row // group, (tl.minimum(row + BLOCK_M, q_len * group) - 1) // group
    bounds = visible(first, last, kv_len, left, right, diagonal, BLOCK_N)
    bounds = segment_walk(segments, lengths, batch, first, last, bounds, BLOCK_N, False)
    start, stop = bounds[0], bounds[3]
    share = tl.cdiv(tl.cdiv(stop - start, BLOCK_N), splits) * BLOCK_N
    start = tl.minimum(start + split.to(tl.int32) * share, stop)
    stop = tl.minimum(start + share, stop)
    for phase in tl.static_range(FIRST_PHASE, 3):
        begin = tl.minimum(tl.maximum(bounds[phase], start), stop) if phase > FIRST_PHASE else start
        end = tl.minimum(tl.maximum(bounds[phase + 1], start), stop) if phase < 2 else stop
        for step in tl.range(0, tl.cdiv(end - begin, BLOCK_N)):  # from 0: other bounds make ptxas serialize wgmma (C7515)
            column = begin + step * BLOCK_N
            j = (column + tl.arange(0, BLOCK_N))[None, :]
            k_tile = load_rows(k_rows, column, kv_len, HEAD_DIM, BLOCK_D, BLOCK_N, phase != 1, WIDE)
            s, _slope = score_tile(q_tile, k_tile, i, j, batch, heads[:, None], call, phase != 1, FOLDED, PRECISION)  # (BLOCK_M, BLOCK_N)
            m_i, l_i, acc = add_values(
                s,
                m_i,
                l_i,
                acc,
                v_rows,
                column,
                kv_len,
                i,
                batch,
                heads[:, None],
                call,
                VALUE_DIM,
                phase != 1,
                True,
                FOLDED,
                PRECISION,
                WIDE,
            )

    acc = normalised(acc, l_i, dropout)
    o_ptr, o_split, o_batch, o_head, o_row = o
    value_dims = tl.arange(0, BLOCK_DV)[None, :]
    o_rows = o_ptr + split * o_split + batch * o_batch + heads * o_head + queries.to(tl.int64) * o_row
    tl.store(o_rows[:, None] + value_dims, acc.to(o_ptr.dtype.element_ty), mask=in_range[:, None] & (value_dims < VALUE_DIM))
    lse_rows = ((split * batches + batch) * q_heads + heads) * q_len + queries
    if sum_ptr is None:
        tl.store(lse_ptr + lse_rows, log_sum_exp(m_i, l_i, FOLDED), mask=in_range)
    else:
        tl.store(lse_ptr + lse_rows, m_i, mask=in_range)
        tl.store(sum_ptr + lse_rows, l_i, mask=in_range)


KERNEL = Kernel(split_kernel)


def plan(facts: Facts, tile: Tile, splits: int) -> Plan:
    spec = facts.spec
    constants = {**facts.constants(tile, FIRST_PHASE=facts.key_phase), "WIDE": facts.is_wide}
    tiles = -(-spec.q_len * spec.group // tile.block_m)
    programs = splits * tiles * spec.batch * spec.kv_heads
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(1, spec.q_heads), programs, splits == 1)


def split_forward(problem: Problem, tile: Tile, splits: int, o: Tensor, lse: Tensor, sums: Tensor | None) -> None:
    """Fill `o` `(splits, B, Hq, Sq, Dv)` and `lse` `(splits, B, Hq, Sq)` if splits is 1, which has no sums.

    Else the shares, in fp32: `o` of each, and in place of its lse a maximum, which combine understands, with the sum that goes with it.
    """
    facts, o_rows = problem.facts, (o, *o.stride()[:4])
    planned = facts.plan(plan, tile, splits)
    arguments = (
        problem.q,
        problem.k,
        problem.v,
        o_rows,
        lse,
        sums,
        problem.mask,
        problem.bias,
        problem.segments,
        problem.inputs.sinks,
        problem.dropout,
        planned.sizes,
        splits,
        facts.band,
        facts.scale,
        problem.spec.softcap,
    )
    planned.launch(arguments, problem.aligned(o_rows), problem.types)
