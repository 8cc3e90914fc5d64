"""From an attnzoo call to the arguments of torch's scaled_dot_product_attention that mean the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attnzoo import AttentionInputs, AttentionSpec
from attnzoo.copied import copied
from attnzoo.masks import keep_mask

__all__ = ["SdpaArguments", "Wants", "band_kind", "convert", "needs_table"]

ALIGNMENT = 16  # bytes
HUGE = 2.0**100


def band_kind(spec: AttentionSpec) -> Literal["none", "causal", "table"]:
    """What causal and window come to: nothing, torch's top-left is_causal, or a table of pairs."""
    left, right = spec.band
    if left is not None and left >= spec.q_len - 1 + spec.diagonal:
        left = None  # reaches the first key from every query
    if right is not None and right >= spec.kv_len - 1 - spec.diagonal:
        right = None  # reaches the last key
    if left is None and right is None:
        return "none"
    return "causal" if left is None and right is not None and right + spec.diagonal == 0 else "table"


def needs_table(spec: AttentionSpec) -> bool:
    """Whether the call needs an attn_mask: torch takes is_causal or a mask, not both."""
    given = spec.mask is not None or spec.bias is not None or spec.segments or spec.layout is not None
    return given or band_kind(spec) == "table"


@dataclass(frozen=True, eq=False)
class SdpaArguments:
    """Arguments of scaled_dot_product_attention, and what is left to do to its result.

    Attributes:
        q, k, v: as torch takes them, last stride 1.
        attn_mask: `(B, Hq, Sq, Skv)`, bool or float, where dims of B and Hq may be broadcast; no row is empty.
        is_causal: only without attn_mask.
        scale: positive.
        enable_gqa: k and v have fewer heads than q.
        empty_rows: bool, broadcastable to `(B, Hq, Sq, 1)`: rows that see no key and must be 0; None without attn_mask.
        result_dtype: of the result.
        aligned_gradient: whether the gradient of the result is to be brought into the kernel's form.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float
    enable_gqa: bool
    empty_rows: Tensor | None
    result_dtype: torch.dtype
    aligned_gradient: bool

    def run(self) -> Tensor:
        o = torch.nn.functional.scaled_dot_product_attention(
            self.q,
            self.k,
            self.v,
            attn_mask=self.attn_mask,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        ).to(self.result_dtype)
        if self.aligned_gradient and o.requires_grad:
            o = ReadyGradient.apply(o)  # type: ignore[no-untyped-call]
        return o if self.empty_rows is None else o.masked_fill(self.empty_rows, 0.0)


@dataclass(frozen=True)
class Wants:
    """In what form a kernel takes a call.

    Attributes:
        dtype: of q, k and v.
        bias_dtype: dtype of a float mask; None if the call has no bias.
        aligned: every row is to start at a multiple of 16 bytes.
        expands_groups: k and v are to have as many heads as q.
    """

    dtype: torch.dtype
    bias_dtype: torch.dtype | None
    aligned: bool
    expands_groups: bool


def convert(spec: AttentionSpec, inputs: AttentionInputs, wants: Wants) -> SdpaArguments:
    """Arguments that mean the same to a kernel of these wants."""
    q, k, v = [tensor.to(wants.dtype) for tensor in (inputs.q, inputs.k, inputs.v)]
    q, scale = positive_scale(q, spec.scale)
    attn_mask, empty_rows = attention_table(spec, inputs, wants.bias_dtype) if needs_table(spec) else (None, None)
    is_causal = attn_mask is None and band_kind(spec) == "causal"
    if wants.expands_groups:
        k, v = expanded(k, spec.group), expanded(v, spec.group)
    q, k, v = [kernel_ready(tensor, wants.aligned) for tensor in (q, k, v)]
    if wants.aligned and is_expanded(q):
        q = q.contiguous()
    enable_gqa = True if k.shape[1] != spec.q_heads else False  # noqa: SIM210 (of symbolic sizes a bool, which torch wants)
    return SdpaArguments(q, k, v, attn_mask, is_causal, scale, enable_gqa, empty_rows, spec.dtype, wants.aligned)


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The sign goes into q, exactly: kernels take the running maximum before they scale."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0.0, 1.0)


def expanded(tensor: Tensor, group: int) -> Tensor:
    """`(B, Hkv, Skv, D)` to `(B, Hkv * group, Skv, D)`; autograd adds a group's gradients up in fp32."""
    batch, heads, length, dim = tensor.shape
    return tensor[:, :, None].expand(batch, heads, group, length, dim).reshape(batch, heads * group, length, dim)


