"""Patterns of whole blocks: every block is full. Compose with `causal=True` in the call, or `&` with another layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.layout import BlockLayout, BlockLists, ElementRule
from attnzoo.layouts.validation import block_size

__all__ = ["bigbird", "butterfly", "dilated", "fixed", "longformer", "random", "strided"]

Block = int | tuple[int, int]
Device = torch.device | str | None
Columns = Callable[[Tensor], list[Tensor]]


def _of_columns(q_len: int, kv_len: int | None, block: Block, device: Device, columns_of: Columns) -> BlockLayout:
    """A layout from, per row, some columns: duplicates and columns beyond either end are dropped.

    Args:
        columns_of: takes the rows `(rows, 1)` int64 and returns tables that broadcast to `(rows, n)`; n may differ.
    """
    kv_len = q_len if kv_len is None else kv_len
    block_q, block_kv = block_size(block)
    rows, columns = -(-q_len // block_q), -(-kv_len // block_kv)
    row = torch.arange(rows, device=device)[:, None]
    tables = [table.expand(rows, -1) for table in columns_of(row)]
    wanted = torch.cat(tables, dim=1) if tables else row[:, :0]
    inside = (wanted >= 0) & (wanted < columns)
    keys = torch.unique((row * max(columns, 1) + wanted)[inside])
    counts = torch.bincount(torch.div(keys, max(columns, 1), rounding_mode="floor"), minlength=rows)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return BlockLayout._trusted(
        q_len=q_len,
        kv_len=kv_len,
        block_q=block_q,
        block_kv=block_kv,
        full=BlockLists(offsets, (keys % max(columns, 1)).to(torch.int32)),
        partial=BlockLists(torch.zeros_like(offsets), keys[:0].to(torch.int32)),
        rule=ElementRule(),
    )


def _local(row: Tensor, reach: int) -> Tensor:
    return row + torch.arange(-reach, reach + 1, device=row.device)


def _count(length: int, size: int) -> int:
    return -(-length // size)


def dilated(q_len: int, kv_len: int | None = None, *, reach: int, step: int = 2, block: Block = 128, device: Device = None) -> BlockLayout:
    """`reach` blocks on either side of the diagonal, `step` blocks apart (Longformer's dilated window)."""
    return _of_columns(q_len, kv_len, block, device, lambda row: [row + step * torch.arange(-reach, reach + 1, device=row.device)])


def strided(
    q_len: int, kv_len: int | None = None, *, stride: int, reach: int = 0, block: Block = 128, device: Device = None
) -> BlockLayout:
    """Blocks whose distance from the row is a multiple of `stride`, and `reach` blocks on either side
    (Child et al., "Generating long sequences with sparse Transformers", 2019)."""
    _positive("stride", stride)
    width = _count(max(q_len, kv_len or q_len), min(block_size(block)))

    def columns_of(row: Tensor) -> list[Tensor]:
        return [row % stride + stride * torch.arange(_count(width, stride), device=row.device), _local(row, reach)]

    return _of_columns(q_len, kv_len, block, device, columns_of)


def fixed(
    q_len: int, kv_len: int | None = None, *, stride: int, summary: int = 1, block: Block = 128, device: Device = None
) -> BlockLayout:
    """The row's own group of `stride` blocks, and the last `summary` blocks of every group (Child et al., 2019)."""
    _positive("stride", stride)
    width = _count(max(q_len, kv_len or q_len), min(block_size(block)))

    def columns_of(row: Tensor) -> list[Tensor]:
        group = torch.arange(stride, device=row.device)
        own = torch.div(row, stride, rounding_mode="floor") * stride + group
        starts = stride * torch.arange(_count(width, stride), device=row.device)
        summaries = (starts[:, None] + group[stride - min(summary, stride) :]).flatten()
        return [own, summaries[None, :]]

    return _of_columns(q_len, kv_len, block, device, columns_of)


def butterfly(q_len: int, kv_len: int | None = None, *, reach: int = 1, block: Block = 128, device: Device = None) -> BlockLayout:
    """Local blocks and, on either side, blocks at power-of-two distances: the FlashAttention paper's pattern."""
    width = _count(max(q_len, kv_len or q_len), min(block_size(block)))

    def columns_of(row: Tensor) -> list[Tensor]:
        powers = 2 ** torch.arange(max(width, 1).bit_length(), device=row.device)
        return [_local(row, reach), row + powers, row - powers]

    return _of_columns(q_len, kv_len, block, device, columns_of)


def longformer(
    q_len: int, kv_len: int | None = None, *, reach: int, global_blocks: int = 1, block: Block = 128, device: Device = None
) -> BlockLayout:
    """A window of `reach` blocks on either side, and the first `global_blocks` rows and columns in full."""
    width = _count(kv_len or q_len, block_size(block)[1])

    def columns_of(row: Tensor) -> list[Tensor]:
        everything = torch.arange(width, device=row.device)
        first = torch.arange(min(global_blocks, width), device=row.device)
        return [_local(row, reach), first[None, :], torch.where(row < global_blocks, everything, -1)]

    return _of_columns(q_len, kv_len, block, device, columns_of)


def bigbird(
    q_len: int,
    kv_len: int | None = None,
    *,
    reach: int = 1,
    global_blocks: int = 1,
    random_blocks: int = 3,
    seed: int = 0,
    block: Block = 128,
    device: Device = None,
) -> BlockLayout:
    """Longformer's blocks and `random_blocks` further ones a row, drawn from `seed` (Zaheer et al., 2020)."""
    kv = q_len if kv_len is None else kv_len
    base = longformer(q_len, kv, reach=reach, global_blocks=global_blocks, block=block, device=device)
    if not base.columns:
        return base
    drawn = _ranks(base.rows, base.columns, seed)[:, : min(random_blocks, base.columns)].to(base.device)
    kept = torch.repeat_interleave(torch.arange(base.rows, device=base.device), base.full.offsets.diff().long())
    extra = torch.full((base.rows, int(base.full.offsets.diff().max())), -1, device=base.device)
    place = torch.arange(len(kept), device=base.device) - base.full.offsets.long()[kept]
    extra[kept, place] = base.full.indices.long()
    return _of_columns(q_len, kv, block, device, lambda row: [extra, drawn])


def random(
    q_len: int,
    kv_len: int | None = None,
    *,
    density: float,
    seed: int = 0,
    diagonal: bool = True,
    block: Block = 128,
    device: Device = None,
) -> BlockLayout:
    """`density` of each row's blocks, drawn from `seed`, the same on every device; with the diagonal's if asked."""
    if not 0.0 <= density <= 1.0:
        raise ValueError(f"density is {density!r}; it takes 0 to 1")
    block_q, block_kv = block_size(block)
    rows, columns = _count(q_len, block_q), _count(q_len if kv_len is None else kv_len, block_kv)
    wanted = round(density * columns)
    drawn = _ranks(rows, columns, seed)
    if diagonal:  # the row's own block comes first
        own = torch.arange(rows)[:, None].clamp(max=max(columns - 1, 0))
        drawn = torch.cat([own, drawn[drawn != own].view(rows, max(columns - 1, 0))], dim=1) if columns else drawn
    drawn = drawn[:, : max(wanted, int(diagonal))].to(device or "cpu")
    return _of_columns(q_len, kv_len, block, device, lambda row: [drawn])


def _ranks(rows: int, columns: int, seed: int) -> Tensor:
    """Per row a random order of the columns, from a generator of its own on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, columns, generator=generator).argsort(dim=1)


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}; it takes at least 1")
