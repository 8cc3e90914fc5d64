"""Faults of block layouts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from attnzoo.layout import BlockLists, ElementRule

from .mutant import Mutant


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

    caught_by = ("T23-all-20x24", "T23-random-16x16")
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
