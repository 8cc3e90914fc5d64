"""After the backward: dQ in the inputs' dtype from its fp32 accumulator."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["q_heads", "q_len"])
def convert_dq(
    sum_ptr, dq_ptr, scale, q_heads, q_len, stride_qb, stride_qh, stride_qm,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq = scale * sum. sum (B Hq, Sq, D) fp32; dq (B, Hq, Sq, D) of any strides, last 1."""
    batch_head = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < q_len)[:, None] & (columns < HEAD_DIM)[None, :]
    total = tl.load(sum_ptr + (batch_head * q_len + rows)[:, None] * HEAD_DIM + columns[None, :], inside, 0.0)
    offsets = (batch_head // q_heads) * stride_qb + (batch_head % q_heads) * stride_qh + rows.to(tl.int64)[:, None] * stride_qm + columns[None, :]
    tl.store(dq_ptr + offsets, (total * scale).to(dq_ptr.dtype.element_ty), inside)
