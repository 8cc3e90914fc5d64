"""The BlockMask of a call: lists of blocks to compute, made once for a layout or a band, and the call's own mask_mod."""

from __future__ import annotations

import copy
import weakref
from functools import lru_cache
from typing import Any

import torch

from attnzoo import AttentionInputs, AttentionSpec, BlockLayout, layouts
from attnzoo.layouts.convert import to_block_mask
from attnzoo_flex.mods import mask_mod, needs_more_than_band

__all__ = ["BLOCK", "block_mask"]

BLOCK = 128  # FlexAttention's own default

_of_layouts: weakref.WeakKeyDictionary[BlockLayout, dict[bool, Any]] = weakref.WeakKeyDictionary()


def block_mask(spec: AttentionSpec, inputs: AttentionInputs, *, skips: bool = True) -> Any:
    """A `BlockMask`, or None where every pair attends.

    Blocks that a layout or the band leaves out are skipped; a mask and segments are data, looked up pair by pair. What
    reads the rule alone and skips no block (`skips=False`) gets one that knows the blocks too.
    """
    has_more = needs_more_than_band(spec)
    if spec.layout is None and spec.band == (None, None) and not has_more:
        return None
    if inputs.layout is not None:
        made = _of_layout(inputs.layout, asks_every_pair=has_more or spec.band != (None, None))
    else:
        made = _of_band(spec.q_len, spec.kv_len, spec.band, spec.align, spec.device, has_more)
    if skips and spec.band == (None, None) and not has_more and has_no_rule(inputs.layout):
        return made  # a rule would only be compiled in, for blocks that don't exist
    made = copy.copy(made)
    made.mask_mod = mask_mod(spec, inputs)
    return made


def has_no_rule(layout: BlockLayout | None) -> bool:
    return layout is not None and layout.partial.indices.numel() == 0


def _of_layout(layout: BlockLayout, *, asks_every_pair: bool) -> Any:
    layout.check_unmodified()
    kept = _of_layouts.setdefault(layout, {})
    if asks_every_pair not in kept:
        kept[asks_every_pair] = _all_partial(layout) if asks_every_pair else _without_rule(to_block_mask(layout))
    return kept[asks_every_pair]


@lru_cache(maxsize=256)
def _of_band(q_len: int, kv_len: int, band: tuple[int | None, int | None], align: Any, device: torch.device, asks_every_pair: bool) -> Any:
    if band == (None, None):
        every = torch.ones(-(-q_len // BLOCK), -(-kv_len // BLOCK), dtype=torch.bool, device=device)
        layout = BlockLayout.from_blocks(every, block=BLOCK, q_len=q_len, kv_len=kv_len)
    else:
        layout = layouts.sliding_window(q_len, kv_len, window=band, block=BLOCK, align=align, device=device)
    return _all_partial(layout) if asks_every_pair else to_block_mask(layout)


def _without_rule(made: Any) -> Any:
    """Its blocks alone; the rule, if the call needs one, is the call's."""
    from torch.nn.attention.flex_attention import noop_mask

    made.mask_mod = noop_mask
    return made


def _all_partial(layout: BlockLayout) -> Any:
    """With no full block: the call has rules of its own, which each pair is asked for."""
    blocks = torch.zeros(layout.batch * layout.heads * layout.rows, layout.columns, dtype=torch.bool, device=layout.device)
    for lists in (layout.full, layout.partial):
        blocks[lists.row_of_each(), lists.indices.long()] = True
    shape = (layout.batch, layout.heads, layout.rows)
    counts = blocks.sum(1, dtype=torch.int32).view(shape)
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32).view(*shape, layout.columns)
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask.from_kv_blocks(
        counts, order.contiguous(), BLOCK_SIZE=(layout.block_q, layout.block_kv), seq_lengths=(layout.q_len, layout.kv_len)
    )
