"""Faults of the backward alone; the forward is right."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnzoo.backends.recompute import Gradients

from .mutant import PLAIN_FORWARD, Mutant


class BackwardMutant(Mutant, abstract=True):
    """Reads the call right in the forward."""

    def misread(self, spec, inputs):
        return spec, inputs


class BackwardAlwaysCausal(BackwardMutant):
    """The backward is causal whatever the call says."""

    caught_by = ("T24-backward-parity-plain-fp32", "T24-backward-parity-mask-fp16", "T33-autocast-plain-fp16")
    passes = "T24-backward-parity-causal-fp32"

    def misread_backward(self, spec, inputs):
        return replace(spec, causal=True), inputs


class BackwardNeverCausal(BackwardMutant):
    """The backward ignores causal."""

    caught_by = ("T24-backward-parity-causal-fp32", "T24-backward-parity-bottom-right-fp16")

    def misread_backward(self, spec, inputs):
        return replace(spec, causal=False), inputs


class BackwardAlwaysTopLeft(BackwardMutant):
    """The backward ignores align."""

    caught_by = ("T24-backward-parity-bottom-right-fp32",)
    passes = "T24-backward-parity-top-left-fp32"

    def misread_backward(self, spec, inputs):
        return replace(spec, align=None), inputs


class BackwardIgnoresWindow(BackwardMutant):
    """The backward ignores the window."""

    caught_by = ("T24-backward-parity-window-fp32",)

    def misread_backward(self, spec, inputs):
        return replace(spec, window=None), inputs


class BackwardIgnoresMask(BackwardMutant):
    """The backward ignores the mask."""

    caught_by = ("T24-backward-parity-mask-fp32", "T24-backward-parity-mask-bf16")

    def misread_backward(self, spec, inputs):
        return spec, replace(inputs, mask=None)


class BackwardIgnoresBias(BackwardMutant):
    """The backward rebuilds P without the bias."""

    caught_by = ("T24-backward-parity-bias-fp32",)

    def misread_backward(self, spec, inputs):
        return spec, inputs if inputs.bias is None else replace(inputs, bias=torch.zeros_like(inputs.bias))


class BackwardIgnoresSegments(BackwardMutant):
    """The backward ignores segment_ids."""

    caught_by = ("T24-backward-parity-segments-fp32",)

    def misread_backward(self, spec, inputs):
        return spec, replace(inputs, q_segment_ids=None, kv_segment_ids=None)


class BackwardIgnoresLayout(BackwardMutant):
    """The backward ignores the layout."""

    caught_by = ("T24-backward-parity-layout-fp32", "T23-random-16x16", "T23-relation-mask-random-fp32")

    def misread_backward(self, spec, inputs):
        return spec, replace(inputs, layout=None)


class BackwardIgnoresSoftcap(BackwardMutant):
    """The backward ignores softcap."""

    caught_by = ("T24-backward-parity-softcap-fp32",)

    def misread_backward(self, spec, inputs):
        return replace(spec, softcap=None), inputs


class SlopeOfSoftcapIgnored(Mutant):
    """The derivative of the soft cap is taken for 1."""

    caught_by = ("T24-backward-parity-softcap-fp32", "T14-softcap-0.5-bf16")

    def capped(self, spec, s):
        return super().capped(spec, s)[0], 1.0


class SlopeOfSoftcapIgnoredForGroups(Mutant):
    """Where heads are grouped, the derivative of the soft cap is taken for 1."""

    caught_by = ("T24-backward-parity-softcap-grouped-fp32", "T24-backward-parity-softcap-grouped-fp16")
    passes = "T24-backward-parity-softcap-fp32"

    def capped(self, spec, s):
        capped, slope = super().capped(spec, s)
        return capped, slope if spec.group == 1 else 1.0


class BackwardIgnoresScale(BackwardMutant):
    """The backward takes the scale for head_dim ** -0.5."""

    caught_by = ("T24-backward-parity-scale-fp32", "T14-scale-one-fp16")

    def misread_backward(self, spec, inputs):
        return replace(spec, scale=spec.head_dim**-0.5), inputs


class GradientMutant(Mutant, abstract=True):
    """Changes gradients that were right."""

    def backward(self, spec, inputs, *rest):
        return self.spoil(spec, inputs, super().backward(spec, inputs, *rest))

    def spoil(self, spec, inputs, grads: Gradients) -> Gradients:
        return grads


class OnePercentOfDK(GradientMutant):
    """dK is 1% too large."""

    caught_by = ("T24-backward-parity-plain-fp32", "T24-backward-parity-plain-fp16", "T05-freed-blocks-plain")
    passes = PLAIN_FORWARD

    def spoil(self, spec, inputs, grads):
        return grads if grads.k is None else replace(grads, k=grads.k * 1.01)


class ScaleForgottenInDQ(GradientMutant):
    """dQ is not multiplied by the scale."""

    caught_by = ("T24-backward-parity-scale-fp32", "T14-scale-none-fp32")
    passes = "T14-scale-one-fp32"

    def spoil(self, spec, inputs, grads):
        return grads if grads.q is None or not spec.scale else replace(grads, q=grads.q / spec.scale)


class DeltaForgotten(Mutant):
    """dS = P dP: the row sum is not subtracted."""

    caught_by = ("T24-backward-parity-plain-fp32", "T24-backward-parity-plain-fp16")
    passes = PLAIN_FORWARD

    def delta(self, p, dp):
        return torch.zeros_like(super().delta(p, dp))


class UpstreamGradientOfOnes(Mutant):
    """The gradient of o is taken to be 1, as a test with sum() would not notice."""

    caught_by = ("T24-linear-in-gradient-plain-fp32", "T09-gradient-transpose-fp32", "T09-gradient-mean-fp32", "T24-accumulates-plain")
    passes = "T09-gradient-sum-fp32"

    def backward(self, spec, inputs, o, lse, grad_o, grad_lse):
        return super().backward(spec, inputs, o, lse, torch.ones_like(grad_o), grad_lse)


class StridesOfGradientIgnored(Mutant):
    """The gradient of o is read as if it were contiguous."""

    caught_by = ("T09-gradient-bshd-fp32", "T09-gradient-transpose-fp16", "T09-gradient-last_dim-fp32")
    passes = "T09-gradient-zeros-fp32"

    def backward(self, spec, inputs, o, lse, grad_o, grad_lse):
        shape = grad_o.shape
        extent = torch.empty(shape, device="meta").stride()
        return super().backward(spec, inputs, o, lse, grad_o.as_strided(shape, extent), grad_lse)


class StridesOfGradientIgnoredForGroups(Mutant):
    """Where heads are grouped and the call isn't causal, the gradient of o is read as if it were contiguous."""

    caught_by = ("T09-gradient-bshd-grouped-fp32", "T09-gradient-last_dim-grouped-fp16")
    passes = "T09-gradient-bshd-of-bshd"

    def backward(self, spec, inputs, o, lse, grad_o, grad_lse):
        if spec.group > 1 and not spec.causal:
            grad_o = grad_o.as_strided(grad_o.shape, torch.empty(grad_o.shape, device="meta").stride())
        return super().backward(spec, inputs, o, lse, grad_o, grad_lse)


