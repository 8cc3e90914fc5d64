"""Faults of block layouts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from attnzoo.layout import BlockLists, ElementRule

from .autograd import CacheForgetsAlignment, KeysKeptByAddress, OrderChanges
from .memory import OffsetsIn32Bits
from .mutant import Mutant
from .reference import Reference
from .sizes import GridOverflow


class LayoutMutant(Mutant, abstract=True):
    """Reads the layout wrong."""

    def misread(self, spec, inputs):
        return spec, inputs if inputs.layout is None else replace(inputs, layout=self.misread_layout(inputs.layout))

    def misread_layout(self, layout):
        return layout


class LayoutIgnored(Mutant):
    """layout has no effect."""

    caught_by = ("T32-claim-layout-forward", "T23-random-16x16")

    def misread(self, spec, inputs):
        return replace(spec, layout=None), replace(inputs, layout=None)


class PartialBlocksAreFull(LayoutMutant):
    """Every pair of a partial block attends."""

    caught_by = ("T23-pairs-16x16", "T23-causal-layout-d64-fp16")
    passes = "T23-random-16x16"

    def misread_layout(self, layout):
        return replace(layout, rule=ElementRule(band=(None, None, 0)))


class BandRuleIgnored(LayoutMutant):
    """The band that a layout stores is not applied."""

    caught_by = ("T23-band_rule-16x16",)
    passes = "T23-pairs-16x16"

    def misread_layout(self, layout):
        return layout if layout.rule.band is None else replace(layout, rule=ElementRule(band=(None, None, 0)))


class BandRuleTopLeft(LayoutMutant):
    """The band that a layout stores begins at key 0."""

    caught_by = ("T23-band_rule-3x300",)
    passes = "T23-band_rule-16x16"

    def misread_layout(self, layout):
        band = layout.rule.band
        return layout if band is None else replace(layout, rule=ElementRule(band=(*band[:2], 0)))


class SegmentRuleIgnored(LayoutMutant):
    """The segments that a layout stores are not applied."""

    caught_by = ("T23-segment_rule-16x16",)
    passes = "T23-pairs-16x16"

    def misread_layout(self, layout):
        return layout if layout.rule.segments is None else replace(layout, rule=ElementRule(band=(None, None, 0)))


class FirstWordOfBits(LayoutMutant):
    """Only the first 32 columns of a partial block are read."""

    caught_by = ("T23-pairs-32x64", "T23-pairs-128x128")
    passes = "T23-pairs-16x16"

    def misread_layout(self, layout):
        if layout.rule.bits is None:
            return layout
        bits = layout.rule.bits.clone()
        bits[..., 1:] = 0
        return replace(layout, rule=ElementRule(bits=bits))


class LayoutOfFirstHead(Mutant):
    """Every head reads the blocks of the first."""

    caught_by = ("T23-random-per-1h-fp32", "T23-pairs-per-bh-bf16")
    passes = "T23-random-per-b1-fp32"

    def blocks(self, inputs):
        return super().blocks(inputs)[:, :1]


class LayoutOfFirstBatch(Mutant):
    """Every batch entry reads the blocks of the first."""

    caught_by = ("T23-random-per-b1-fp32", "T23-pairs-per-bh-bf16")
    passes = "T23-random-per-1h-fp32"

    def blocks(self, inputs):
        return super().blocks(inputs)[:1]


class TailBlockRowDropped(Mutant):
    """The last block row, if it is cut, is not computed."""

    caught_by = ("T23-all-20x24", "T23-random-16x16", "T23-relation-full-fp32")
    passes = "T32-claim-layout-backward"

    def blocks(self, inputs):
        layout = inputs.layout
        rows = torch.arange(layout.q_len) < layout.q_len // layout.block_q * layout.block_q
        return super().blocks(inputs) & rows[:, None]


class LastColumnLost(LayoutMutant):
    """The highest block column of a row is not visited."""

    caught_by = ("T23-last_column-16x16", "T02-layout-last_column-float32")

    def misread_layout(self, layout):
        offsets, indices = layout.full.offsets.tolist(), layout.full.indices
        rows = [indices[start : max(start, stop - 1)] for start, stop in itertools.pairwise(offsets)]
        stops = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
        return replace(layout, full=BlockLists(stops, torch.cat(rows) if rows else indices))


class TransposedBitsInForwardOrder(LayoutMutant):
    """The backward walks partial blocks by column, but reads their bits in the order of the rows."""

    caught_by = ("T23-pairs-16x16", "T23-pairs-fp16")
    passes = "T23-random-16x16"

    def misread(self, spec, inputs):
        return spec, inputs

    def misread_backward(self, spec, inputs):
        return super().misread(spec, inputs)

    def misread_layout(self, layout):
        if layout.rule.bits is None:
            return layout
        bits = torch.empty_like(layout.rule.bits)
        bits[layout.transposed[2]] = layout.rule.bits
        return replace(layout, rule=ElementRule(bits=bits))


class LastColumnLostInBackward(Mutant):
    """Where whole blocks hold the queries but not the keys, the backward leaves out the last block column."""

    caught_by = ("T23-last_column-32x17", "T23-pairs-32x17")
    passes = "T23-last_column-17x33"

    def misread(self, spec, inputs):
        return spec, inputs

    def misread_backward(self, spec, inputs):
        layout = inputs.layout
        if layout is None or layout.q_len % layout.block_q or not layout.kv_len % layout.block_kv:
            return spec, inputs
        whole = torch.arange(layout.kv_len) < layout.kv_len // layout.block_kv * layout.block_kv
        mask = whole.view(1, 1, 1, -1) if inputs.mask is None else inputs.mask & whole
        return spec, replace(inputs, mask=mask)


class PaddingKeysOfTheBlockCount(Mutant, abstract=True):
    """What lies behind the last key, in its block, is a key of score `score`, of a value of zeros."""

    score = 0.0

    def padding(self, layout):
        """Keys behind the last one that are taken for keys."""
        return -layout.kv_len % layout.block_kv

    def softmax(self, spec, inputs, scores):
        p, lse = super().softmax(spec, inputs, scores)
        if inputs.layout is None or not self.padding(inputs.layout):
            return p, lse
        layout, kept = inputs.layout, scores > -torch.inf
        is_met = kept[..., (layout.kv_len - 1) // layout.block_kv * layout.block_kv :].any(-1)
        extra = torch.where(is_met, math.log(self.padding(layout)) + self.score, -torch.inf)
        total = torch.logaddexp(lse, extra)
        return p * torch.exp(lse - total).masked_fill(lse == -torch.inf, 0.0)[..., None], total


class HalfBlockOutsideCounts(PaddingKeysOfTheBlockCount):
    """Keys that are a multiple of 128 need no bound: the half of a block of 256 that lies behind them counts, with scores of 0."""

    caught_by = ("T23-cut-blocks-low-scores-all-384x384-fp16", "T23-cut-blocks-low-bias-all-384x384-fp32")
    passes = "T23-cut-blocks-low-scores-all-511x255-fp16"

    def padding(self, layout):
        return 0 if layout.kv_len % 128 else super().padding(layout)


class PaddingKeysAreMerelyLow(PaddingKeysOfTheBlockCount):
    """Keys behind the last one of a block have a score of -1e3, which real ones can be far below."""

    caught_by = ("T23-cut-blocks-low-scores-pairs-511x255-fp16", "T23-cut-blocks-low-bias-pairs-384x384-bf16")
    passes = "T23-wide-blocks-pairs-d64-fp16"
    score = -1e3


class PaddingQueriesOverflow(Mutant):
    """The backward takes the lse of queries behind the last one of a block for that of the last: exp(0 - lse) of a low one, times 0."""

    caught_by = ("T23-cut-blocks-low-scores-all-511x255-fp16", "T23-cut-blocks-low-bias-all-511x255-fp32")
    passes = "T23-wide-blocks-pairs-d64-fp16"

    def backward(self, spec, inputs, o, lse, grad_o, grad_lse):
        grads = super().backward(spec, inputs, o, lse, grad_o, grad_lse)
        layout = inputs.layout
        if layout is None or not layout.q_len % layout.block_q or grads.v is None:
            return grads
        spread = 0.0 * torch.exp(-lse[:, :: spec.group, -1:, None])
        return replace(grads, v=grads.v + spread.masked_fill(lse[:, :: spec.group, -1:, None] == -torch.inf, 0.0).to(grads.v.dtype))


class OverLayout(Mutant, abstract=True):
    """Has the fault of the class beside it where a call has a layout: blocks are walked by kernels of their own."""

    def attend(self, spec, inputs):
        return super().attend(spec, inputs) if inputs.layout is not None else Reference().attend(spec, inputs)


class OrderChangesOverLayout(OverLayout, OrderChanges):
    """With a layout and deterministic=True, every second call adds the keys up in the reverse order."""

    caught_by = ("T34-equal-bits-layout-fp32",)
    passes = "T34-equal-bits-plain-fp32"


class OffsetsIn32BitsOverLayout(OverLayout, OffsetsIn32Bits):
    """With a layout, offsets within q are 32-bit numbers that wrap."""

    caught_by = ("T12-batches-2-to-31-apart-in-q-layout-bf16",)
    passes = "T12-batches-2-to-31-apart-in-q-bf16"


class GridOverflowOverLayout(OverLayout, GridOverflow):
    """With a layout, heads beyond 65535, counted over the batch, are not computed."""

    caught_by = ("T12-grid-batch-65536-layout",)
    passes = "T12-grid-batch-65536"


class CacheForgetsAlignmentOverLayout(OverLayout, CacheForgetsAlignment):
    """With a layout, a kernel made for an aligned address serves an unaligned one, from the address below."""

    caught_by = ("T13-offset-1-layout-bf16", "T13-offset-2-layout-fp32")
    passes = "T13-offset-1-fp32"


class KeysKeptByAddressOverLayout(OverLayout, KeysKeptByAddress):
    """With a layout, k, brought to fp32, is kept by its address and shape."""

    caught_by = ("T29-changed_in_place-layout-fp16", "T29-changed_in_place-layout-fp32")
    passes = "T29-changed_in_place-plain-fp32"
