"""Faults of grouped heads."""

from __future__ import annotations

from dataclasses import replace

import torch

from .gradients import GradientMutant
from .mutant import Mutant


class HeadModulo(Mutant):
    """Query head h reads kv head h % Hkv."""

    caught_by = ("T19-heads-6-2-full-fp32", "T19-heads-12-3-causal-fp16")
    passes = "T19-heads-6-1-full-fp32"

    def of_query_heads(self, spec, tensor):
        return tensor.to(spec.accumulator_dtype).repeat(1, spec.group, 1, 1)

    def sum_over_group(self, spec, tensor):
        return tensor.unflatten(1, (spec.group, spec.kv_heads)).sum(1)


class GroupSummedOverWrongDim(Mutant):
    """The backward splits the head index into (group, Hkv) where it is (Hkv, group)."""

    caught_by = ("T19-heads-6-2-full-fp32", "T19-heads-12-3-causal-fp16")
    passes = "T19-heads-6-1-full-fp32"

    def sum_over_group(self, spec, tensor):
        return tensor.unflatten(1, (spec.group, spec.kv_heads)).sum(1)


class GroupNotSummed(Mutant):
    """dK and dV are those of the first query head of each group."""

    caught_by = ("T19-heads-6-1-full-fp32", "T19-relation-repeated-heads-4-2-fp32")

    def sum_over_group(self, spec, tensor):
        return tensor[:, :: spec.group]


class GroupAveraged(Mutant):
    """dK and dV are the mean over the group."""

    caught_by = ("T19-heads-6-1-full-fp32",)

    def sum_over_group(self, spec, tensor):
        return super().sum_over_group(spec, tensor) / spec.group


class KeyGradientHalvedForWideGroups(GradientMutant):
    """dK of a group of more than 8 heads is half of what it is."""

    caught_by = ("T19-heads-16-1-full-fp32", "T19-heads-16-1-causal-fp16")
    passes = "T19-heads-8-1-full-fp32"

    def spoil(self, spec, inputs, grads):
        return grads if grads.k is None or spec.group <= 8 else replace(grads, k=grads.k / 2)


class ValueGradientOfThreeKvHeads(GradientMutant):
    """Where heads are grouped, dV of the fourth and later kv heads is 0."""

    caught_by = ("T19-heads-32-8-full-fp32", "T19-heads-12-4-with-mask-fp32")
    passes = "T19-heads-12-3-full-fp32"

    def spoil(self, spec, inputs, grads):
        if grads.v is None or spec.group == 1:
            return grads
        early = torch.arange(spec.kv_heads)[:, None, None] < 3
        return replace(grads, v=grads.v * early)


class KvHeadModulo4(Mutant):
    """Where heads are grouped, only the first four kv heads are read: head h // group % 4."""

    caught_by = ("T19-heads-40-8-full-fp32", "T19-heads-32-8-causal-bf16")
    passes = "T19-heads-12-4-with-mask-fp32"

    def of_query_heads(self, spec, tensor):
        is_misread = spec.group > 1 and spec.kv_heads > 4
        return super().of_query_heads(spec, tensor[:, torch.arange(spec.kv_heads) % 4] if is_misread else tensor)
