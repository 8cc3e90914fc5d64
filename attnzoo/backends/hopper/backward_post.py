"""After the backward: dQ in the inputs' dtype from its fp32 sum."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit(do_not_specialize=["q_heads", "q_len", "stride_qb", "stride_qh", "stride_qm"])
def convert_dq(
    sum_ptr, state_ptr, dq_ptr, scale, q_heads, q_len, stride_qb, stride_qh, stride_qm,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """dq = scale * sum, and 0 in blocks whose state is still 0: they see no key, nobody has written their sum.

    sum (B Hq, Sq, D) fp32; state (B Hq, blocks of BLOCK_Q rows) int32; dq (B, Hq, Sq, D) of strides that are multiples of 8, last 1.
    """
    gdc_wait()
    # multiples of 8, said so that the compiler sees it and stores 16 bytes at a time
    stride_qb, stride_qh, stride_qm = stride_qb // 8 * 8, stride_qh // 8 * 8, stride_qm // 8 * 8
    batch_head = tl.program_id(0).to(tl.int64)
    first_row = tl.program_id(1) * ROWS
    rows = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < q_len)[:, None] & (columns < HEAD_DIM)[None, :]
    is_written = tl.load(state_ptr + batch_head * tl.cdiv(q_len, BLOCK_Q) + first_row // BLOCK_Q) != 0
    total = tl.load(sum_ptr + (batch_head * q_len + rows)[:, None] * HEAD_DIM + columns[None, :], inside & is_written, 0.0)
    start = (batch_head // q_heads) * stride_qb + (batch_head % q_heads) * stride_qh
    offsets = rows.to(tl.int64)[:, None] * stride_qm + columns[None, :]
    tl.store(dq_ptr + start + offsets, (total * scale).to(dq_ptr.dtype.element_ty), inside)
