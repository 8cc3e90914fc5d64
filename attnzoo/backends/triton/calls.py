"""How the kernels that a layout has too are launched, with and without one: their arguments in order.

A kernel over a layout takes the layout's lists before the sizes; without one there are none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.backends.triton.bias_sums import bias_walk
from attnzoo.backends.triton.delta import RowStatistics
from attnzoo.backends.triton.launch import Plan
from attnzoo.backends.triton.problem import Problem, is_wide, strided

MakePlan = Callable[..., Plan]
"""`(facts, wide, *what else decides the types of the arguments)`; norms are never wider than q and k, and take no `wide`."""


def call_forward(plan: MakePlan, problem: Problem, o: Tensor, lse: Tensor) -> None:
    """Fill `o` and `lse`."""
    facts, o_rows = problem.facts, strided(o)
    planned = facts.plan(plan, facts.is_wide or is_wide(o_rows), *problem.layout_types)
    tensors = (problem.q, problem.k, problem.v, o_rows, lse)
    features = (problem.mask, problem.bias, problem.segments, problem.inputs.sinks, problem.dropout)
    scalars = (planned.sizes, facts.band, facts.scale, problem.spec.softcap)
    planned.launch((*tensors, *features, *problem.row_lists, *scalars), problem.aligned(o_rows), problem.types)


def call_norms(plan: MakePlan, problem: Problem, lse: Tensor, norms: Tensor) -> Tensor:
    """Fill `norms`, `(B, Hq, padded Sq)` fp32, and return them."""
    facts = problem.facts
    planned = facts.plan(plan, *problem.layout_types)
    tensors = (problem.q, problem.k, lse, norms)
    features = (problem.mask, problem.bias, problem.segments, problem.inputs.sinks)
    scalars = (planned.sizes, facts.band, facts.scale, problem.spec.softcap)
    planned.launch((*tensors, *features, *problem.row_lists, *scalars), problem.aligned(), problem.types)
    return norms


def call_backward_keys(
    plan: MakePlan, problem: Problem, grad_o: Tensor, stats: RowStatistics, grad_k: Tensor | None, grad_v: Tensor | None
) -> None:
    """Fill `grad_k` and `grad_v`, either of which may be None."""
    facts, g_rows = problem.facts, strided(grad_o)
    dk_rows, dv_rows = [None if grad is None else strided(grad) for grad in (grad_k, grad_v)]
    given = [rows for rows in (g_rows, dk_rows, dv_rows) if rows is not None]
    wide = facts.is_wide or is_wide(*given)
    planned = facts.plan(plan, wide, grad_k is not None, grad_v is not None, *problem.layout_types)
    tensors = (problem.q, problem.k, problem.v, g_rows, dk_rows, dv_rows, *stats)
    features = (problem.mask, problem.bias, problem.segments, problem.dropout)
    scalars = (planned.sizes, facts.band, facts.scale, problem.spec.softcap, problem.spec.scale)
    planned.launch((*tensors, *features, *problem.column_lists, *scalars), problem.aligned(*given), problem.types)


def call_backward_queries(plan: MakePlan, problem: Problem, grad_o: Tensor, stats: RowStatistics, grad_q: Tensor) -> None:
    """Fill `grad_q`."""
    facts, g_rows, dq_rows = problem.facts, strided(grad_o), strided(grad_q)
    planned = facts.plan(plan, facts.is_wide or is_wide(g_rows, dq_rows), *problem.layout_types)
    tensors = (problem.q, problem.k, problem.v, g_rows, dq_rows, *stats)
    features = (problem.mask, problem.bias, problem.segments, problem.dropout)
    scalars = (planned.sizes, facts.band, facts.scale, problem.spec.softcap, problem.spec.scale)
    planned.launch((*tensors, *features, *problem.row_lists, *scalars), problem.aligned(g_rows, dq_rows), problem.types)


def call_backward_bias(plan: MakePlan, problem: Problem, grad_o: Tensor, stats: RowStatistics, tiles: tuple[int, int]) -> Tensor:
    """The gradient of the bias, in its shape and dtype; `tiles` is how many tiles of rows and of columns the scores have."""
    spec, facts, bias = problem.spec, problem.facts, problem.inputs.bias
    assert bias is not None
    if 0 in (spec.batch, spec.q_heads, spec.q_len, spec.kv_len):
        return torch.zeros_like(bias)
    g_rows = strided(grad_o)
    summed, walk = bias_walk(spec, tiles)
    shape = {"rows": (spec.batch, spec.q_heads, 1, spec.kv_len), "columns": (spec.batch, spec.q_heads, spec.q_len, 1)}
    parts = bias.new_empty(bias.shape) if summed is None else stats.pivot.new_empty(shape[summed])  # fp32, summed below
    planned = facts.plan(plan, facts.is_wide or is_wide(g_rows), summed, *problem.layout_types)
    tensors = (problem.q, problem.k, problem.v, g_rows, (parts, *parts.stride()), *stats)
    features = (problem.mask, problem.bias, problem.segments, problem.dropout)
    scalars = (planned.sizes, facts.band, walk, facts.scale, spec.softcap)
    planned.launch((*tensors, *features, *problem.row_lists, *scalars), problem.aligned(g_rows), problem.types)
    return parts.sum_to_size(bias.shape).to(bias.dtype)
