"""Faults of causal, window, mask and segments: who attends to whom."""

from __future__ import annotations

from dataclasses import replace

import torch

from .mutant import Mutant


class CausalIgnored(Mutant):
    """causal has no effect."""

    caught_by = ("T32-claim-causal-forward", "T17-relation-future_changes_nothing-causal-fp32")

    def misread(self, spec, inputs):
        return replace(spec, causal=False), inputs


class AlwaysTopLeft(Mutant):
    """The diagonal begins at the first key whatever align says: a single query sees key 0 alone."""

    caught_by = ("T06-decode-bottom_right-20-group1-fp32", "T06-causal-bottom_right-64x65-fp32")
    passes = "T06-causal-top_left-2x5-fp32"

    def diagonal(self, spec):
        return 0


class AlwaysBottomRight(Mutant):
    """The diagonal ends at the last key whatever align says."""

    caught_by = ("T06-causal-top_left-2x5-fp32", "T06-causal-top_left-65x64-fp16")
    passes = "T06-causal-bottom_right-2x5-fp32"

    def diagonal(self, spec):
        return spec.kv_len - spec.q_len


class CausalOffByOne(Mutant):
    """A query does not see its own key."""

    caught_by = ("T06-causal-square-16-fp32", "T06-causal-square-1-fp32")

    def diagonal(self, spec):
        return spec.diagonal - 1 if spec.causal else spec.diagonal


class WindowIgnored(Mutant):
    """window has no effect."""

    caught_by = ("T32-claim-window-forward", "T20-keys-per-row-16-16")

    def misread(self, spec, inputs):
        return replace(spec, window=None), inputs


class WindowOffByOne(Mutant):
    """A window of W to the left reaches W - 1 keys."""

    caught_by = ("T20-keys-per-row-16-16", "T20-decode-left-127-fp16")

    def misread(self, spec, inputs):
        left, right = spec.window or (None, None)
        return replace(spec, window=(left and left - 1, right)), inputs


class WindowOfZeroIsNone(Mutant):
    """A bound of 0 is taken for no bound."""

    caught_by = ("T20-window-0-0-fp32", "T20-keys-per-row-1-0")
    passes = "T20-keys-per-row-16-16"

    def misread(self, spec, inputs):
        left, right = spec.window or (None, None)
        return replace(spec, window=(left or None, right or None)), inputs


class CausalLostUnderWindow(Mutant):
    """With a window, causal has no effect."""

    caught_by = ("T20-causal-window-5-right-3-fp32", "T18-causal-window-fp32")

    def misread(self, spec, inputs):
        return replace(spec, causal=spec.causal and spec.window is None), inputs


class CausalLostUnderMask(Mutant):
    """With a mask, causal has no effect."""

    caught_by = ("T18-causal-mask-fp32", "T17-relation-future_changes_nothing-causal-and-mask-fp32")
    passes = "T06-causal-square-16-fp32"

    def misread(self, spec, inputs):
        return replace(spec, causal=spec.causal and spec.mask is None), inputs


class CausalLostUnderDropout(Mutant):
    """With dropout, causal has no effect."""

    caught_by = ("T17-relation-future_changes_nothing-causal-and-dropout-fp32", "T22-dropout-causal-fp32")
    passes = "T06-causal-square-16-fp32"

    def misread(self, spec, inputs):
        return replace(spec, causal=spec.causal and not spec.dropout_p), inputs


class CausalLostUnderLayout(Mutant):
    """With a layout, causal shapes no block: those on the diagonal show the future."""

    caught_by = ("T18-causal-and-layout-diagonal-fp32", "T17-relation-future_changes_nothing-causal-and-layout-fp32")
    passes = "T06-causal-square-16-fp32"

    def misread(self, spec, inputs):
        return replace(spec, causal=spec.causal and spec.layout is None), inputs


class MaskIgnored(Mutant):
    """mask has no effect."""

    caught_by = ("T32-claim-mask-forward", "T17-mask-sparse-fp32")

    def misread(self, spec, inputs):
        return replace(spec, mask=None), replace(inputs, mask=None)


class MaskInverted(Mutant):
    """True means dropped."""

    caught_by = ("T17-mask-anti_triangle-fp32", "T32-claim-mask-forward")

    def mask(self, spec, mask):
        return ~mask


class MaskOfFirstBatch(Mutant):
    """Every batch entry reads the mask of the first."""

    caught_by = ("T17-mask-b11k-fp32", "T17-mask-bhqk-bf16", "T10-relation-batch-of-one-fp32")
    passes = "T17-mask-1hqk-fp32"

    def mask(self, spec, mask):
        return mask[:1]


