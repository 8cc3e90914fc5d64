"""Faults that short calls and few heads or batch entries don't show."""

from __future__ import annotations

from dataclasses import replace

import torch

from .gradients import GradientMutant
from .mutant import Mutant


class CausalLostFromRow320(Mutant):
    """From query 320 on, causal has no effect."""

    caught_by = ("T06-long-causal-513-fp32", "T06-long-causal-1025-fp16", "T06-long-causal-top_left-1025x513")
    passes = "T06-causal-square-130-fp32"

    def band(self, spec, inputs):
        late = torch.arange(spec.q_len)[:, None] >= 320
        return super().band(spec, inputs) | late if spec.causal and spec.window is None else super().band(spec, inputs)


class CausalLostFromRow320ForGroups(Mutant):
    """Where heads are grouped, causal has no effect from query 320 on."""

    caught_by = ("T19-long-heads-4-2-causal-fp32", "T19-long-heads-4-2-value-dim-fp32", "T11-long-head-dim-128-fp16")
    passes = "T06-long-causal-513-fp32"

    def band(self, spec, inputs):
        late = torch.arange(spec.q_len)[:, None] >= 320
        return super().band(spec, inputs) | late if spec.causal and spec.group > 1 else super().band(spec, inputs)


class WindowClamped(Mutant):
    """A bound of a window is at most 255."""

    caught_by = ("T20-long-window-256-256-of-1025-fp32", "T20-long-causal-window-256-of-513", "T20-long-decode-left-300-fp16")
    passes = "T20-decode-left-256-fp32"

    def misread(self, spec, inputs):
        window = tuple(bound if bound is None else min(bound, 255) for bound in spec.window or (None, None))
        return replace(spec, window=window), inputs


class MaskOfBatchModulo4(Mutant):
    """Batch entry b reads the mask of entry b % 4."""

    caught_by = ("T17-wide-mask-bhqk-fp32", "T17-wide-mask-b11k-bf16")
    passes = "T17-mask-bhqk-fp32"

    def mask(self, spec, mask):
        return mask[torch.arange(mask.shape[0]) % 4]


class BiasLostInSplitDecode(Mutant):
    """With at most 8 queries and at least 512 keys, which a kernel splits, the bias has no effect."""

    caught_by = ("T16-long-bias-8x600", "T16-long-bias-1x1025")
    passes = "T16-bias-single-query-per-head"

    def misread(self, spec, inputs):
        is_split = inputs.bias is not None and spec.q_len <= 8 and spec.kv_len >= 512
        return spec, replace(inputs, bias=torch.zeros_like(inputs.bias)) if is_split else inputs


class KeysBeyond1024Skipped(Mutant):
    """With more than 8 queries, keys beyond the first 1024 are left out."""

    caught_by = ("T10-long-full-1025-fp32", "T10-long-lengths-70x2049-fp16", "T10-long-lengths-513x1025-fp32")
    passes = "T12-grid-many-keys"

    def band(self, spec, inputs):
        early = torch.arange(spec.kv_len) < 1024
        return super().band(spec, inputs) & early if spec.q_len > 8 else super().band(spec, inputs)


class CounterWrapsAt512(Mutant):
    """The counter of keys is one of 9 bits."""

    caught_by = ("T22-long-dropout-513x600-fp32", "T22-long-dropout-40x1025-fp16")
    passes = "T22-dropout-long-fp32"

    def kept_by_dropout(self, spec, seed):
        return super().kept_by_dropout(spec, seed)[..., torch.arange(spec.kv_len) % 512]


class QueryGradientOfEightBatches(GradientMutant):
    """dQ beyond the eighth batch entry is 0."""

    caught_by = ("T10-batch-of-9-full-fp32", "T10-batch-of-9-causal-bf16")
    passes = "T22-dropout-batch-and-heads-fp32"

    def spoil(self, spec, inputs, grads):
        return grads if grads.q is None else replace(grads, q=grads.q * (torch.arange(spec.batch) < 8)[:, None, None, None])


class StridesIgnoredInLongCalls(Mutant):
    """From 512 queries on, q is read as if it were contiguous."""

    caught_by = ("T08-long-all-bshd-fp32", "T08-long-all-slack-fp32")
    passes = "T08-all-bshd-fp32"

    def queries(self, spec, inputs):
        contiguous = torch.empty(inputs.q.shape, device="meta").stride()
        is_long = spec.q_len >= 512
        return super().queries(spec, replace(inputs, q=inputs.q.as_strided(inputs.q.shape, contiguous)) if is_long else inputs)
