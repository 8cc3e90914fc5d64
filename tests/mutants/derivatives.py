"""Faults of second derivatives, of forward mode and of vmap."""

from __future__ import annotations

from dataclasses import replace

import torch

from .mutant import Mutant


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


class WrongSecondDerivativeWithBias(Mutant):
    """The second derivative is claimed, and twice too large in q where there is a bias."""

    caught_by = ("T24-double-backward-bias-fp32", "T24-double-backward-bias-fp64")
    passes = "T24-double-backward-plain-fp32"

    def attend(self, spec, inputs):
        return super().attend(spec, inputs if inputs.bias is None else replace(inputs, q=TwiceTheHessian.apply(inputs.q)))


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
