"""Faults of what is kept from one pass or call to the next."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from .gradients import GradientMutant
from .mutant import PLAIN_FORWARD, Mutant

INPUTS = ("q", "k", "v", "bias", "sinks")


class SecondBackwardWrong(Mutant):
    """The backward takes P from the saved lse, and then works in its memory."""

    caught_by = ("T24-backward_twice-plain", "T24-backward_twice-causal")

    def backward(self, spec, inputs, o, lse, *rest):
        grads = super().backward(spec, inputs, o, lse, *rest)
        lse.data.add_(1.0)
        return grads

    def probabilities(self, spec, inputs, scores, lse):
        return torch.exp(scores - lse[..., None])


class StateOfLastCall(Mutant):
    """The backward takes the scale of the last forward."""

    caught_by = ("T24-two_backwards-plain",)

    def forward(self, spec, inputs):
        self.scale = spec.scale
        return super().forward(spec, inputs)

    def misread_backward(self, spec, inputs):
        return replace(spec, scale=self.scale), inputs


class OutputBufferReused(Mutant):
    """o is a buffer that the next call of these sizes writes again."""

    caught_by = ("T24-two_backwards-plain", "T22-seed_of_either_type-fp32")

    def __init__(self):
        super().__init__()
        self.buffers = {}

    def output(self, spec, weights, values):
        o = super().output(spec, weights, values)
        return self.buffers.setdefault(tuple(o.shape), torch.empty_like(o)).copy_(o)


class GradientBufferReused(GradientMutant):
    """dQ is a buffer that the next backward of these sizes writes again."""

    caught_by = ("T24-linear-in-gradient-plain-fp32",)

    def __init__(self):
        super().__init__()
        self.buffers = {}

    def spoil(self, spec, inputs, grads):
        if grads.q is None:
            return grads
        buffer = self.buffers.setdefault((grads.q.dtype, tuple(grads.q.shape)), torch.empty_like(grads.q))
        return replace(grads, q=buffer.copy_(grads.q))


class NotDifferentiable(Mutant):
    """o carries no gradient."""

    caught_by = ("T32-plain-backward-fp32", "T15-grads-q-causal-fp16")
    passes = PLAIN_FORWARD

    def attend(self, spec, inputs):
        return self.forward(spec, inputs)[0].detach(), None


class RecordsUnderNoGrad(Mutant):
    """Autograd is switched on inside, whatever the caller said."""

    caught_by = ("T15-no_grad-plain",)

    def attend(self, spec, inputs):
        given = [name for name in INPUTS if getattr(inputs, name) is not None]
        with torch.enable_grad():
            return super().attend(replace(spec, grads=tuple([name for name in given if getattr(inputs, name).requires_grad])), inputs)


class OrderChanges(Mutant):
    """With deterministic=True, every second call adds the keys up in the reverse order."""

    caught_by = ("T34-equal-bits-plain-fp32", "T34-relation-repetition-causal-fp32")

    def __init__(self):
        super().__init__()
        self.calls = itertools.count()

    def output(self, spec, weights, values):
        if next(self.calls) % 2:
            weights, values = weights.flip(-1), values.flip(-2)
        return super().output(spec, weights, values)


class CacheForgetsScale(Mutant):
    """What a call was prepared with is kept by its sizes alone."""

    caught_by = ("T29-a-b-a-plain-fp32", "T29-a-b-a-mask-fp16")

    def __init__(self):
        super().__init__()
        self.prepared = {}

    def misread(self, spec, inputs):
        key = (spec.dtype, spec.q_len, spec.kv_len, spec.causal, spec.window, spec.softcap, spec.dropout_p)
        return replace(spec, scale=self.prepared.setdefault(key, spec.scale)), inputs


class CacheForgetsAlignment(Mutant):
    """A kernel made for an aligned address serves an unaligned one, from the address below."""

    caught_by = ("T13-offset-1-fp32", "T13-offset-3-bf16")

    def __init__(self):
        super().__init__()
        self.is_compiled = False

    def queries(self, spec, inputs):
        q = inputs.q
        start = q.storage_offset() // 4 * 4 if self.is_compiled else q.storage_offset()
        self.is_compiled = self.is_compiled or start % 4 == 0
        return super().queries(spec, replace(inputs, q=q.as_strided(q.shape, q.stride(), start)))


class CacheForgetsStrides(Mutant):
    """A kernel made for the strides of a first q serves every q of its shape."""

    caught_by = ("T29-a-b-a-plain-fp32", "T29-a-b-a-layout-fp16")
    passes = "T08-all-bshd-fp32"

    def __init__(self):
        super().__init__()
        self.strides = {}

    def queries(self, spec, inputs):
        q = inputs.q
        strides = self.strides.setdefault(tuple(q.shape), q.stride())
        return super().queries(spec, replace(inputs, q=q.as_strided(q.shape, strides)))


class CacheForgetsTheTail(Mutant):
    """A kernel made for keys that are a multiple of 16 serves any number of keys, and leaves out the rest."""

    caught_by = ("T29-a-b-a-plain-fp32", "T29-a-b-a-plain-bf16")
    passes = "T10-length-33-full-fp32"

    def __init__(self):
        super().__init__()
        self.is_made = False

    def kept(self, spec, inputs):
        self.is_made = self.is_made or (spec.kv_len > 0 and spec.kv_len % 16 == 0)
        kept = super().kept(spec, inputs)
        return kept & (torch.arange(spec.kv_len) < spec.kv_len // 16 * 16) if self.is_made else kept


class MaskKeptByAddress(Mutant):
    """What was made of a mask is kept by its address and shape."""

    caught_by = ("T29-changed_in_place-mask-fp32", "T29-changed_in_place-mask-of-keys-fp16")
    passes = "T29-changed_in_place-bias-fp32"

    def __init__(self):
        super().__init__()
        self.kept_masks = {}

    def mask(self, spec, mask):
        return self.kept_masks.setdefault((mask.data_ptr(), tuple(mask.shape)), mask.clone())


class KeysKeptByAddress(Mutant):
    """k, brought to fp32, is kept by its address and shape."""

    caught_by = ("T29-changed_in_place-plain-fp32", "T29-changed_in_place-grouped-fp16")

    def __init__(self):
        super().__init__()
        self.kept_keys = {}

    def keys(self, spec, inputs):
        return self.kept_keys.setdefault((inputs.k.data_ptr(), tuple(inputs.k.shape)), super().keys(spec, inputs))


class OutputIsTheValue(Mutant):
    """Where every query sees its own key alone, o is v itself."""

    caught_by = ("T24-outputs_are_own-own-key-fp32", "T24-outputs_are_own-own-key-bf16")
    passes = "T20-window-0-0-fp32"

    def attend(self, spec, inputs):
        o, lse = super().attend(spec, inputs)
        is_own = spec.band == (0, 0) and spec.diagonal == 0 and inputs.mask is None
        return (inputs.v.view_as(o) if is_own and not spec.return_lse else o), lse


class OutputIsExpanded(Mutant):
    """Where there is one key, o is v, expanded."""

    caught_by = ("T24-outputs_are_own-one-key-fp32",)
    passes = "T10-lengths-257x1-fp32"

    def attend(self, spec, inputs):
        o, lse = super().attend(spec, inputs)
        is_row = spec.kv_len == 1 and spec.group == 1 and not spec.return_lse
        return (inputs.v.expand(o.shape) if is_row else o), lse


class Unwatched(torch.autograd.Function):
    """Keeps its tensors where autograd does not see that they are written."""

    @staticmethod
    def forward(ctx, backend, spec, inputs, *_):
        ctx.kept = backend, spec, inputs, *backend.forward(spec, inputs)
        ctx.set_materialize_grads(False)
        return ctx.kept[-2].view_as(ctx.kept[-2]), ctx.kept[-1].view_as(ctx.kept[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_o, grad_lse):
        backend, spec, inputs, o, lse = ctx.kept
        grads = backend.backward(spec, inputs, o, lse, torch.zeros_like(o) if grad_o is None else grad_o, grad_lse)
        return None, None, None, grads.q, grads.k, grads.v, grads.bias, grads.sinks


class KeepsTensorsUnwatched(Mutant):
    """What the backward needs is kept without save_for_backward: it takes what was written there in the meantime."""

    caught_by = ("T24-written_in_between-plain", "T24-written_in_between-mask", "T24-written_in_between-sinks")
    capabilities = replace(Mutant.capabilities, backward=Mutant.capabilities.backward - {"double_backward"})

    def attend(self, spec, inputs):
        o, lse = Unwatched.apply(self, spec, inputs, inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks)
        return o, lse if spec.return_lse else None
