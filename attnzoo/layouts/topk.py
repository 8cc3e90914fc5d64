"""Layouts chosen at run time: the best blocks of every row, by a score. Nothing is read back from the device."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.layout import BlockLayout, BlockLists, ElementRule, check_block_count
from attnzoo.layouts.validation import block_size, check_int, lengths

__all__ = ["topk"]

RANKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def topk(scores: Tensor, k: int, *, q_len: int, kv_len: int, block: int | tuple[int, int] = 128) -> BlockLayout:
    """The k blocks with the highest score in each row of blocks, all full, as NSA and MInference choose theirs.

    A row always gets k blocks, whatever their score: what must not be seen is left out by `causal`, `window` or
    `mask` in the call. Scores that are nan count as highest.

    Args:
        scores: `(rows, columns)` or `(B or 1, H or 1, rows, columns)`, any float dtype; the layout lives on its device.
        k: blocks a row, at most the number of columns.
        q_len, kv_len: lengths in tokens; `rows` and `columns` are theirs in blocks.
        block: tokens a block, one number or `(block_q, block_kv)`.
    """
    if not isinstance(scores, Tensor) or not scores.dtype.is_floating_point:
        raise TypeError(f"scores is {getattr(scores, 'dtype', type(scores).__name__)}; it takes a float tensor")
    if scores.layout is not torch.strided:
        raise TypeError(f"scores is a sparse tensor of layout {scores.layout}; it takes a dense (strided) one")
    if scores.ndim not in (2, 4):
        raise ValueError(f"scores has {scores.ndim} dims, shape {tuple(scores.shape)}; it takes 2 or 4")
    q_len, kv_len = lengths(q_len, kv_len)
    block_q, block_kv = block_size(block)
    table = scores if scores.ndim == 4 else scores[None, None]
    batch, heads, rows, columns = table.shape
    if (rows, columns) != (-(-q_len // block_q), -(-kv_len // block_kv)):
        raise ValueError(
            f"scores has {rows} x {columns} blocks; lengths ({q_len}, {kv_len}) have {-(-q_len // block_q)} x {-(-kv_len // block_kv)}"
        )
    check_int("k", k, least=0)
    if k > columns:
        raise ValueError(f"k is {k}; it takes 0 to {columns}, the number of block columns")
    check_block_count(batch * heads * rows * k)
    if table.dtype not in RANKED:  # torch ranks no fp8
        table = table.float()
    best = table.detach().flatten(0, 2).topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
    offsets = torch.arange(batch * heads * rows + 1, dtype=torch.int32, device=scores.device) * k
    return BlockLayout._trusted(
        q_len=q_len,
        kv_len=kv_len,
        block_q=block_q,
        block_kv=block_kv,
        full=BlockLists(offsets, best.flatten().to(torch.int32)),
        partial=BlockLists(torch.zeros_like(offsets), best.flatten()[:0].to(torch.int32)),
        rule=ElementRule(),
        batch=batch,
        heads=heads,
    )
