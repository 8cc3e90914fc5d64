"""Both ways in which the Triton kernels of flash draw dropout, beside the contract's own; for Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.steps import dropout_pairs, dropout_tile
from attnzoo.dropout import dropout_keep, threshold

BATCH, HEAD = 1, 2


@triton.jit
def kept_kernel(narrow, wide, seed, bound, batch, head, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    dropout = (seed, bound, 1.0)
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    places = rows * COLUMNS + columns
    tl.store(narrow + places, dropout_pairs(dropout, batch, head, rows, first + columns))
    tl.store(wide + places, dropout_tile(dropout, batch, head, rows, first, COLUMNS, True))


def kept_elements(*, rows: int, columns: int, first: int, seed: int, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """What one Philox call a pair keeps, what one for four keys keeps, and what the contract says: bool `(rows, columns)`."""
    narrow, wide = torch.zeros(rows, columns, dtype=torch.bool), torch.zeros(rows, columns, dtype=torch.bool)
    seed_tensor = torch.tensor([seed])
    kept_kernel[(1,)](narrow, wide, seed_tensor, threshold(p), BATCH, HEAD, first, ROWS=rows, COLUMNS=columns)
    ranges = (range(BATCH, BATCH + 1), range(HEAD, HEAD + 1), range(rows), range(first, first + columns))
    return narrow, wide, dropout_keep(seed_tensor, p, *ranges)[0, 0]
