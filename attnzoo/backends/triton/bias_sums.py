"""What a program of the gradient of a bias sums over, with and without a layout. How it masks what it stores is its own."""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.spec import AttentionSpec


def bias_walk(spec: AttentionSpec, tiles: tuple[int, int]) -> tuple[str | None, tuple[int, int, int, int]]:
    """SUMMED, and of how many batches, heads, tiles of rows and tiles of columns a program sums.

    Where rows or columns are one, a walk along them within one head keeps the card busy; heads and batches are summed after.
    """
    assert spec.bias is not None
    batch, heads, rows, columns = spec.bias
    row_tiles, column_tiles = tiles
    if columns == 1:
        return "columns", (1, 1, 1, column_tiles)
    if rows == 1:
        return "rows", (1, 1, row_tiles, 1)
    return None, (spec.batch // batch, spec.q_heads // heads, 1, 1)


def bias_programs(spec: AttentionSpec, tiles: tuple[int, int]) -> int:
    """How many programs share that sum."""
    batches, heads, row_tiles, column_tiles = bias_walk(spec, tiles)[1]
    return spec.batch // batches * (spec.q_heads // heads) * (tiles[0] // row_tiles) * (tiles[1] // column_tiles)


@triton.jit
def owned_sum(walk, row_programs, column_programs, q_heads):
    """First batch, head, tile of rows and tile of columns of a program; `walk` is how many of each it sums over."""
    walk_batches, walk_heads, walk_rows, walk_columns = walk
    program = tl.program_id(0)
    first_column = program % column_programs * walk_columns
    first_row = program // column_programs % row_programs * walk_rows
    owner = program // (column_programs * row_programs)
    head_programs = q_heads // walk_heads
    first_head = owner % head_programs * walk_heads
    return owner // head_programs * walk_batches, first_head, first_row, first_column


@triton.jit
def summand(first, walk, step):
    """Batch, head, tile of rows and tile of columns of a step of the walk from `first` on."""
    first_batch, first_head, first_row, first_column = first
    _, walk_heads, walk_rows, walk_columns = walk
    column_tile = first_column + step % walk_columns
    row_tile = first_row + step // walk_columns % walk_rows
    pair = step // (walk_columns * walk_rows)
    head = (first_head + pair % walk_heads).to(tl.int64)
    batch = (first_batch + pair // walk_heads).to(tl.int64)
    return batch, head, row_tile, column_tile


@triton.jit
def seen_in_band(is_seen, row, column, band, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`is_seen`, and whether the band leaves a pair of the tile from (row, column) on."""
    left, right, diagonal = band
    if left is not None:
        is_seen = is_seen & (column + BLOCK_N - 1 >= row + diagonal - left)
    if right is not None:
        is_seen = is_seen & (column <= row + BLOCK_M - 1 + diagonal + right)
    return is_seen
