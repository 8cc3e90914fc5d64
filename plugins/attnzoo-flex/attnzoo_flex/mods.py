"""From an attnzoo call to FlexAttention's two functions: which pairs attend, and what becomes of a score."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnzoo import AttentionInputs, AttentionSpec, BlockLayout
from attnzoo.layouts.convert import mask_mod_of

__all__ = ["MaskMod", "ScoreMod", "mask_mod", "needs_more_than_band", "score_mod", "usable_later"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

LOWEST = -(2.0**126)

_rules: weakref.WeakKeyDictionary[BlockLayout, MaskMod] = weakref.WeakKeyDictionary()


def needs_more_than_band(spec: AttentionSpec) -> bool:
    """Whether a rule beyond causal and window says who attends."""
    return spec.mask is not None or spec.segments


def mask_mod(spec: AttentionSpec, inputs: AttentionInputs) -> MaskMod:
    """`(b, h, i, j) -> bool`, all rules of the call by AND; captures its tensors."""
    parts = [part for part in (_band(spec), _mask(spec, inputs), _segments(inputs)) if part is not None]
    if inputs.layout is not None:
        parts.append(_of_layout(inputs.layout))

    def attends(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        kept = j >= 0
        for part in parts:
            kept = kept & part(b, h, i, j)
        return kept

    return attends


def usable_later() -> contextlib.AbstractContextManager[Any]:
    """Tables and lists made in inference mode would be of no use to the training step that meets them next."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


def _of_layout(layout: BlockLayout) -> MaskMod:
    """Made once: its tables are as large as the grid of blocks."""
    layout.check_unmodified()
    if layout not in _rules:
        with usable_later():
            _rules[layout] = mask_mod_of(layout)
    return _rules[layout]


def _band(spec: AttentionSpec) -> MaskMod | None:
    left, right = spec.band
    diagonal = spec.diagonal
    if left is None and right is None:
        return None

    def within(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = j - i - diagonal
        kept = distance >= -left if left is not None else j >= 0
        return kept & (distance <= right) if right is not None else kept

    return within


def _mask(spec: AttentionSpec, inputs: AttentionInputs) -> MaskMod | None:
    if inputs.mask is None:
        return None
    return _looked_up(inputs.mask)


def _looked_up(table: Tensor) -> MaskMod:
    """The element of a table whose dims are 1 or full; contiguous, since Inductor's CPU kernel takes no views."""
    table = table.contiguous()
    wide = [int(size != 1) for size in table.shape]
    return lambda b, h, i, j: table[b * wide[0], h * wide[1], i * wide[2], j * wide[3]]


def _segments(inputs: AttentionInputs) -> MaskMod | None:
    if inputs.q_segment_ids is None or inputs.kv_segment_ids is None:
        return None
    q_ids, kv_ids = inputs.q_segment_ids.contiguous(), inputs.kv_segment_ids.contiguous()
    return lambda b, h, i, j: q_ids[b, i] == kv_ids[b, j]


def score_mod(spec: AttentionSpec, inputs: AttentionInputs) -> ScoreMod | None:
    """Soft cap, then bias, on the scaled score; None where there is neither."""
    cap = spec.softcap
    if inputs.bias is None and cap is None:
        return None
    bias = None if inputs.bias is None else _looked_up(inputs.bias)

    def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * (score / cap).tanh()
        return score if bias is None else score + far_from_overflow(bias(b, h, i, j))

    return changed


def far_from_overflow(bias: Tensor) -> Tensor:
    """A finite bias below -2**126 is that: FlexAttention multiplies by log2(e), which overflows at fp32's lowest number."""
    if bias.dtype == torch.float64:
        return bias
    bias = bias.to(torch.float32)
    return torch.where(bias.isneginf(), bias, bias.clamp(min=LOWEST))