class KeyGradientDroppedForSelf(GradientMutant):
    """Where q and k are one tensor, dK is 0."""

    caught_by = ("T24-shared_inputs-plain-fp32", "T24-shared_inputs-causal-fp16")

    def spoil(self, spec, inputs, grads):
        is_one = inputs.q.data_ptr() == inputs.k.data_ptr() and inputs.q.shape == inputs.k.shape
        return replace(grads, k=torch.zeros_like(grads.k)) if is_one and grads.k is not None else grads


class OnlyWithGradientOfQ(GradientMutant):
    """Nothing is computed unless q needs a gradient."""

    caught_by = ("T15-grads-bias-fp32", "T15-grads-k-causal-fp16", "T15-grads-k-v-bf16")

    def spoil(self, spec, inputs, grads):
        return grads if grads.q is not None else Gradients()


class BiasGradientOfFirstBatch(Mutant):
    """The gradient of a broadcast bias is not summed: it is that of the first batch entry and head."""

    caught_by = ("T16-bias-11qk-fp32", "T16-bias-1h1k-fp32", "T16-bias-qk-bf16")
    passes = "T16-bias-bhqk-fp32"

    def bias_gradient(self, inputs, ds):
        for dim, size in enumerate(inputs.bias.shape):
            ds = ds.narrow(dim, 0, size)
        return ds


class BiasGradientOfLastWriter(Mutant):
    """The gradient of an expanded bias is summed over its stride-0 dims by overwriting."""

    caught_by = ("T16-bias-b1qk-fp32",)
    passes = "T16-bias-1hqk-fp32"

    def bias_gradient(self, inputs, ds):
        return super().bias_gradient(inputs, ds if inputs.bias.shape[1] != 1 else ds[:, -1:])


class BiasGradientScaled(Mutant):
    """The gradient of the bias is multiplied by the scale."""

    caught_by = ("T16-bias-bhqk-fp32", "T32-claim-bias_grad-backward")

    def bias_gradient(self, inputs, ds):
        return super().bias_gradient(inputs, ds) * inputs.q.shape[-1] ** -0.5


class BiasGradientWithoutBias(Mutant):
    """Where the bias needs no gradient, dK is not computed either."""

    caught_by = ("T16-bias-alibi-no-gradient", "T15-grads-q-k-fp32")

    def backward(self, spec, inputs, *rest):
        grads = super().backward(spec, inputs, *rest)
        return replace(grads, k=None) if inputs.bias is not None and grads.bias is None else grads
