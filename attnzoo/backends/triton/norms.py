"""norms_kernel: with a bias, what brings the weights of a row back to a sum of 1 where its lse is too large to do so."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.calls import call_norms
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, Problem, padded_rows
from attnzoo.backends.triton.steps import COARSE, exp_above, score_tile
from attnzoo.backends.triton.tiles import ROW_PADDING, first_stat, head_of, load_rows, padded, place, visible


@triton.jit
def norms_kernel(
    q,
    k,
    lse_ptr,
    norm_ptr,
    mask,
    bias,
    segments,
    sinks_ptr,
    sizes,
    band,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`norm = 1 / (sum exp(S - lse) + exp(sink - lse))` where `|lse| > COARSE`, else 1, so that `P = norm exp(S - lse)`.

    A tile with no such row reads its lse and no more. Tensors: as in the forward; norm `(B, Hq, padded Sq)` fp32.
    One program a tile of queries.
    """
    BLOCK_D: tl.constexpr = padded(HEAD_DIM, HEAD_DIM)
    batches, q_heads, group, q_len, kv_len, wave = sizes
    left, right, diagonal = band
    call = (mask, bias, segments, None, (q_len, kv_len), band, scale, softcap)
    tiles = tl.cdiv(q_len, ROW_PADDING) * (ROW_PADDING // BLOCK_M)
    tile, batch, head = place(tl.program_id(0), tiles, q_heads, batches * q_heads, wave)
    row = tile * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    in_range = rows < q_len
    lse = tl.load(lse_ptr + (batch * q_heads + head) * q_len + rows, mask=in_range, other=0.0)
    is_coarse = (tl.abs(lse) > COARSE) & (lse != -float("inf"))
    norm = tl.full([BLOCK_M], 1.0, tl.float32)
    if tl.max(is_coarse.to(tl.int32), 0) > 0:
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks_ptr is not None:
            total += tl.exp(tl.load(sinks_ptr + head).to(tl.float32) - lse)
        q_rows, k_rows = head_of(q, batch, head), head_of(k, batch, head // group)
        q_tile = load_rows(q_rows, row, q_len, HEAD_DIM, BLOCK_D, BLOCK_M, True, WIDE)
        start, _, _, stop = visible(row, tl.minimum(row + BLOCK_M, q_len) - 1, kv_len, left, right, diagonal, BLOCK_N)
        for column in range(start, stop, BLOCK_N):
            k_tile = load_rows(k_rows, column, kv_len, HEAD_DIM, BLOCK_D, BLOCK_N, True, WIDE)
            j = (column + tl.arange(0, BLOCK_N))[None, :]
            s, _slope = score_tile(q_tile, k_tile, rows[:, None], j, batch, head, call, True, False, PRECISION)
            total += tl.sum(exp_above(s, lse[:, None], scale, False), 1)
        norm = tl.where(is_coarse, 1.0 / tl.where(is_coarse, total, 1.0), 1.0)
    tl.store(norm_ptr + first_stat(batch, head, q_heads, q_len) + rows, norm)


KERNEL = Kernel(norms_kernel)


def plan(facts: Facts) -> Plan:
    spec, tile = facts.spec, facts.tile("forward")
    constants = {
        "HEAD_DIM": spec.head_dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "PRECISION": facts.precision,
        "WIDE": facts.is_wide,
    }
    programs = spec.batch * spec.q_heads * padded_rows(spec.q_len) // tile.block_m
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(1, spec.q_heads), programs)


def row_norms(problem: Problem, lse: Tensor) -> Tensor | None:
    """`(B, Hq, padded Sq)` fp32; None without a bias, where scores stay small enough for the lse."""
    if problem.inputs.bias is None:
        return None
    return call_norms(plan, problem, lse, lse.new_empty(*lse.shape[:2], padded_rows(problem.spec.q_len)))
