"""Faults of the maximum, of rows with no key, and of -inf."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .mutant import Mutant

TILE = 64
LOG2E = 1.4426950408889634


class MaximumOfUnscaledScores(Mutant):
    """The maximum is taken before the scale, so that a negative one makes it the minimum."""

    caught_by = ("T14-scale-negative-large-*",)

    def pivot(self, spec, scores, sinks):
        if spec.scale >= 0:
            return super().pivot(spec, scores, sinks)
        return scores.masked_fill(scores == -torch.inf, torch.inf).amin(-1)


class MaximumSeededWithZero(Mutant):
    """The running maximum starts at 0."""

    caught_by = ("T03-shift-by-bias-minus1000-*", "T03-shift-by-channel-minus1000-*")

    def pivot(self, spec, scores, sinks):
        return super().pivot(spec, scores, sinks).clamp(min=0.0)


class FiniteSentinel(Mutant):
    """The running maximum starts at -5e4."""

    caught_by = ("T03-below-any-sentinel-scores-2e5-*", "T03-below-any-sentinel-bias-1e6-*")
    passes = "T03-shift-by-channel-minus10000-fp32"

    def pivot(self, spec, scores, sinks):
        return super().pivot(spec, scores, sinks).clamp(min=-5e4)


class NoMaximum(Mutant):
    """exp(S) without its maximum taken off."""

    caught_by = ("T03-shift-by-bias-plus100-fp32",)

    def pivot(self, spec, scores, sinks):
        return torch.zeros_like(super().pivot(spec, scores, sinks))


class EmptyFirstTileIsNaN(Mutant):
    """A row whose first 64 keys are all masked is NaN, whatever follows."""

    caught_by = ("T02-prefix-64-mask-fp32", "T02-prefix-128-bias-fp16")

    def softmax(self, spec, inputs, scores):
        p, lse = super().softmax(spec, inputs, scores)
        return p.masked_fill(empty_first_tile(scores)[..., None], torch.nan), lse


class EmptyFirstTileSeedsZero(Mutant):
    """A first tile with no key makes 0 the running maximum of the row."""

    caught_by = ("T02-far-below-prefix-*",)
    passes = "T02-prefix-64-mask-fp32"

    def pivot(self, spec, scores, sinks):
        top = super().pivot(spec, scores, sinks)
        return torch.where(empty_first_tile(scores), top.clamp(min=0.0), top)


def empty_first_tile(scores: Tensor) -> Tensor:
    return (scores[..., :TILE] == -torch.inf).all(-1) & (scores != -torch.inf).any(-1)


class EmptyRowIsNaN(Mutant):
    """A row with no key is NaN."""

    caught_by = ("T01-bool-fp32", "T01-bottom-right-fp16", "T01-stacked-left-padding-causal-fp32")

    def softmax(self, spec, inputs, scores):
        p, lse = super().softmax(spec, inputs, scores)
        return p.masked_fill((scores == -torch.inf).all(-1, keepdim=True), torch.nan), lse


class EmptyRowIsMean(Mutant):
    """Masked scores are finfo.min, so that a row with no key is the mean of v."""

    caught_by = ("T01-bool-fp32", "T01-segments-disjoint-fp16")

    def without(self, s, kept):
        return s.masked_fill(~kept, torch.finfo(s.dtype).min)


class EmptyRowGradientIsNaN(Mutant):
    """The backward doesn't set P to 0 after exp where a row has no key: exp(-inf + inf)."""

    caught_by = ("T01-bool-fp32", "T01-row-outside-loss-mask", "T01-row-deleted-mask-fp32")

    def probabilities(self, spec, inputs, scores, lse):
        return torch.exp(scores - lse[..., None])


class BackwardLosesLogOfSum(Mutant):
    """The backward takes P from the lse alone, which at finfo.min has lost the log of the sum."""

    caught_by = ("T01-mean-of-values-fp32-bias-fp32", "T01-min-fp32")
    passes = "T01-bool-fp32"

    def probabilities(self, spec, inputs, scores, lse):
        return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])


class MinusInfinityIsFinite(Mutant):
    """-inf in the bias is clamped to finfo.min."""

    caught_by = ("T01-minus-inf-fp32", "T01-minus-inf-all-fp16")

    def misread(self, spec, inputs):
        if inputs.bias is None:
            return spec, inputs
        return spec, replace(inputs, bias=inputs.bias.clamp(min=torch.finfo(inputs.bias.dtype).min))


class FiniteMinimumIsMask(Mutant):
    """finfo.min in the bias is taken for -inf."""

    caught_by = ("T01-mean-of-values-fp32-bias-fp32", "T01-min-fp16")

    def misread(self, spec, inputs):
        if inputs.bias is None:
            return spec, inputs
        lowest = inputs.bias <= torch.finfo(inputs.bias.dtype).min
        return spec, replace(inputs, bias=inputs.bias.masked_fill(lowest, -torch.inf))


class Exp2Overflow(Mutant):
    """Scores are multiplied by log2(e) before their maximum is taken off: finfo.min overflows."""

    caught_by = ("T01-mean-of-values-fp32-bias-fp32",)

    def without(self, s, kept):
        return super().without(s * LOG2E / LOG2E, kept)


class MaskAddedInHalf(Mutant):
    """The mask is added to the bias as finfo.min, in the dtype of the bias."""

    caught_by = ("T17-two-float-masks-min-fp16", "T17-two-float-masks-minus_inf-fp32")

    def misread(self, spec, inputs):
        if inputs.bias is None or inputs.mask is None:
            return spec, inputs
        hidden = torch.where(inputs.mask, 0.0, torch.finfo(inputs.bias.dtype).min).to(inputs.bias.dtype)
        return replace(spec, mask=None), replace(inputs, mask=None, bias=inputs.bias + hidden)

    def bias_gradient(self, inputs, ds):
        return ds
