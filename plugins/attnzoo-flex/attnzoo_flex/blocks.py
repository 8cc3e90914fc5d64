"""The BlockMask of a call: lists of blocks to compute, made once for a layout or a band, and the call's own mask_mod."""

from __future__ import annotations

import copy
import weakref
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnzoo import AttentionInputs, AttentionSpec, BlockLayout
from attnzoo.layouts.convert import to_block_mask
from attnzoo_flex.mods import mask_mod, needs_more_than_band, usable_later

__all__ = ["BLOCK", "block_mask"]

BLOCK = 128  # FlexAttention's own default

Band = tuple[int | None, int | None]
Listed = tuple[Tensor, Tensor]

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
        of_band = _of_band if is_kept() else _of_band.__wrapped__
        made = of_band(spec.q_len, spec.kv_len, spec.band, spec.diagonal, spec.device, has_more)
    if skips and spec.band == (None, None) and not has_more and has_no_rule(inputs.layout):
        return made  # a rule would only be compiled in, for blocks that don't exist
    made = copy.copy(made)
    made.mask_mod = mask_mod(spec, inputs)
    return made


def is_kept() -> bool:
    """Whether lists made now may be kept: not what a compiler traces, nor under a mode whose tensors hold nothing."""
    return not torch.compiler.is_compiling() and type(torch.empty(0)) is Tensor


def has_no_rule(layout: BlockLayout | None) -> bool:
    return layout is not None and layout.partial.indices.numel() == 0


def _of_layout(layout: BlockLayout, *, asks_every_pair: bool) -> Any:
    layout.check_unmodified()
    kept = _of_layouts.setdefault(layout, {})
    if asks_every_pair not in kept:
        with usable_later():
            kept[asks_every_pair] = _all_partial(layout) if asks_every_pair else _without_rule(to_block_mask(layout))
    return kept[asks_every_pair]


@lru_cache(maxsize=256)
def _of_band(q_len: int, kv_len: int, band: Band, diagonal: int, device: torch.device, asks_every_pair: bool) -> Any:
    """By arithmetic on the whole grid of blocks: torch.compile can follow it, whatever the lengths."""
    with usable_later():
        seen, full = band_blocks(q_len, kv_len, band, diagonal, device)
        if asks_every_pair:
            return _made((BLOCK, BLOCK), (q_len, kv_len), _listed(seen))
        return _made((BLOCK, BLOCK), (q_len, kv_len), _listed(seen & ~full), _listed(full))


def band_blocks(q_len: int, kv_len: int, band: Band, diagonal: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`(1, 1, rows, columns)`, bool: the blocks with a pair within the band, and those with no pair outside it."""
    first_query = torch.arange(0, q_len, BLOCK, device=device)[:, None] + diagonal
    last_query = (first_query + BLOCK - 1).clamp(max=q_len - 1 + diagonal)
    first_key = torch.arange(0, kv_len, BLOCK, device=device)
    last_key = (first_key + BLOCK - 1).clamp(max=kv_len - 1)
    seen = torch.ones(first_query.shape[0], first_key.shape[0], dtype=torch.bool, device=device)
    full, (left, right) = seen, band
    if left is not None:
        seen = seen & (last_key >= first_query - left)
        full = full & (first_key >= last_query - left)
    if right is not None:
        seen = seen & (first_key <= last_query + right)
        full = full & (last_key <= first_query + right)
    return seen[None, None], full[None, None]


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
    table = blocks.view(layout.batch, layout.heads, layout.rows, layout.columns)
    return _made((layout.block_q, layout.block_kv), (layout.q_len, layout.kv_len), _listed(table))


def _listed(table: Tensor) -> Listed:
    """How many blocks each row has, and all columns, those first: `(b, h, rows)` and `(b, h, rows, columns)`, int32."""
    order = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def _made(block: tuple[int, int], lengths: tuple[int, int], partial: Listed, full: Listed | None = None) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    full_counts, full_order = full or (None, None)
    return BlockMask.from_kv_blocks(*partial, full_counts, full_order, BLOCK_SIZE=block, seq_lengths=lengths)
