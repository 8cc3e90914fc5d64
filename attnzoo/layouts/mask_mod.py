"""Layouts from a Python function of the indices, evaluated block by block, never as one `q_len x kv_len` table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import Tensor

from attnzoo.layout import BlockLayout, BlockLists, ElementRule, pack_bits
from attnzoo.layouts.build import blocks_at_once
from attnzoo.layouts.validation import block_size, check_int, lengths, made_on

__all__ = ["MaskMod", "evaluate_blocks", "from_mask_mod", "of_single_pairs"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ELEMENTS_AT_ONCE = {"cpu": 2**22, "cuda": 2**28}  # of the mask; a chunk is at least one row of blocks
PROBES = 16  # pairs that a function is asked for alone


def from_mask_mod(
    mask_mod: MaskMod,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 1,
    heads: int = 1,
    block: int | tuple[int, int] = 128,
    device: torch.device | str | None = None,
) -> BlockLayout:
    """The layout of a mask function, as FlexAttention takes it: full blocks where it is True for all pairs,
    partial blocks with packed bits where it is True for some.

    Args:
        mask_mod: `(b, h, i, j) -> bool`, on int64 tensors that broadcast against one another: 0-dim b and h,
            `(n, 1)` i and `(1, m)` j. Use `&`, `|`, `~`, not `and`, `or`, `not`; reduce over dims of your own alone, as in
            `(i[..., None] == ids).any(-1)`: what it says of a pair must not depend on the other pairs.
        q_len, kv_len: lengths in tokens.
        batch, heads: 1 where the function doesn't look at b or h.
        block: tokens a block, one number or `(block_q, block_kv)`.
        device: where the function is evaluated and the layout lives; torch's default device where none is given.

    Raises:
        TypeError, ValueError: arguments that don't fit, a function that returns something else, or one that said something
            else of a pair alone than among others; some pairs are asked for twice.
    """
    q_len, kv_len = lengths(q_len, kv_len)
    for name, count in (("batch", batch), ("heads", heads)):
        check_int(name, count, least=0)
    block_q, block_kv = block_size(block)
    device = made_on(device)
    rows, columns = -(-q_len // block_q), -(-kv_len // block_kv)
    full, partial = (torch.zeros(batch * heads * rows, columns, dtype=torch.bool, device=device) for _ in range(2))
    bits = []
    for first, kept, is_cut in _chunks(mask_mod, q_len, kv_len, batch, heads, (block_q, block_kv), device):
        here = slice(first, first + kept.shape[0])
        full[here], has_any = _all_and_any(kept if is_cut is None else kept | is_cut)
        partial[here] = has_any & ~full[here] if is_cut is None else _all_and_any(kept)[1] & ~full[here]
        bits.append(pack_bits(kept.transpose(1, 2)[partial[here]]))
    return BlockLayout._trusted(
        q_len=q_len,
        kv_len=kv_len,
        block_q=block_q,
        block_kv=block_kv,
        full=BlockLists.from_bool(full),
        partial=BlockLists.from_bool(partial),
        rule=ElementRule(bits=torch.cat(bits)) if bits and bool(partial.any()) else ElementRule(),
        batch=batch,
        heads=heads,
    )


def _chunks(
    mask_mod: MaskMod, q_len: int, kv_len: int, batch: int, heads: int, block: tuple[int, int], device: torch.device
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """`(first row, kept, is_cut)`: what some rows of blocks of one head keep, `(rows, block_q, columns, block_kv)`, and
    which of these pairs lie past the ends; None where none does, which spares passes over all pairs."""
    block_q, block_kv = block
    rows, columns = -(-q_len // block_q), -(-kv_len // block_kv)
    step = max(1, ELEMENTS_AT_ONCE.get(device.type, 2**22) // max(block_q * columns * block_kv, 1))
    j = torch.arange(columns * block_kv, device=device)[None, :]
    alone = _Alone(mask_mod, q_len, kv_len, chunks=batch * heads * -(-rows // step))
    for head in range(batch * heads):
        b, h = (torch.tensor(index, device=device) for index in divmod(head, heads))
        for first in range(0, rows, step):
            count = min(step, rows - first)
            shape = (count, block_q, columns, block_kv)
            i = torch.arange(first * block_q, (first + count) * block_q, device=device)[:, None]
            table = (count * block_q, columns * block_kv)
            kept, is_cut = _called(mask_mod, b, h, i.clamp(max=q_len - 1), j.clamp(max=kv_len - 1), table), None
            alone.ask(kept, first * block_q, b, h, i, j)
            if (first + count) * block_q > q_len or columns * block_kv > kv_len:
                is_cut = (i >= q_len) | (j >= kv_len)
                kept, is_cut = kept & ~is_cut, is_cut.view(shape)
            yield head * rows + first, kept.contiguous().view(shape), is_cut
    alone.check()


class _Alone:
    """Some pairs that a function is asked for once more, each alone: one that reduces, as `(i == ids).any()` does, says of
    many pairs at once what it says of none of them, and FlexAttention asks it for one at a time."""

    def __init__(self, mask_mod: MaskMod, q_len: int, kv_len: int, *, chunks: int) -> None:
        self.mask_mod, self.q_len, self.kv_len = mask_mod, q_len, kv_len
        self.places = [chunks * probe // PROBES for probe in range(PROBES)]  # the chunk of each
        self.chunk, self.draw = 0, Random(0)
        self.pairs: list[tuple[int, int]] = []
        self.answers: list[Tensor] = []

    def ask(self, kept: Tensor, start: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> None:
        """For a chunk's share of the pairs, from query `start` on; every other one lies on the diagonal, where masks keep the most."""
        if not self.chunk and min(self.q_len, self.kv_len) > 2:  # of lengths that differ: what has the wrong dim fits no other
            _called(self.mask_mod, b, h, i[:2].clone(), j[:, :3].clone(), (2, 3))
        for probe in [probe for probe, place in enumerate(self.places) if place == self.chunk and kept.numel()]:
            row = self.draw.randrange(min(len(kept), self.q_len - start))
            column = self.draw.randrange(self.kv_len) if probe % 2 else min(start + row, self.kv_len - 1)
            answer = _called(self.mask_mod, b, h, i[row : row + 1].clone(), j[:, column : column + 1].clone(), (1, 1))
            self.pairs.append((start + row, column))
            self.answers.append(torch.stack([kept[row, column], answer[0, 0]]))
        self.chunk += 1

    def check(self) -> None:
        """Raise ValueError if one of them was answered otherwise."""
        answers = torch.stack(self.answers).tolist() if self.answers else []
        for (i, j), (among_others, by_itself) in zip(self.pairs, answers):
            if among_others != by_itself:
                raise ValueError(
                    f"mask_mod says {among_others} of query {i} and key {j} among others, and {by_itself} of them alone; it takes a "
                    "function whose answer depends on b, h, i and j only: reduce over a dim of your own, as in "
                    "(i[..., None] == ids).any(-1)"
                )


