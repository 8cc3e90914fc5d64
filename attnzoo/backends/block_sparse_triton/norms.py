"""norms_kernel: over a layout, what brings the weights of a row back to a sum of 1 where its lse is too large to do so."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.block_sparse_triton.launch import SparseProblem, layout_of, over_keys, tile_of, tiles_of
from attnzoo.backends.block_sparse_triton.tiles import own_tile, rule_scores, streamed_tile, walk_of
from attnzoo.backends.triton.calls import call_norms
from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, padded_rows
from attnzoo.backends.triton.steps import COARSE, exp_above, score_tile
from attnzoo.backends.triton.tiles import first_stat, head_of, load_rows, padded, visible


@triton.jit
def sparse_norms_kernel(
    q,
    k,
    lse_ptr,
    norm_ptr,
    mask,
    bias,
    segments,
    sinks_ptr,
    lists,
    rule,
    shape,
    sizes,
    band,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    EDGES: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Where `|lse| > COARSE`, `norm = 1 / (sum exp(S - lse) + exp(sink - lse))`, so that `P = norm exp(S - lse)`.

    Writes those rows alone: norm `(B, Hq, padded Sq)` fp32 holds ones. Other tensors: as in the forward.
    """
    BLOCK_D: tl.constexpr = padded(HEAD_DIM, HEAD_DIM)
    KEY_TILES: tl.constexpr = (BLOCK_KV + BLOCK_N - 1) // BLOCK_N
    batches, q_heads, group, q_len, kv_len, wave = sizes
    left, right, diagonal = band
    lengths = (q_len, kv_len)
    call = (mask, bias, segments, None, lengths, band, scale, softcap)
    batch, head, line, row, row_end, row_within = own_tile(
        tl.program_id(0), lists, shape, q_heads, batches * q_heads, wave, q_len, BLOCK_M, BLOCK_Q
    )
    rows = row + tl.arange(0, BLOCK_M)
    lse = tl.load(lse_ptr + (batch * q_heads + head) * q_len + rows, mask=rows < row_end, other=0.0)
    is_coarse = (tl.abs(lse) > COARSE) & (lse != -float("inf"))
    if tl.max(is_coarse.to(tl.int32), 0) > 0:
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks_ptr is not None:
            total += tl.exp(tl.load(sinks_ptr + head).to(tl.float32) - lse)
        q_rows, k_rows = head_of(q, batch, head), head_of(k, batch, head // group)
        q_tile = load_rows(q_rows, row, row_end, HEAD_DIM, BLOCK_D, BLOCK_M, True, WIDE)
        bounds = visible(row, tl.maximum(tl.minimum(row + BLOCK_M, row_end) - 1, row), kv_len, left, right, diagonal, BLOCK_KV)
        walk = walk_of(lists, line, bounds, BLOCK_KV, EDGES, False)
        for step in range(0, walk[5] * KEY_TILES):
            column, column_end, within, is_partial, place = streamed_tile(lists, walk, step, kv_len, True, BLOCK_N, BLOCK_KV)
            i, j = rows[:, None], (column + tl.arange(0, BLOCK_N))[None, :]
            k_tile = load_rows(k_rows, column, column_end, HEAD_DIM, BLOCK_D, BLOCK_N, True, WIDE)
            s, _slope = score_tile(q_tile, k_tile, i, j, batch, head, call, True, False, PRECISION)
            s = rule_scores(s, i, j, batch, lengths, rule, place, is_partial, row_within, within, column_end, BLOCK_Q, BLOCK_KV, False)
            total += tl.sum(exp_above(s, lse[:, None], scale, False), 1)
        norm = 1.0 / tl.where(is_coarse, total, 1.0)
        tl.store(norm_ptr + first_stat(batch, head, q_heads, q_len) + rows, norm, mask=is_coarse)


KERNEL = Kernel(sparse_norms_kernel)


def plan(facts: Facts, types: tuple[object, ...]) -> Plan:
    spec, layout = facts.spec, layout_of(facts)
    tile = tile_of(facts, "forward")
    blocks = over_keys(facts, tile)
    constants = {
        "HEAD_DIM": spec.head_dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_Q": layout.block_q,
        "BLOCK_KV": layout.block_kv,
        "EDGES": blocks["EDGES"],
        "PRECISION": facts.precision,
        "WIDE": facts.is_wide,
    }
    programs = spec.batch * spec.q_heads * tiles_of(spec.q_len, layout.block_q, tile.block_m)
    return facts.new_plan(KERNEL, tile, constants, facts.sizes(1, spec.q_heads), programs, types)


def row_norms(problem: SparseProblem, lse: Tensor) -> Tensor | None:
    """`(B, Hq, padded Sq)` fp32; None without a bias, where scores stay small enough for the lse."""
    if problem.inputs.bias is None:
        return None
    return call_norms(plan, problem, lse, lse.new_ones(*lse.shape[:2], padded_rows(problem.spec.q_len)))
