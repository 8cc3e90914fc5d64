"""Faults of what is kept from one pass, call or derivative to the next."""

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


class TwiceTheHessian(torch.autograd.Function):
    """The identity, whose derivative is right and whose second derivative is twice too large."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + (gradient - gradient.detach())


class WrongSecondDerivative(Mutant):
    """The second derivative is claimed, and twice too large in q."""

    caught_by = ("T24-double-backward-plain-fp32", "T24-double-backward-causal-fp64")

    def attend(self, spec, inputs):
        return super().attend(spec, replace(inputs, q=TwiceTheHessian.apply(inputs.q)))


class Once(torch.autograd.Function):
    """The identity, with a derivative that can't be differentiated again."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient


class NoSecondDerivative(Mutant):
    """The second derivative is claimed, and missing."""

    caught_by = ("T24-double-backward-plain-fp32",)

    def attend(self, spec, inputs):
        return super().attend(spec, replace(inputs, q=Once.apply(inputs.q)))


class ZeroTangent(torch.autograd.Function):
    """The identity, whose forward-mode derivative is zero."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient

    @staticmethod
    def jvp(ctx, tangent):
        return torch.zeros_like(tangent)


class WrongForwardMode(Mutant):
    """Forward-mode differentiation of v gives zero."""

    caught_by = ("T26-function_transforms-plain",)

    def attend(self, spec, inputs):
        scores, _ = self.scores(spec, inputs)
        p, lse = self.softmax(spec, inputs, scores)
        o = self.output(spec, p, ZeroTangent.apply(self.values(spec, inputs)))
        return o.to(spec.dtype), lse


class VmapIgnoresExtraDim(Mutant):
    """Under vmap every slice gets the output of the first."""

    caught_by = ("T26-vmapped-plain",)

    def attend(self, spec, inputs):
        if not torch._C._functorch.is_batchedtensor(inputs.q):
            return super().attend(spec, inputs)
        plain = [torch._C._functorch.get_unwrapped(tensor)[-1] for tensor in (inputs.q, inputs.k, inputs.v)]
        return super().attend(spec, replace(inputs, q=plain[0], k=plain[1], v=plain[2]))


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
