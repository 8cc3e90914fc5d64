"""Faults of one feature that only a wide head, other strides, another scale or dtype, many keys or few gradients show."""

from __future__ import annotations

from dataclasses import replace

import torch

from .gradients import GradientMutant
from .mutant import Mutant


def is_decoding(spec):
    return spec.q_len <= 8 and spec.kv_len >= 512


class SegmentsLostAtWideHeads(Mutant):
    """From a head dim of 128 on, segment_ids have no effect."""

    caught_by = ("T11-head-dim-128-with-segments-*",)
    passes = "T11-head-dim-64-with-segments-*"

    def misread(self, spec, inputs):
        return (spec, replace(inputs, q_segment_ids=None, kv_segment_ids=None)) if spec.head_dim >= 128 else (spec, inputs)


class SinkGradientHalvedUnderStrides(GradientMutant):
    """The gradient of the sinks is halved unless q is contiguous."""

    caught_by = ("T08-all-bshd-with-sinks-fp32",)
    passes = "T03-sinks-large-fp32"

    def spoil(self, spec, inputs, grads):
        return grads if grads.sinks is None or inputs.q.is_contiguous() else replace(grads, sinks=grads.sinks / 2)


class SinkCountedBySplits(Mutant):
    """With at most 8 queries and at least 512 keys, which a kernel splits in two, each part counts the sink."""

    caught_by = ("T10-three-queries-700-keys-with-sinks-*",)
    passes = "T03-sinks-large-fp32"

    def sinks(self, spec, inputs):
        return super().sinks(spec, inputs) + (0.6931471805599453 if is_decoding(spec) else 0.0)


class LayoutLostInSplitDecode(Mutant):
    """With at most 8 queries and at least 512 keys, every block of a layout is full."""

    caught_by = ("T10-three-queries-700-keys-with-layout-*",)
    passes = "T23-pairs-3x300"

    def misread(self, spec, inputs):
        return (spec, replace(inputs, layout=None)) if is_decoding(spec) else (spec, inputs)


class BiasTurnedByNegativeScale(Mutant):
    """Under a negative scale the bias is subtracted."""

    caught_by = ("T14-scale-negative-with-bias-*", "T14-scale-negative-with-bias_grad-*")
    passes = "T14-scale-negative-fp32"

    def misread(self, spec, inputs):
        return (spec, replace(inputs, bias=-inputs.bias)) if spec.scale < 0 and inputs.bias is not None else (spec, inputs)


class SinksLostAtScaleZero(Mutant):
    """With scale=0.0 sinks have no effect."""

    caught_by = ("T14-scale-zero-with-sinks-fp32",)
    passes = "T14-scale-zero-fp32"

    def misread(self, spec, inputs):
        return (spec, replace(inputs, sinks=torch.full_like(inputs.sinks, -torch.inf))) if self.is_lost(spec, inputs) else (spec, inputs)

    def is_lost(self, spec, inputs):
        return spec.scale == 0 and inputs.sinks is not None


class SegmentsNarrowInFloat64(Mutant):
    """With segment_ids, the scores of fp64 inputs are fp32."""

    caught_by = ("T14-fp64-with-segments",)
    passes = "T32-plain-backward-fp64"

    def products(self, spec, inputs):
        s = super().products(spec, inputs)
        return s if inputs.q_segment_ids is None else s.float().to(s.dtype)


class KeyGradientAloneUnderWindow(GradientMutant):
    """Where k alone needs a gradient and there is a window, dK is nine tenths of what it is."""

    caught_by = ("T15-grads-k-with-window-*",)
    passes = "T15-grads-k-v-with-window-*"

    def spoil(self, spec, inputs, grads):
        return replace(grads, k=grads.k * 0.9) if spec.grads == ("k",) and spec.window else grads


class ValueGradientAloneNotSummed(GradientMutant):
    """Where v alone needs a gradient and heads are grouped, dV is half of what it is."""

    caught_by = ("T15-grads-v-with-grouped_heads-*",)
    passes = "T15-grads-k-v-with-grouped_heads-*"

    def spoil(self, spec, inputs, grads):
        return replace(grads, v=grads.v / 2) if spec.grads == ("v",) and spec.group > 1 else grads