def attention_table(spec: AttentionSpec, inputs: AttentionInputs, bias_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """The attn_mask in which every row sees a key, and the rows that see none.

    A row with no key is given all of them and its result is then set to 0, which also stops its gradient:
    no kernel is left to divide by zero.
    """
    kept = kept_pairs(spec, inputs)
    empty_rows = ~kept.any(-1, keepdim=True)
    if inputs.bias is None or bias_dtype is None:
        return full_table(spec, kept | empty_rows), empty_rows
    bias = far_from_overflow(inputs.bias.to(bias_dtype).masked_fill(~kept, 0.0), kept)
    return full_table(spec, bias.masked_fill(~kept & ~empty_rows, -torch.inf)), empty_rows


def far_from_overflow(bias: Tensor, kept: Tensor) -> Tensor:
    """Rows whose every bias is beyond -2**100 shrunk to a quarter: kernels multiply by log2(e), which overflows at
    finfo.min. No answer changes: both swallow the scores whole, and equal stays equal, less stays less."""
    if not bias.numel():
        return bias
    peak = bias.detach().masked_fill(~kept, -torch.inf).amax(-1, keepdim=True)
    shrunk = bias.detach() * 0.25 + (bias - bias.detach())  # the gradient is not shrunk
    return torch.where(peak < -HUGE, shrunk, bias)


def kept_pairs(spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """Bool, broadcastable to `(B, Hq, Sq, Skv)`, 4 dims: causal, window, mask, segments, layout and -inf in bias."""
    parts = [keep_mask(spec, inputs, slice(0, spec.q_len), slice(0, spec.kv_len))]
    if inputs.layout is not None:
        parts.append(inputs.layout.to_dense())
    if inputs.bias is not None:
        parts.append(inputs.bias.detach() != -torch.inf)
    tables = [part[(None,) * (4 - part.ndim)] for part in parts if part is not None]
    kept = tables[0]
    for table in tables[1:]:
        kept = kept & table
    return kept


def full_table(spec: AttentionSpec, table: Tensor) -> Tensor:
    """Rows and keys written out, batch and heads only viewed: kernels want a last stride of 1."""
    rows = table.expand(*table.shape[:2], spec.q_len, spec.kv_len).contiguous()
    return rows.expand(spec.batch, spec.q_heads, spec.q_len, spec.kv_len)


class ReadyGradient(torch.autograd.Function):
    """The identity; the gradient reaches the kernel in a form that it reads rightly, which torch does not see to."""

    @staticmethod
    def forward(o: Tensor) -> Tensor:
        return o.view_as(o)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return kernel_ready(grad.contiguous(), True)


def kernel_ready(tensor: Tensor, aligned: bool) -> Tensor:
    """The tensor, or a copy where torch's kernels would refuse its strides or read it wrongly.

    A copy for the CUDA kernels keeps the order of the dims in memory, which their result has as well: a compiled call, which
    copies whatever it is given, then gives the strides that an eager one gives.
    """
    has_rows = tensor.stride(-1) == 1
    if has_rows and (is_aligned(tensor) if aligned else not overlaps(tensor)):
        return tensor
    if aligned and has_rows:
        copy = copied(tensor, keeps_order=True)
        if copy.stride(-1) == 1:  # of rows one element apart torch takes the shorter dim for the last one
            return copy
    return copied(tensor)


def is_aligned(tensor: Tensor) -> bool:
    """Torch does not check, and its CUDA kernels load 16 bytes at a time."""
    if torch.compiler.is_compiling():
        return False  # Dynamo can't tell the storage offset
    steps = (tensor.storage_offset(), *tensor.stride()[:-1])
    return all([step * tensor.itemsize % ALIGNMENT == 0 for step in steps])


def is_expanded(tensor: Tensor) -> bool:
    """Some dim is a view of one element: cuDNN's result, laid out like q, would not have a last stride of 1."""
    return any([stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape)])


def overlaps(tensor: Tensor) -> bool:
    """Rows share memory, which oneDNN's products on the CPU refuse."""
    return tensor.shape[-2] > 1 and tensor.stride(-2) < tensor.shape[-1]
