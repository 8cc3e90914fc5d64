"""combine_kernel: the result of a split forward from its shares."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.problem import Facts, Problem, strided
from attnzoo.backends.triton.steps import exp_above, log_sum_exp
from attnzoo.backends.triton.table import Tile


@triton.jit
def combine_kernel(
    parts_ptr,
    max_ptr,
    sum_ptr,
    o,
    lse_ptr,
    sizes,
    splits,
    VALUE_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    FOLDED: tl.constexpr,
):
    """`lse = ln sum_s l_s exp(m_s)` and `O = sum_s l_s exp(m_s - lse) O_s`.

    Tensors: parts `(splits, B, Hq, Sq, Dv)`, their maxima m and sums l `(splits, B, Hq, Sq)`, fp32; o `(B, Hq, Sq, Dv)`.
    One program a row; at most BLOCK_SPLITS splits.
    """
    q_heads, q_len, rows = sizes
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    stat = split.to(tl.int64) * rows + row
    part_max = tl.load(max_ptr + stat, mask=split < splits, other=-float("inf"))
    part_sum = tl.load(sum_ptr + stat, mask=split < splits, other=0.0)
    pivot = tl.max(part_max, 0)
    pivot = tl.where(pivot == -float("inf"), 0.0, pivot)  # finite: a row with no key would give nan
    weights = part_sum * exp_above(part_max, pivot, 1.0, FOLDED)
    total = tl.sum(weights, 0)
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = log_sum_exp(pivot, total, FOLDED)
    dims = tl.arange(0, max(16, triton.next_power_of_2(VALUE_DIM)))
    addresses = parts_ptr + (split.to(tl.int64)[:, None] * rows + row) * VALUE_DIM + dims[None, :]
    parts = tl.load(addresses, mask=(split < splits)[:, None] & (dims < VALUE_DIM)[None, :], other=0.0)
    combined = tl.sum(parts * weights[:, None], 0) / divisor
    o_ptr, o_batch, o_head, o_row = o
    batch, head, query = row // q_len // q_heads, row // q_len % q_heads, row % q_len
    target = o_ptr + batch * o_batch + head * o_head + query * o_row
    tl.store(target + dims, combined.to(o_ptr.dtype.element_ty), mask=dims < VALUE_DIM)
    tl.store(lse_ptr + row, lse)


KERNEL = Kernel(combine_kernel)
MOST_SPLITS = 128


def plan(facts: Facts, splits: int) -> Plan:
    spec = facts.spec
    block = 1 << (splits - 1).bit_length()
    tile = Tile(1, 1, 4 if block * spec.value_dim <= 2**14 else 8, 1)
    rows = spec.batch * spec.q_heads * spec.q_len
    constants = {"VALUE_DIM": spec.value_dim, "BLOCK_SPLITS": block, "FOLDED": facts.folded}
    return facts.new_plan(KERNEL, tile, constants, (spec.q_heads, spec.q_len, rows), rows)


def combine(problem: Problem, parts: Tensor, maxima: Tensor, sums: Tensor, o: Tensor, lse: Tensor) -> None:
    """Fill `o` and `lse` from parts `(splits, B, Hq, Sq, Dv)`, their maxima and sums `(splits, B, Hq, Sq)`, see `split_forward`."""
    splits = parts.shape[0]
    planned = problem.facts.plan(plan, splits)
    planned.launch((parts, maxima, sums, strided(o), lse, planned.sizes, splits))
