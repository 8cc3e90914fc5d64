"""Seeded block layouts that hit a family of faults, made from the lists up where the kind asks for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.layout import BlockLayout, BlockLists, ElementRule
from attnzoo.testing.problem import Blocks, Problem

__all__ = ["LAYOUTS", "block_layout"]


def block_layout(problem: Problem, blocks: Blocks, rng: torch.Generator) -> BlockLayout:
    """The layout of a problem, on the CPU."""
    return LAYOUTS[blocks.kind](problem, blocks, rng)


def _heads(problem: Problem, blocks: Blocks) -> tuple[int, int]:
    return (problem.batch if blocks.dims[0] == "b" else 1), (problem.q_heads if blocks.dims[1] == "h" else 1)


def _grid(problem: Problem, blocks: Blocks) -> tuple[int, int, int, int]:
    """`(batch, heads, block rows, block columns)`."""
    block_q, block_kv = blocks.block
    return *_heads(problem, blocks), -(-problem.q_len // block_q), -(-problem.k_len // block_kv)


def _of_blocks(keep: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Problem, Blocks, torch.Generator], BlockLayout]:
    """Full blocks where `keep(noise, row, column)` holds."""

    def make(problem: Problem, blocks: Blocks, rng: torch.Generator) -> BlockLayout:
        grid = _grid(problem, blocks)
        noise = torch.rand(grid, generator=rng)
        rows, columns = torch.arange(grid[2])[:, None].expand(grid), torch.arange(grid[3]).expand(grid)
        table = keep(noise, rows, columns)
        return BlockLayout.from_blocks(table, block=blocks.block, q_len=problem.q_len, kv_len=problem.k_len)

    return make


def _of_pairs(keep: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Problem, Blocks, torch.Generator], BlockLayout]:
    """Full and partial blocks of the dense mask `keep(noise, i, j)`."""

    def make(problem: Problem, blocks: Blocks, rng: torch.Generator) -> BlockLayout:
        shape = (*_heads(problem, blocks), problem.q_len, problem.k_len)
        noise = torch.rand(shape, generator=rng)
        i, j = torch.arange(shape[2])[:, None].expand(shape), torch.arange(shape[3]).expand(shape)
        return BlockLayout.from_dense(keep(noise, i, j), block=blocks.block)

    return make


def _rule(problem: Problem, blocks: Blocks, partial: Tensor, full: Tensor, rule: ElementRule) -> BlockLayout:
    batch, heads = partial.shape[:2]
    return BlockLayout(
        q_len=problem.q_len,
        kv_len=problem.k_len,
        block_q=blocks.block[0],
        block_kv=blocks.block[1],
        full=BlockLists.from_bool(full.flatten(0, -2)),
        partial=BlockLists.from_bool(partial.flatten(0, -2)),
        rule=rule,
        batch=batch,
        heads=heads,
    )


def _all_partial(problem: Problem, blocks: Blocks, rng: torch.Generator) -> BlockLayout:
    """Every second block, all of them in the partial lists with every bit set: means the same as full."""
    grid = _grid(problem, blocks)
    table = (torch.arange(grid[2])[:, None] + torch.arange(grid[3])) % 2 == 0
    table = table.expand(grid).clone()
    words = -(-blocks.block[1] // 32)
    bits = torch.full((int(table.sum()), blocks.block[0], words), -1, dtype=torch.int32)
    return _rule(problem, blocks, table, torch.zeros_like(table), ElementRule(bits=bits))


def _band_rule(problem: Problem, blocks: Blocks, rng: torch.Generator) -> BlockLayout:
    """A causal window as a stored rule, with some blocks full in spite of it."""
    grid = _grid(problem, blocks)
    noise = torch.rand(grid, generator=rng)
    full = noise < 0.2
    return _rule(problem, blocks, (noise >= 0.2) & (noise < 0.8), full, ElementRule(band=(20, 0, problem.k_len - problem.q_len)))


def _segment_rule(problem: Problem, blocks: Blocks, rng: torch.Generator) -> BlockLayout:
    grid = _grid(problem, blocks)
    noise = torch.rand(grid, generator=rng)
    q_ids = (torch.arange(problem.q_len) // 13)[None].expand(grid[0], -1)
    kv_ids = (torch.arange(problem.k_len) // 13)[None].expand(grid[0], -1)
    return _rule(problem, blocks, noise < 0.7, noise > 0.85, ElementRule(segments=(q_ids.clone(), kv_ids.clone())))


LAYOUTS: dict[str, Callable[[Problem, Blocks, torch.Generator], BlockLayout]] = {
    "random": _of_blocks(lambda noise, row, column: noise < 0.5),
    "all": _of_blocks(lambda noise, row, column: torch.ones_like(noise, dtype=torch.bool)),
    "none": _of_blocks(lambda noise, row, column: torch.zeros_like(noise, dtype=torch.bool)),
    "diagonal": _of_blocks(lambda noise, row, column: row == column),
    "empty_rows": _of_blocks(lambda noise, row, column: (noise < 0.7) & (row % 2 == 0)),
    "empty_columns": _of_blocks(lambda noise, row, column: (noise < 0.7) & (column % 2 == 1)),
    "last_column": _of_blocks(lambda noise, row, column: column == column.amax() if column.numel() else column > 0),
    "causal": _of_pairs(lambda noise, i, j: j <= i),
    "causal_end": _of_pairs(lambda noise, i, j: j <= i + noise.shape[-1] - noise.shape[-2]),
    "window": _of_pairs(lambda noise, i, j: (j <= i) & (j >= i - 20)),
    "pairs": _of_pairs(lambda noise, i, j: (noise < 0.6) & ((i // 16 + j // 16) % 3 != 0)),
    "one_pair": _of_pairs(lambda noise, i, j: j == (5 * i + 2) % max(1, noise.shape[-1])),
    "all_partial": _all_partial,
    "band_rule": _band_rule,
    "segment_rule": _segment_rule,
}
"""Kind -> maker."""
