"""Packed documents and prefix language models, exact to the element."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import SupportsIndex

import torch
from torch import Tensor

from attnzoo.layout import ID_DTYPES, BlockLayout, ElementRule
from attnzoo.layouts.bands import causal
from attnzoo.layouts.mask_mod import evaluate_blocks
from attnzoo.layouts.ranges import lists_of_ranges
from attnzoo.layouts.validation import check_int, made_on
from attnzoo.spec import Align

__all__ = ["documents", "prefix_lm"]


def documents(
    documents: Sequence[int] | Tensor, *, causal: bool = False, block: int = 128, device: torch.device | str | None = None
) -> BlockLayout:
    """Attend within a document only, as equal `segment_ids` do.

    Args:
        documents: the lengths of the documents, which are packed in this order; or their ids, `(S,)` or `(B, S)`
            integers that don't decrease along the sequence.
        causal: also `j <= i`, within the packed sequence.
        block: tokens a block, the same for queries and keys.
        device: of the layout's tensors; where none is given that of the ids, or for lengths torch's default device.

    Raises:
        ValueError: ids that decrease, or a length below 0.
    """
    ids = _ids(documents, device)
    check_int("block", block, least=1)
    batch, length = ids.shape
    blocks = -(-length // block)
    starts = torch.arange(blocks, device=ids.device) * block
    low, high = ids[:, starts], ids[:, (starts + block).clamp(max=length) - 1]  # first and last id of each block
    first, last = torch.searchsorted(high, low), torch.searchsorted(low, high, right=True)
    is_one = low == high
    full_first = torch.where(is_one, torch.searchsorted(low, low), last)
    full_last = torch.where(is_one, torch.searchsorted(high, high, right=True), last)
    if causal:
        row = torch.arange(blocks, device=ids.device)
        last = torch.minimum(last, row + 1)
        has_one_token = starts + 1 == (starts + block).clamp(max=length)  # and no later key
        full_last = torch.minimum(full_last, torch.where(has_one_token, row + 1, row))
        full_first = torch.minimum(full_first, last)
    full_last = torch.maximum(full_last, full_first)
    ranges = [table.flatten() for table in (first, full_first, full_last, last)]
    return BlockLayout._trusted(
        q_len=length,
        kv_len=length,
        block_q=block,
        block_kv=block,
        full=lists_of_ranges((ranges[1], ranges[2])),
        partial=lists_of_ranges((ranges[0], ranges[1]), (ranges[2], ranges[3])),
        rule=ElementRule(band=(None, 0, 0) if causal else None, segments=(ids, ids)),
        batch=batch,
    )


def _ids(documents: Sequence[int] | Tensor, device: torch.device | str | None) -> Tensor:
    if isinstance(documents, Tensor):
        if documents.ndim not in (1, 2) or documents.dtype not in ID_DTYPES:
            raise TypeError(f"documents has dtype {documents.dtype}, {documents.ndim} dims; it takes integer ids (S,) or (B, S)")
        ids = documents.to(documents.device if device is None else torch.device(device), copy=True)
        ids = ids if ids.ndim == 2 else ids[None]
        if bool((ids[:, 1:] < ids[:, :-1]).any()):  # a difference could wrap
            raise ValueError("documents has ids that decrease along the sequence; a layout needs them in order")
        return ids.contiguous()
    lengths = torch.tensor([_length(length) for length in documents], dtype=torch.int64, device="cpu")
    return torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)[None, :].to(made_on(device))


def _length(value: SupportsIndex) -> int:
    try:
        length = operator.index(value)
    except TypeError:
        raise TypeError(f"a length of documents is {value!r}, a {type(value).__name__}; it takes an int") from None
    check_int("a length of documents", length, least=0)
    return length


def prefix_lm(
    q_len: int,
    kv_len: int | None = None,
    *,
    prefix: int,
    block: int | tuple[int, int] = 128,
    align: Align | None = None,
    device: torch.device | str | None = None,
) -> BlockLayout:
    """Every query sees the first `prefix` keys, and beyond them those up to its own place.

    Args:
        prefix: number of keys that all queries see.
        q_len, kv_len, block, align, device: as for `causal`.
    """
    check_int("prefix", prefix, least=0)
    base = causal(q_len, kv_len, block=block, align=align, device=device)
    is_all, counts = prefix >= base.kv_len, base.full.offsets.diff().long()
    seen = counts + base.partial.offsets.diff().long()  # both start at column 0
    in_full = torch.full_like(counts, base.columns if is_all else prefix // base.block_kv)
    in_part = torch.full_like(counts, -(-min(prefix, base.kv_len) // base.block_kv))
    nothing, full_last = torch.zeros_like(counts), torch.maximum(counts, in_full)
    full, partial = lists_of_ranges((nothing, full_last)), lists_of_ranges((full_last, torch.maximum(seen, in_part)))
    assert base.rule.band is not None
    diagonal = base.rule.band[2]
    bits = evaluate_blocks(lambda b, h, i, j: (j < prefix) | (j <= i + diagonal), partial, base)
    return replace(base, full=full, partial=partial, rule=ElementRule(bits=bits) if len(bits) else ElementRule())
