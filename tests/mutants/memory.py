"""Faults of addresses: strides, offsets, slack, and what is never written."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .mutant import PLAIN_FORWARD, Mutant


class StridesIgnored(Mutant):
    """q is read as if it were contiguous."""

    caught_by = ("T08-q-bshd", "T08-all-sbhd-fp16")

    def queries(self, spec, inputs):
        contiguous = torch.empty(inputs.q.shape, device="meta").stride()
        return super().queries(spec, replace(inputs, q=inputs.q.as_strided(inputs.q.shape, contiguous)))


class StridesOfKForV(Mutant):
    """v is read with the strides of k."""

    caught_by = ("T08-mixed-bshd-contiguous-sbhd-fp32",)
    passes = "T08-all-bshd-fp32"

    def values(self, spec, inputs):
        is_alike = spec.head_dim == spec.value_dim
        v = inputs.v.as_strided(inputs.v.shape, inputs.k.stride()) if is_alike else inputs.v
        return super().values(spec, replace(inputs, v=v))


class AddressRoundedDown(Mutant):
    """q is read from an address that is a multiple of 4 elements."""

    caught_by = ("T13-offset-1-fp32", "T13-offset-2-odd_rows-fp16")

    def queries(self, spec, inputs):
        q = inputs.q
        return super().queries(spec, replace(inputs, q=q.as_strided(q.shape, q.stride(), q.storage_offset() // 4 * 4)))


class OffsetsIn32Bits(Mutant):
    """Offsets within q are 32-bit numbers that wrap."""

    caught_by = ("T12-batches-2-to-31-apart-in-q-fp16",)

    def queries(self, spec, inputs):
        q = inputs.q
        wrapped = [(stride + 2**31) % 2**32 - 2**31 for stride in q.stride()]
        inside = [max(0, stride) for stride in wrapped]  # before the buffer there is nothing that we may read
        return super().queries(spec, replace(inputs, q=q.as_strided(q.shape, inside)))


class SlackRead(Mutant):
    """The last tile of v reads on into what lies behind, with a weight of 0: 0 * NaN."""

    caught_by = ("T04-slack-slack-fp32", "T04-slack-slack-bf16", "T04-slack-layout")

    def forward(self, spec, inputs):
        o, lse = super().forward(spec, inputs)
        behind = self.of_query_heads(spec, tile_behind(inputs.v, -spec.kv_len % 16))
        return o + (0.0 * behind).sum(2, keepdim=True).to(o.dtype), lse


def tile_behind(tensor: Tensor, rows: int) -> Tensor:
    """The rows behind the logical ones as far as the storage reaches, else zeros."""
    batch, heads, length, dim = tensor.shape
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in zip((batch, heads, length + rows, dim), tensor.stride()))
    if not tensor.numel() or last >= tensor.untyped_storage().nbytes() // tensor.element_size():
        return tensor.new_zeros(batch, heads, rows, dim)
    wider = tensor.as_strided((batch, heads, length + rows, dim), tensor.stride())
    return wider[:, :, length:]


class EmptyRowsUnwritten(Mutant):
    """Rows of o with no key keep what the allocator returned."""

    caught_by = ("T05-canaries-empty-rows-fp32", "T05-canaries-bottom-right-bf16", "T05-canaries-no-keys-fp32")

    def forward(self, spec, inputs):
        o, lse = super().forward(spec, inputs)
        written = lse[..., None] != -torch.inf
        return torch.empty_like(o).masked_scatter_(written.expand(o.shape), o[written.expand(o.shape)]), lse


class TailRowsUnwritten(Mutant):
    """Rows of dQ beyond the last whole tile of 16 are never written."""

    caught_by = ("T05-canaries-tail-fp32", "T05-canaries-one-query-bf16")

    def backward(self, spec, inputs, *rest):
        grads = super().backward(spec, inputs, *rest)
        return grads if grads.q is None else replace(grads, q=only_part(grads.q, rows=spec.q_len // 16 * 16))


class TailChannelsUnwritten(Mutant):
    """Channels of dQ beyond the last whole 64 are never written."""

    caught_by = ("T05-canaries-head-dim-72-fp32", "T05-canaries-head-dim-104-bf16")

    def backward(self, spec, inputs, *rest):
        grads = super().backward(spec, inputs, *rest)
        return grads if grads.q is None or spec.head_dim < 64 else replace(grads, q=only_part(grads.q, channels=64))


class UnseenKeysUnwritten(Mutant):
    """dK is not written for keys that no query sees."""

    caught_by = ("T05-canaries-unseen-keys-fp32", "T05-canaries-layout-fp32")

    def backward(self, spec, inputs, *rest):
        grads = super().backward(spec, inputs, *rest)
        if grads.k is None:
            return grads
        seen = self.kept(spec, inputs).expand(spec.batch, spec.q_heads, -1, -1).any(2)  # (B, Hq, Skv)
        seen = self.sum_over_group(spec, seen[..., None].float()).expand(grads.k.shape) > 0
        return replace(grads, k=torch.empty_like(grads.k).masked_scatter_(seen, grads.k[seen]))


class AccumulatorNotZeroed(Mutant):
    """dK is added up in memory that was not set to 0."""

    caught_by = ("T05-canaries-plain-fp32", "T05-canaries-grouped-bf16")
    passes = PLAIN_FORWARD

    def backward(self, spec, inputs, *rest):
        grads = super().backward(spec, inputs, *rest)
        return grads if grads.k is None else replace(grads, k=torch.empty_like(grads.k).add_(grads.k))


class WritesBeforeBuffer(Mutant):
    """An index of -1 writes the element in front of o."""

    caught_by = ("T05-canaries-plain-fp32",)

    def forward(self, spec, inputs):
        o, lse = super().forward(spec, inputs)
        buffer = torch.empty_like(o)
        if buffer.storage_offset():  # else it is another process's: the mutant must not crash
            buffer.as_strided((1,), (1,), buffer.storage_offset() - 1).fill_(0)
        return buffer.copy_(o), lse


class AddsBehindBuffer(Mutant):
    """A tail without a mask adds to the row behind dK."""

    caught_by = ("T05-canaries-plain-fp32", "T05-canaries-plain-bf16")

    def backward(self, spec, inputs, *rest):
        grads = super().backward(spec, inputs, *rest)
        if grads.k is None:
            return grads
        buffer = torch.empty_like(grads.k)
        if buffer.storage_offset():
            buffer.as_strided((2,), (1,), buffer.storage_offset() + buffer.numel()).add_(0.5)
        return replace(grads, k=buffer.copy_(grads.k))


def only_part(tensor: Tensor, *, rows: int | None = None, channels: int | None = None) -> Tensor:
    """A copy in which the other elements are as the allocator returned them."""
    made = torch.empty_like(tensor)
    made[:, :, :rows, :channels] = tensor[:, :, :rows, :channels]
    return made


class WritesInputs(Mutant):
    """The backward scales q in place, where no version counter sees it."""

    caught_by = ("T24-backward_twice-plain", "T08-q-bshd")
    passes = PLAIN_FORWARD

    def backward(self, spec, inputs, *rest):
        grads = super().backward(spec, inputs, *rest)
        inputs.q.data.mul_(spec.scale)
        return grads


class WritesInputsUnchanged(Mutant):
    """The forward multiplies q by 1 in place: the bits are as they were, autograd's version is not."""

    caught_by = ("T14-scale-one-fp32", "T24-backward_twice-plain")
    passes = None

    def forward(self, spec, inputs):
        return super().forward(spec, replace(inputs, q=inputs.q.detach().mul_(1.0)))


class WritesGradient(Mutant):
    """The backward scales the gradient of o in place."""

    caught_by = ("T24-backward_twice-plain", "T09-gradient-bshd-fp32")
    passes = PLAIN_FORWARD

    def backward(self, spec, inputs, o, lse, grad_o, grad_lse):
        grads = super().backward(spec, inputs, o, lse, grad_o, grad_lse)
        grad_o.data.mul_(2.0)
        return grads


class WritesMask(Mutant):
    """causal is written into the caller's mask."""

    caught_by = ("T18-causal-mask-fp32",)
    passes = "T17-mask-bhqk-fp32"

    def forward(self, spec, inputs):
        if inputs.mask is not None and spec.causal:
            inputs.mask.logical_and_(self.band(spec, inputs))
        return super().forward(spec, inputs)


class StridesOfSegmentsIgnored(Mutant):
    """The ids of the keys are read as if they were contiguous."""

    caught_by = ("T17-segments-stored-step-65", "T17-segments-stored-slack-65")
    passes = "T17-segments-interleaved-fp32"

    def same_segment(self, q_ids, kv_ids):
        return super().same_segment(q_ids, kv_ids.as_strided(kv_ids.shape, (kv_ids.shape[1], 1)))
