"""Faults of grouped heads."""

from __future__ import annotations

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
