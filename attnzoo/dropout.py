"""Which elements dropout drops: a pure function of the seed and the element's place (b, h, i, j).

Philox-4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in int64
arithmetic. Key: the 64-bit seed, low word first. Counter: (j // 4, i, h, b). Element j reads lane j % 4.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["dropout_keep", "philox", "threshold"]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW_WORD = 0xFFFFFFFF


def threshold(p: float) -> int:
    """Lanes below this drop their element."""
    return math.floor(p * 2**32)


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four lanes of 32 random bits in int64 tensors; key and counter words broadcast against one another."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # may wrap: only the bits count
        high0, high1 = (product0 >> 32) & LOW_WORD, (product1 >> 32) & LOW_WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & LOW_WORD, high0 ^ c3 ^ k1, product0 & LOW_WORD
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & LOW_WORD, (k1 + KEY_INCREMENTS[1]) & LOW_WORD
    return c0, c1, c2, c3


def dropout_keep(seed: Tensor, p: float, batch: range, heads: range, rows: range, columns: range) -> Tensor:
    """Bool `(len(batch), len(heads), len(rows), len(columns))`: True where the element is kept.

    Args:
        seed: one-element int64 tensor; its device is the result's.
        p: probability that an element is dropped, 0 <= p < 1.
        batch, heads, rows, columns: unit-step ranges of b, query head h, query i and key j.
    """

    def indices(start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, dtype=torch.int64, device=seed.device)

    seed = seed.reshape(())
    key = (seed & LOW_WORD, (seed >> 32) & LOW_WORD)
    first, last = columns.start // 4, -(-columns.stop // 4)  # one call serves four neighbouring keys
    counter = (
        indices(first, last)[None, None, None, :],
        indices(rows.start, rows.stop)[None, None, :, None],
        indices(heads.start, heads.stop)[None, :, None, None],
        indices(batch.start, batch.stop)[:, None, None, None],
    )
    bits = torch.stack(torch.broadcast_tensors(*philox(key, counter)), dim=-1).flatten(-2)
    return bits[..., columns.start - 4 * first : columns.stop - 4 * first] >= threshold(p)