def _all_and_any(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Of `(rows, block_q, columns, block_kv)` bool, whether all and whether any of each block are True: `(rows, columns)`."""
    if not tiles.numel():
        return tiles.all(3).all(1), tiles.any(3).any(1)
    eight = tiles.shape[3] % 8 == 0 and tiles.storage_offset() % 8 == 0  # bools at once, as one integer
    numbers = tiles.view(torch.int64 if eight else torch.uint8)
    least, most = numbers.amin((1, 3)), numbers.amax((1, 3))
    return least == (0x0101010101010101 if eight else 1), (least != 0) | (most != 0)


def _called(mask_mod: MaskMod, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not callable(mask_mod):
        raise TypeError(f"mask_mod is a {type(mask_mod).__name__}; it takes a function (b, h, i, j) -> bool tensor")
    kept = mask_mod(b, h, i, j)
    if not isinstance(kept, Tensor) or kept.dtype != torch.bool:
        found = kept.dtype if isinstance(kept, Tensor) else type(kept).__name__
        raise TypeError(f"mask_mod returned {found}; it takes a function that returns a bool tensor")
    if not all([have in (1, want) for have, want in zip(kept.shape[::-1], shape[::-1])]) or kept.ndim > len(shape):
        raise ValueError(f"mask_mod returned shape {tuple(kept.shape)}; it takes one that broadcasts to {tuple(shape)}, that of i and j")
    return kept.expand(shape)


def of_single_pairs(mask_mod: MaskMod) -> MaskMod:
    """The function as `evaluate_blocks` asks it, of one that is written for single pairs, 0-dim indices, as FlexAttention asks."""
    for in_dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        mask_mod = torch.vmap(mask_mod, in_dims)
    return lambda b, h, i, j: mask_mod(b.flatten(), h.flatten(), i.flatten(1), j.flatten(1))


def evaluate_blocks(mask_mod: MaskMod, lists: BlockLists, like: BlockLayout) -> Tensor:
    """The mask function on every block of `lists`, packed as `ElementRule.bits` are, some blocks at a time; pairs past the ends are False.

    Args:
        lists: over the rows of `like`, a layout that gives lengths, block size, batch and heads.
    """
    row, step = lists.row_of_each(), blocks_at_once(like)
    chunks = zip(row.split(step), lists.indices.split(step))  # of nothing one chunk, of nothing
    return torch.cat([pack_bits(_evaluated(mask_mod, row, column, like)) for row, column in chunks])


def _evaluated(mask_mod: MaskMod, row: Tensor, column: Tensor, like: BlockLayout) -> Tensor:
    """`(blocks, block_q, block_kv)` bool of the blocks in these rows and columns."""
    device = like.device
    head, row = torch.div(row, max(like.rows, 1), rounding_mode="floor"), row % max(like.rows, 1)
    i = (row * like.block_q)[:, None, None] + torch.arange(like.block_q, device=device)[None, :, None]
    j = (column.long() * like.block_kv)[:, None, None] + torch.arange(like.block_kv, device=device)[None, None, :]
    b, h = torch.div(head, max(like.heads, 1), rounding_mode="floor")[:, None, None], (head % max(like.heads, 1))[:, None, None]
    exists = (i < like.q_len) & (j < like.kv_len)
    return _called(mask_mod, b, h, i.clamp(max=like.q_len - 1), j.clamp(max=like.kv_len - 1), exists.shape) & exists
