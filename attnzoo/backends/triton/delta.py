"""delta_kernel: the row sums that the backward subtracts, and what each row gives its sink."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.launch import Kernel
from attnzoo.backends.triton.problem import Problem, is_wide, strided
from attnzoo.backends.triton.table import Tile
from attnzoo.backends.triton.tiles import LOG2E, ROW_PADDING, head_of, load_rows


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
    q_heads, q_len = sizes
    tiles = tl.cdiv(q_len, ROW_PADDING) * (ROW_PADDING // BLOCK_M)
    program = tl.program_id(0)
    row = program % tiles * BLOCK_M
    flat = (program // tiles).to(tl.int64)
    batch, head = flat // q_heads, flat % q_heads
    rows = row + tl.arange(0, BLOCK_M)
    in_range = rows < q_len
    o_head, o_row = head_of(o, batch, head)
    g_head, g_row = head_of(grad_o, batch, head)
    o_tile = load_rows(o_head, o_row, row, q_len, VALUE_DIM, BLOCK_M, True, WIDE).to(tl.float32)  # (BLOCK_M, Dv)
    g_tile = load_rows(g_head, g_row, row, q_len, VALUE_DIM, BLOCK_M, True, WIDE).to(tl.float32)
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
        tl.store(grad_sinks_ptr + program, tl.sum(-share * delta, 0))


KERNEL = Kernel(delta_kernel)
TILE = Tile(64, 64, 4, 1)


def row_statistics(
    problem: Problem, o: Tensor, grad_o: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """`(pivot, delta)`, each `(B, Hq, padded Sq)` fp32, and the gradient of the sinks, `(Hq,)`, where the spec asks for it."""
    spec, sinks = problem.spec, problem.inputs.sinks
    tiles = -(-spec.q_len // ROW_PADDING.value) * (ROW_PADDING.value // TILE.block_m)
    pivot, delta = lse.new_empty(2, spec.batch, spec.q_heads, tiles * TILE.block_m).unbind()
    parts = lse.new_empty(spec.batch, spec.q_heads, tiles) if "sinks" in spec.grads else None
    tensors = {"o": strided(o), "grad_o": strided(grad_o)}
    constants = {"VALUE_DIM": spec.value_dim, "BLOCK_M": TILE.block_m, "FOLDED": problem.folded, "WIDE": is_wide(*tensors.values())}
    arguments = (
        tensors["o"],
        tensors["grad_o"],
        lse,
        None if grad_lse is None else (grad_lse, *grad_lse.stride()),
        pivot,
        delta,
        sinks,
        parts,
        (spec.q_heads, spec.q_len),
    )
    variant = problem.variant(TILE, constants, tensors, grad_lse is None, parts is None)
    KERNEL.launch(spec.batch * spec.q_heads * tiles, arguments, constants, variant)
    return (pivot, delta), None if parts is None or sinks is None else parts.sum((0, 2)).to(sinks.dtype)
