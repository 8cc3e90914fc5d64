"""delta_kernel: the row sums that the backward subtracts, and what each row gives its sink."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, Problem, is_wide, padded_rows, strided
from attnzoo.backends.triton.steps import LOG2E
from attnzoo.backends.triton.table import Tile
from attnzoo.backends.triton.tiles import ROW_PADDING, head_of, load_rows, padded


class RowStatistics(NamedTuple):
    """Of each row, `(B, Hq, padded Sq)` fp32: `P = norm exp(S - pivot)`, `dS = P (dP - delta)`; norm is None where it is 1."""

    pivot: Tensor
    delta: Tensor
    norm: Tensor | None


@triton.jit
def delta_kernel(
    o,
    grad_o,
    lse_ptr,
    grad_lse,
    pivot_ptr,
    delta_ptr,
    sinks_ptr,
    grad_sinks_ptr,
    norm_ptr,
    sizes,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FOLDED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`delta = rowsum(dO * O) - dlse`, the pivot of each row, and per tile `dsink = sum -exp(sink - lse) delta`.

    With them `P = exp(S - pivot)` and `dS = P (dP - delta)`, a gradient of the lse included. The pivot is the
    lse, in log2 units if FOLDED, and +inf, so that P is 0, for rows with no key and for padding. Tensors: o,
    grad_o `(B, Hq, Sq, Dv)`, lse, grad_lse `(B, Hq, Sq)`, pivot, delta `(B, Hq, padded Sq)` fp32, grad_sinks
    `(B, Hq, tiles)` fp32, to be summed. One program a tile.
    """
    BLOCK_DV: tl.constexpr = padded(VALUE_DIM, VALUE_DIM)
    q_heads, q_len = sizes
    tiles = tl.cdiv(q_len, ROW_PADDING) * (ROW_PADDING // BLOCK_M)
    program = tl.program_id(0).to(tl.int64)
    row = (program % tiles * BLOCK_M).to(tl.int32)
    flat = program // tiles
    batch, head = flat // q_heads, flat % q_heads
    rows = row + tl.arange(0, BLOCK_M)
    in_range = rows < q_len
    o_rows, g_rows = head_of(o, batch, head), head_of(grad_o, batch, head)
    o_tile = load_rows(o_rows, row, q_len, VALUE_DIM, BLOCK_DV, BLOCK_M, True, WIDE).to(tl.float32)  # (BLOCK_M, Dv)
    g_tile = load_rows(g_rows, row, q_len, VALUE_DIM, BLOCK_DV, BLOCK_M, True, WIDE).to(tl.float32)
    delta = tl.sum(o_tile * g_tile, 1)
    lse = tl.load(lse_ptr + flat * q_len + rows, mask=in_range, other=-float("inf"))
    if grad_lse is not None:
        d_head, d_row = head_of(grad_lse, batch, head)
        delta -= tl.load(d_head + rows.to(tl.int64) * d_row, mask=in_range, other=0.0).to(tl.float32)
    delta = tl.where(lse == -float("inf"), 0.0, delta)  # no gradient to or from a row with no key
    pivot = tl.where(lse == -float("inf"), float("inf"), lse * LOG2E if FOLDED else lse)
    tl.store(pivot_ptr + program * BLOCK_M + tl.arange(0, BLOCK_M), pivot)
    tl.store(delta_ptr + program * BLOCK_M + tl.arange(0, BLOCK_M), delta)
    if grad_sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        share = tl.where(lse == -float("inf"), 0.0, tl.exp(sink - lse))
        if norm_ptr is not None:
            share *= tl.load(norm_ptr + program * BLOCK_M + tl.arange(0, BLOCK_M), mask=in_range, other=0.0)
        tl.store(grad_sinks_ptr + program, tl.sum(-share * delta, 0))


KERNEL = Kernel(delta_kernel)
TILE = Tile(64, 64, 4, 1)


def plan(facts: Facts, wide: bool, has_grad_lse: bool, has_grad_sinks: bool) -> Plan:
    spec = facts.spec
    constants = {"VALUE_DIM": spec.value_dim, "BLOCK_M": TILE.block_m, "FOLDED": facts.folded, "WIDE": wide}
    programs = spec.batch * spec.q_heads * padded_rows(spec.q_len) // TILE.block_m
    return facts.new_plan(KERNEL, TILE, constants, (spec.q_heads, spec.q_len), programs, has_grad_lse, has_grad_sinks)


def row_statistics(
    problem: Problem, o: Tensor, grad_o: Tensor, lse: Tensor, grad_lse: Tensor | None, norms: Tensor | None
) -> tuple[RowStatistics, Tensor | None]:
    """What the backward needs of each row, and the gradient of the sinks, `(Hq,)`, where the spec asks for it."""
    spec, sinks = problem.spec, problem.inputs.sinks
    o_rows, g_rows = strided(o), strided(grad_o)
    has_grad_sinks = "sinks" in spec.grads
    planned = problem.facts.plan(plan, is_wide(o_rows, g_rows), grad_lse is not None, has_grad_sinks)
    padded = padded_rows(spec.q_len)
    pivot, delta = lse.new_empty(2, spec.batch, spec.q_heads, padded).unbind()
    parts = lse.new_empty(spec.batch, spec.q_heads, padded // TILE.block_m) if has_grad_sinks else None
    grad_lse_rows = None if grad_lse is None else strided(grad_lse)
    arguments = (o_rows, g_rows, lse, grad_lse_rows, pivot, delta, sinks, parts, norms, planned.sizes)
    planned.launch(arguments, problem.aligned(o_rows, g_rows))
    return RowStatistics(pivot, delta, norms), None if parts is None or sinks is None else parts.sum((0, 2)).to(sinks.dtype)