class MaskOfFirstHead(Mutant):
    """Every head reads the mask of the first."""

    caught_by = ("T17-mask-1h1k-fp32", "T17-mask-bhqk-bf16")
    passes = "T17-mask-b1qk-fp32"

    def mask(self, spec, mask):
        return mask[:, :1]


class MaskLostUnderDeterministic(Mutant):
    """With deterministic=True, the mask has no effect."""

    caught_by = ("T18-pair-mask-deterministic-fp32",)
    passes = "T24-backward-twice-deterministic-fp32"

    def misread(self, spec, inputs):
        return (replace(spec, mask=None), replace(inputs, mask=None)) if spec.deterministic else (spec, inputs)


class MaskOfKvHead(Mutant):
    """A query head reads the mask of its kv head's number."""

    caught_by = ("T17-mask-1h1k-fp32",)
    passes = "T17-mask-b1qk-fp32"

    def mask(self, spec, mask):
        return mask if mask.shape[1] == 1 else mask[:, torch.arange(spec.q_heads) // spec.group]


class MaskOfKeysHidesQueries(Mutant):
    """A mask that is one row of keys is read as one column of queries."""

    caught_by = ("T17-mask-111k-fp32", "T17-mask-1k-fp32")
    passes = "T17-mask-qk-fp32"

    def mask(self, spec, mask):
        is_row = mask.shape[2] == 1 and mask.shape[3] >= spec.q_len
        return mask[..., : spec.q_len].mT if is_row else mask


class MaskIsSoft(Mutant):
    """Masked scores are lowered by 30, not taken out."""

    caught_by = ("T17-relation-padding_is_ignored-padding-fp32",)

    def misread(self, spec, inputs):
        if inputs.mask is None:
            return spec, inputs
        hidden = torch.where(inputs.mask, 0.0, -30.0)
        bias = hidden if inputs.bias is None else inputs.bias + hidden
        return replace(spec, mask=None), replace(inputs, mask=None, bias=bias)


class BiasOfFirstHeadForOneQuery(Mutant):
    """With one query, heads and queries change places, but the strides of the bias don't."""

    caught_by = ("T16-bias-single-query-per-head",)
    passes = "T16-bias-1h1k-fp32"

    def misread(self, spec, inputs):
        if inputs.bias is None or spec.q_len != 1:
            return spec, inputs
        return spec, replace(inputs, bias=inputs.bias[:, :1].expand(inputs.bias.shape))


class SegmentsIgnored(Mutant):
    """segment_ids have no effect."""

    caught_by = ("T32-claim-segments-forward", "T18-segments-fp32", "T32-rules-reach-the-result")

    def misread(self, spec, inputs):
        return replace(spec, segments=False), replace(inputs, q_segment_ids=None, kv_segment_ids=None)


class SegmentZeroIsPadding(Mutant):
    """Id 0 attends to nothing."""

    caught_by = ("T18-segments-fp32",)

    def same_segment(self, q_ids, kv_ids):
        return super().same_segment(q_ids, kv_ids) & (q_ids != 0)[:, :, None]


class NegativeSegmentIsPadding(Mutant):
    """Negative ids attend to nothing."""

    caught_by = ("T17-segments-negative-*",)
    passes = "T18-segments-fp32"

    def same_segment(self, q_ids, kv_ids):
        return super().same_segment(q_ids, kv_ids) & (q_ids >= 0)[:, :, None]


class SegmentsAreRuns(Mutant):
    """Ids are taken to be sorted: a query sees all from the first to the last key of its id."""

    caught_by = ("T17-segments-interleaved-*",)
    passes = "T18-segments-fp32"

    def same_segment(self, q_ids, kv_ids):
        same = super().same_segment(q_ids, kv_ids).int()
        return (same.cumsum(-1) > 0) & (same.flip(-1).cumsum(-1).flip(-1) > 0)


class SegmentsIn32Bits(Mutant):
    """Ids are compared in their low 32 bits."""

    caught_by = ("T17-segments-wide-*",)
    passes = "T18-segments-fp32"

    def same_segment(self, q_ids, kv_ids):
        return super().same_segment(q_ids.to(torch.int32), kv_ids.to(torch.int32))


class SegmentsInFloat32(Mutant):
    """Ids are compared as fp32 numbers."""

    caught_by = ("T17-segments-beyond_fp32-int32", "T17-segments-beyond_fp32-int64")
    passes = "T17-segments-wide-fp32"

    def same_segment(self, q_ids, kv_ids):
        return super().same_segment(q_ids.float(), kv_ids.float())
