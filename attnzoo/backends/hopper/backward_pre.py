"""Before the backward: delta and the lse as the main kernel wants them, and zeroed states of the dQ blocks."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


STRIDES = [f"stride_{tensor}{dim}" for tensor in "odl" for dim in "bhm"]


@triton.jit(do_not_specialize=["dlse_ptr", "q_heads", "q_len", "padded_len", *STRIDES])
def prepare_backward(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, lse2_ptr, state_ptr, q_heads, q_len, padded_len,
    stride_ob, stride_oh, stride_om, stride_db, stride_dh, stride_dm, stride_lb, stride_lh, stride_lm,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(O dO) - dlse; lse2 = lse * log2(e), inf where no probability is left; state = 0.

    lse (B, Hq, Sq); delta, lse2 (B Hq, padded) fp32; state (B Hq, blocks of BLOCK_Q rows) int32; ROWS divides BLOCK_Q.
    Strides of o and do are multiples of 8. An inf lse2 makes exp2(s - lse2) zero: rows past the end and rows without
    keys (lse -inf) need no mask.
    """
    gdc_launch_dependents()
    # multiples of 8, said so that the compiler sees it and loads 16 bytes at a time
    stride_ob, stride_oh, stride_om = stride_ob // 8 * 8, stride_oh // 8 * 8, stride_om // 8 * 8
    stride_db, stride_dh, stride_dm = stride_db // 8 * 8, stride_dh // 8 * 8, stride_dm // 8 * 8
    batch_head = tl.program_id(0).to(tl.int64)
    batch, head = batch_head // q_heads, batch_head % q_heads
    first_row = tl.program_id(1) * ROWS
    rows = first_row + tl.arange(0, ROWS)
    wide_rows = rows.to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < q_len)[:, None] & (columns < HEAD_DIM)[None, :]
    o = tl.load(o_ptr + batch * stride_ob + head * stride_oh + wide_rows[:, None] * stride_om + columns[None, :], inside, 0.0)
    do = tl.load(do_ptr + batch * stride_db + head * stride_dh + wide_rows[:, None] * stride_dm + columns[None, :], inside, 0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # (ROWS,)
    if HAS_DLSE:
        offsets = batch * stride_lb + head * stride_lh + wide_rows * stride_lm
        delta -= tl.load(dlse_ptr + offsets, rows < q_len, 0.0).to(tl.float32)
    lse = tl.load(lse_ptr + batch_head * q_len + rows, rows < q_len, -float("inf"))
    delta = tl.where(lse == -float("inf"), 0.0, delta)  # no gradient to or from a row without keys, whatever dlse holds there
    padded = batch_head * padded_len + rows
    tl.store(delta_ptr + padded, delta, rows < padded_len)
    tl.store(lse2_ptr + padded, tl.where(lse == -float("inf"), float("inf"), lse * LOG2E), rows < padded_len)
    tl.store(state_ptr + batch_head * tl.cdiv(q_len, BLOCK_Q) + first_row // BLOCK_Q, 0, first_row < q_len)
