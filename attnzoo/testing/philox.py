"""The oracle's own Philox-4x32-10, in numpy's unsigned arithmetic, and its known answers."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["KNOWN_ANSWERS", "kept", "philox_4x32"]

Words = npt.NDArray[np.uint64]

KNOWN_ANSWERS: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
"""(counter, key, lanes), from the Random123 distribution."""

WORD = np.uint64(0xFFFFFFFF)
SHIFT = np.uint64(32)


def philox_4x32(counter: tuple[Words, ...], key: tuple[int, int]) -> tuple[Words, ...]:
    """Ten rounds of `(hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0))`."""
    x, y, z, w = counter
    low, high = key
    for turn in range(10):
        first = np.uint64((low + turn * 0x9E3779B9) % 2**32)
        second = np.uint64((high + turn * 0xBB67AE85) % 2**32)
        p = x * np.uint64(0xD2511F53)
        r = z * np.uint64(0xCD9E8D57)
        x, y, z, w = (r >> SHIFT) ^ y ^ first, r & WORD, (p >> SHIFT) ^ w ^ second, p & WORD
    return x, y, z, w


def kept(seed: int, p: float, batch: int, heads: int, q_len: int, k_len: int) -> npt.NDArray[np.bool_]:
    """`(batch, heads, q_len, k_len)`: True where dropout of probability p keeps the element."""
    seed %= 2**64
    b, h, i, j = np.ogrid[0:batch, 0:heads, 0:q_len, 0:k_len]
    counter = tuple(part.astype(np.uint64) for part in (j // 4, i, h, b))
    lanes = np.stack(np.broadcast_arrays(*philox_4x32(counter, (seed % 2**32, seed >> 32))))
    chosen = np.take_along_axis(lanes, np.broadcast_to(j % 4, lanes.shape[1:])[None], 0)[0]
    return np.asarray(chosen >= np.uint64(math.floor(p * 2**32)))
