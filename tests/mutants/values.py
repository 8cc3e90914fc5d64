"""Faults of precision, scale, soft cap and bias."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .mutant import Mutant

HALVES = (torch.float16, torch.bfloat16)


class ConstantOutput(Mutant):
    """o is the mean of v in every row."""

    caught_by = ("T32-plain-forward-fp32", "T32-plain-forward-fp16", "T32-plain-forward-bf16")
    passes = None

    def output(self, spec, weights, values):
        return values.mean(2, keepdim=True).expand(*weights.shape[:3], -1)


class SmallErrorInO(Mutant):
    """o is off by a factor of 1 + 1e-3."""

    caught_by = ("T14-precision-wide-fp32", "T14-precision-wide-fp64")
    passes = "T32-plain-forward-bf16"

    def output(self, spec, weights, values):
        return super().output(spec, weights, values) * (1 + 1e-3)


class TF32Products(Mutant):
    """fp32 operands of QK^T are rounded to TF32, 10 bits of mantissa."""

    caught_by = ("T14-precision-wide-fp32",)
    passes = "T32-plain-backward-fp16"

    def products(self, spec, inputs):
        return self.rounded(self.queries(spec, inputs)) @ self.rounded(self.keys(spec, inputs)).mT

    def rounded(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return x
        return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class HalfAccumulation(Mutant):
    """PV is accumulated in half precision, 16 keys at a time."""

    caught_by = ("T14-precision-long-ones-fp16", "T14-precision-long-ones-bf16")

    def output(self, spec, weights, values):
        if spec.dtype not in HALVES:
            return super().output(spec, weights, values)
        o = values.new_zeros(*weights.shape[:3], values.shape[3])
        for start in range(0, spec.kv_len, 16):
            o += weights[..., start : start + 16] @ values[:, :, start : start + 16]
            o = o.to(spec.dtype).to(values.dtype)
        return o


class HalfProducts(Mutant):
    """QK^T is stored in half precision before it is scaled: beyond 65504 it is infinite."""

    caught_by = ("T14-scores-beyond-fp16-default-scale-fp16",)

    def products(self, spec, inputs):
        return super().products(spec, inputs).to(spec.dtype).to(spec.accumulator_dtype)


class ScaleOfZeroIsDefault(Mutant):
    """scale=0.0 is taken as not given."""

    caught_by = ("T14-scale-zero-*",)

    def misread(self, spec, inputs):
        return replace(spec, scale=spec.scale or spec.head_dim**-0.5), inputs


class ScaleIgnored(Mutant):
    """scale is head_dim ** -0.5 whatever the call says."""

    caught_by = ("T14-scale-one-fp32", "T14-scale-negative-fp32")

    def misread(self, spec, inputs):
        return replace(spec, scale=spec.head_dim**-0.5), inputs


class SoftcapIgnored(Mutant):
    """softcap has no effect."""

    caught_by = ("T32-claim-softcap-forward", "T14-softcap-0.5-fp32")

    def misread(self, spec, inputs):
        return replace(spec, softcap=None), inputs


class SoftcapAfterBias(Mutant):
    """The soft cap is applied to the sum of scores and bias."""

    caught_by = ("T14-softcap-and-bias-fp32",)

    def scores(self, spec, inputs):
        s = self.products(spec, inputs) * spec.scale
        s, slope = self.capped(spec, s if inputs.bias is None else s + inputs.bias.to(s.dtype))
        return self.without(s, self.kept(spec, inputs)), slope


class SoftcapBeforeScale(Mutant):
    """The soft cap is applied to QK^T, and the result scaled."""

    caught_by = ("T14-softcap-0.5-fp32", "T14-softcap-50-fp32")

    def scores(self, spec, inputs):
        s, slope = self.capped(spec, self.products(spec, inputs))
        s = s * spec.scale
        return self.without(s if inputs.bias is None else s + inputs.bias.to(s.dtype), self.kept(spec, inputs)), slope


class BiasScaled(Mutant):
    """The bias is added before the scale."""

    caught_by = ("T32-claim-bias-forward", "T16-bias-qk-fp32", "T03-relation-shift")

    def misread(self, spec, inputs):
        return spec, inputs if inputs.bias is None else replace(inputs, bias=inputs.bias * spec.scale)


class KeyGradientInHalf(Mutant):
    """dK is added up in the dtype of q, 16 queries at a time."""

    caught_by = ("T14-precision-long-columns-equal-fp16", "T14-precision-long-columns-equal-bf16")

    def backward(self, spec, inputs, o, lse, grad_o, grad_lse):
        grads = super().backward(spec, inputs, o, lse, grad_o, grad_lse)
        if grads.k is None or grad_lse is not None or self.is_special(spec, inputs):
            return grads
        total = torch.zeros_like(grads.k)
        for first in range(0, spec.q_len, 16):
            rows = slice(first, first + 16)
            part = replace(inputs, q=inputs.q[:, :, rows])
            of_part = replace(spec, q_len=part.q.shape[2], grads=("k",))
            total += super().backward(of_part, part, o[:, :, rows], lse[:, :, rows], grad_o[:, :, rows], None).k
        return replace(grads, k=total)

    def is_special(self, spec, inputs):
        """What can't be cut by rows in three lines."""
        return spec.band != (None, None) or any(
            x is not None for x in (inputs.mask, inputs.bias, inputs.q_segment_ids, inputs.layout, inputs.dropout_seed)
        )


class BiasGradientSummedInHalf(Mutant):
    """The gradient of a bias that batch entries or heads share is added up in the dtype of the bias, one of them at a time."""

    caught_by = ("T16-bias-summed-over-1hqk-fp16", "T16-bias-summed-over-1hqk-bf16")

    def bias_gradient(self, inputs, ds):
        total = torch.zeros_like(inputs.bias)
        for batch in range(ds.shape[0]):
            for head in range(ds.shape[1]):
                alone = torch.zeros_like(ds)
                alone[batch, head] = ds[batch, head]
                total += alone.sum_to_size(inputs.bias.shape).to(total.dtype)
        return total
