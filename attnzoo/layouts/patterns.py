"""Patterns of whole blocks: every block is full. Compose with `causal=True` in the call, or `&` with another layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.layout import BlockLayout, BlockLists, ElementRule, check_block_count
from attnzoo.layouts.validation import block_size, check_int, lengths, made_on

__all__ = ["bigbird", "butterfly", "dilated", "fixed", "longformer", "random", "strided"]

Block = int | tuple[int, int]
Device = torch.device | str | None
RANKED_AT_ONCE = 2**20  # columns of random rows
Columns = Callable[[Tensor], list[Tensor]]


def _of_columns(
    q_len: int, kv_len: int | None, block: Block, device: Device, columns_of: Columns, *, whole_rows: int = 0, **options: int
) -> BlockLayout:
    """A layout from, per row, some columns: duplicates and columns beyond either end are dropped.

    Args:
        columns_of: takes the rows `(rows, 1)` int64 and returns tables that broadcast to `(rows, n)`; n may differ.
        whole_rows: so many rows from the first on hold every column.
        options: of the pattern, each an int that is at least 0.
    """
    for name, value in options.items():
        check_int(name, value, least=0)
    q_len, kv_len = lengths(q_len, kv_len)
    block_q, block_kv = block_size(block)
    rows, columns = _count(q_len, block_q), _count(kv_len, block_kv)
    row = torch.arange(rows, device=made_on(device))[:, None]
    wanted = torch.cat([table.expand(rows, -1) for table in columns_of(row)], dim=1)
    inside = (wanted >= 0) & (wanted < columns)
    whole = torch.arange(min(whole_rows, rows) * columns, device=row.device)
    keys = torch.unique(torch.cat([(row * max(columns, 1) + wanted)[inside], whole]))
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


def _local(row: Tensor, reach: int, width: int, step: int = 1) -> Tensor:
    """Columns up to `reach` steps on either side; none is further than `width`."""
    reach = min(reach, _count(width, step))
    return row + step * torch.arange(-reach, reach + 1, device=row.device)


def _first(row: Tensor, count: int) -> Tensor:
    return torch.arange(count, device=row.device)[None, :]


def _count(length: int, size: int) -> int:
    return -(-length // size)


def _width(q_len: int, kv_len: int | None, block: Block) -> int:
    """No distance of two blocks is larger."""
    return _count(max(q_len, kv_len or q_len), min(block_size(block)))


def dilated(q_len: int, kv_len: int | None = None, *, reach: int, step: int = 2, block: Block = 128, device: Device = None) -> BlockLayout:
    """`reach` blocks on either side of the diagonal, `step` blocks apart (Longformer's dilated window)."""
    check_int("step", step, least=1)

    def columns_of(row: Tensor) -> list[Tensor]:
        width = _width(q_len, kv_len, block)
        return [_local(row, reach, width, min(step, width + 1))]  # one step more than the width is none that counts

    return _of_columns(q_len, kv_len, block, device, columns_of, reach=reach)


def strided(
    q_len: int, kv_len: int | None = None, *, stride: int, reach: int = 0, block: Block = 128, device: Device = None
) -> BlockLayout:
    """Blocks whose distance from the row is a multiple of `stride`, and `reach` blocks on either side
    (Child et al., "Generating long sequences with sparse Transformers", 2019)."""
    check_int("stride", stride, least=1)

    def columns_of(row: Tensor) -> list[Tensor]:
        width = _width(q_len, kv_len, block)
        apart = min(stride, width + 1)  # further apart is the row's own block alone, too
        return [row % apart + apart * torch.arange(_count(width, apart), device=row.device), _local(row, reach, width)]

    return _of_columns(q_len, kv_len, block, device, columns_of, reach=reach)


def fixed(
    q_len: int, kv_len: int | None = None, *, stride: int, summary: int = 1, block: Block = 128, device: Device = None
) -> BlockLayout:
    """The row's own group of `stride` blocks, and the last `summary` blocks of every group (Child et al., 2019)."""
    check_int("stride", stride, least=1)

    def columns_of(row: Tensor) -> list[Tensor]:
        width = _width(q_len, kv_len, block)
        size = min(stride, width + 1)  # of a group; larger ones differ beyond the end
        group = torch.arange(size, device=row.device)
        own = torch.div(row, size, rounding_mode="floor") * size + group
        starts = size * torch.arange(_count(width, size), device=row.device)
        last = stride - min(summary, stride)  # the first of the summary
        summaries = (starts[:, None] + group[min(last, size) :]).flatten()
        return [own, summaries[None, :]]

    return _of_columns(q_len, kv_len, block, device, columns_of, summary=summary)


def butterfly(q_len: int, kv_len: int | None = None, *, reach: int = 1, block: Block = 128, device: Device = None) -> BlockLayout:
    """Local blocks and, on either side, blocks at power-of-two distances: the FlashAttention paper's pattern."""

    def columns_of(row: Tensor) -> list[Tensor]:
        width = _width(q_len, kv_len, block)
        powers = 2 ** torch.arange(max(width, 1).bit_length(), device=row.device)
        return [_local(row, reach, width), row + powers, row - powers]

    return _of_columns(q_len, kv_len, block, device, columns_of, reach=reach)


def longformer(
    q_len: int, kv_len: int | None = None, *, reach: int, global_blocks: int = 1, block: Block = 128, device: Device = None
) -> BlockLayout:
    """A window of `reach` blocks on either side, and the first `global_blocks` rows and columns in full."""

    def columns_of(row: Tensor) -> list[Tensor]:
        width = _width(q_len, kv_len, block)
        return [_local(row, reach, width), _first(row, min(global_blocks, width))]

    return _of_columns(q_len, kv_len, block, device, columns_of, whole_rows=global_blocks, reach=reach, global_blocks=global_blocks)


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
    """Longformer's blocks and `random_blocks` of each row, drawn from `seed`; some may be the same (Zaheer et al., 2020)."""
    generator = _generator(seed)

    def columns_of(row: Tensor) -> list[Tensor]:
        columns = _count(q_len if kv_len is None else kv_len, block_size(block)[1])
        drawn = _drawn(len(row), columns, min(random_blocks, columns), generator)
        return [_local(row, reach, _width(q_len, kv_len, block)), _first(row, min(global_blocks, columns)), drawn.to(row.device)]

    options = {"reach": reach, "global_blocks": global_blocks, "random_blocks": random_blocks}
    return _of_columns(q_len, kv_len, block, device, columns_of, whole_rows=global_blocks, **options)


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
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise TypeError(f"density is {density!r}, a {type(density).__name__}; it takes a number from 0 to 1")
    if not 0.0 <= density <= 1.0:
        raise ValueError(f"density is {density!r}; it takes 0 to 1")
    generator = _generator(seed)

    def columns_of(row: Tensor) -> list[Tensor]:
        columns = _count(q_len if kv_len is None else kv_len, block_size(block)[1])
        wanted = min(max(round(density * columns), int(diagonal)), columns)
        check_block_count(len(row) * wanted)
        parts = torch.arange(len(row), device="cpu")[:, None].split(max(1, RANKED_AT_ONCE // max(columns, 1)))
        return [torch.cat([_first_ranks(part, columns, wanted, diagonal, generator) for part in parts]).to(row.device)]

    return _of_columns(q_len, kv_len, block, device, columns_of)


def _first_ranks(row: Tensor, columns: int, wanted: int, diagonal: bool, generator: torch.Generator) -> Tensor:
    """The first of a random order of the columns, for each row; its own block comes first if `diagonal`."""
    ranks = torch.rand(len(row), columns, generator=generator, device="cpu").argsort(dim=1)
    if diagonal and columns:
        own = row.clamp(max=columns - 1)
        ranks = torch.cat([own, ranks[ranks != own].view(len(row), columns - 1)], dim=1)
    return ranks[:, :wanted]


def _drawn(rows: int, columns: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` different columns for each row, all sets alike likely (Floyd's algorithm): time and memory in what is drawn."""
    drawn = torch.empty(rows, count, dtype=torch.int64, device="cpu")
    for place in range(count):
        last = columns - count + place
        pick = torch.randint(last + 1, (rows, 1), generator=generator, device="cpu")
        is_taken = (drawn[:, :place] == pick).any(dim=1)
        drawn[:, place] = torch.where(is_taken, last, pick[:, 0])
    return drawn


def _generator(seed: int) -> torch.Generator:
    """Of its own and on the CPU, so that a seed means the same on every device."""
    check_int("seed", seed, least=0, most=2**64 - 1)
    return torch.Generator("cpu").manual_seed(seed)
