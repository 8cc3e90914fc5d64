"""Causal and sliding-window layouts, exact to the element: full blocks inside the band, partial ones on its edges."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.layout import BlockLayout, BlockLists, ElementRule
from attnzoo.layouts.ranges import lists_of_ranges
from attnzoo.layouts.validation import block_size, lengths, made_on
from attnzoo.spec import Align, Window, check_align, check_window

__all__ = ["causal", "sliding_window"]

Block = int | tuple[int, int]
Device = torch.device | str | None


def causal(q_len: int, kv_len: int | None = None, *, block: Block = 128, align: Align | None = None, device: Device = None) -> BlockLayout:
    """Query i sees key j only if `j <= p(i)`, as `causal=True` does.

    Args:
        q_len, kv_len: lengths in tokens; kv_len defaults to q_len.
        block: tokens a block, one number or `(block_q, block_kv)`.
        align: where the diagonal sits if the lengths differ; needed there, as in `attention`.
        device: of the layout's tensors; torch's default device where none is given.
    """
    return _band(q_len, kv_len, (None, 0), block, align, device)


def sliding_window(
    q_len: int,
    kv_len: int | None = None,
    *,
    window: int | tuple[int | None, int | None],
    block: Block = 128,
    align: Align | None = None,
    device: Device = None,
) -> BlockLayout:
    """Query i sees key j only if `p(i) - left <= j <= p(i) + right`, as `window=(left, right)` does.

    Args:
        window: `(left, right)`, None where unbounded; one number n is `(n, 0)`, the causal window.
        q_len, kv_len, block, align, device: as for `causal`.
    """
    bounds = window if isinstance(window, tuple) else (window, 0)
    return _band(q_len, kv_len, bounds, block, align, device)


def _band(q_len: int, kv_len: int | None, window: Window, block: Block, align: Align | None, device: Device) -> BlockLayout:
    q_len, kv_len = lengths(q_len, kv_len)
    block_q, block_kv = block_size(block)
    align = check_align(align, True, q_len, kv_len)
    band = (*(check_window(window) or (None, None)), kv_len - q_len if align == "bottom_right" else 0)
    device = made_on(device)
    full, partial = _band_lists(q_len, kv_len, block_q, block_kv, band, device)
    layout = BlockLayout._trusted(
        q_len=q_len, kv_len=kv_len, block_q=block_q, block_kv=block_kv, full=full, partial=partial, rule=ElementRule(band=band)
    )
    mirrored = (band[1], band[0], -band[2])  # seen from the keys a band is a band: nothing to sort
    by_column = _band_lists(kv_len, q_len, block_kv, block_q, mirrored, device)
    layout.__dict__["_transposed"] = layout._keep_transposed(*by_column, partial.indices[:0].long())
    return layout


def _band_lists(
    q_len: int, kv_len: int, block_q: int, block_kv: int, band: tuple[int | None, int | None, int], device: torch.device
) -> tuple[BlockLists, BlockLists]:
    left, right, diagonal = band
    columns = -(-kv_len // block_kv)
    first_query = torch.arange(0, q_len, block_q, device=device) + diagonal
    last_query = (first_query + block_q - 1).clamp(max=q_len - 1 + diagonal)
    nothing, everything = torch.zeros_like(first_query), torch.full_like(first_query, columns)

    def column_of(key: Tensor) -> Tensor:
        return torch.div(key, block_kv, rounding_mode="floor").clamp(-1, columns)

    # columns with a visible pair, and columns whose pairs are all visible
    seen_first = nothing if left is None else column_of(first_query - left).clamp(min=0)
    seen_last = everything if right is None else (column_of(last_query + right) + 1).clamp(max=columns)
    full_first = nothing if left is None else column_of(last_query - left + block_kv - 1).clamp(min=0)
    full_last = everything
    if right is not None:
        reaches_end = first_query + right >= kv_len - 1  # the last block may be cut
        full_last = torch.where(reaches_end, columns, column_of(first_query + right + 1)).clamp(0, columns)
    if left is not None:
        past_the_end = first_query - left >= kv_len
        seen_first = torch.where(past_the_end, columns, seen_first)
    full_first = torch.maximum(full_first, seen_first)
    full_last = torch.maximum(torch.minimum(full_last, seen_last), full_first)
    return (
        lists_of_ranges((full_first, full_last)),
        lists_of_ranges((seen_first, torch.minimum(full_first, seen_last)), (torch.maximum(full_last, seen_first), seen_last)),
    )
