"""Tile sizes, warps and pipeline stages, by head dim, dtype and capability. Found offline, nothing is tuned at call time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

__all__ = ["INTERPRETER", "Tile", "tile_for"]

INTERPRETER = (0, 0)
"""The capability that stands for Triton's interpreter."""


@dataclass(frozen=True)
class Tile:
    """Queries and keys a tile, warps a program, stages of the pipeline that loads them."""

    block_m: int
    block_n: int
    warps: int
    stages: int

    @cached_property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "num_stages": self.stages}


# kernel -> {largest padded head dim: tile}; a bias makes a call a featured one, so that two tables have no backward_bias
HOPPER: dict[str, dict[int, Tile]] = {
    "forward": {64: Tile(64, 64, 4, 3), 128: Tile(128, 128, 8, 3), 256: Tile(128, 64, 8, 2)},
    "backward_keys": {64: Tile(64, 64, 4, 3), 128: Tile(64, 128, 8, 3), 256: Tile(32, 64, 8, 2)},
    "backward_queries": {64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 64, 8, 1)},
    "split": {64: Tile(16, 128, 4, 3), 128: Tile(16, 64, 4, 3), 256: Tile(16, 64, 4, 2)},
    "split_wide": {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 4, 3), 256: Tile(64, 64, 8, 2)},
}
AMPERE: dict[str, dict[int, Tile]] = {
    "forward": {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 4, 2)},
    "backward_keys": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 64, 8, 1)},
    "backward_queries": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 1)},
    "split": {64: Tile(16, 128, 4, 3), 128: Tile(16, 64, 4, 3), 256: Tile(16, 64, 4, 2)},
    "split_wide": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 4, 2)},
}
SMALL_MEMORY: dict[str, dict[int, Tile]] = {  # consumer cards: 99 KiB of shared memory a program
    "forward": {64: Tile(128, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 4, 1)},
    "backward_keys": {64: Tile(64, 64, 4, 1), 128: Tile(32, 64, 4, 1), 256: Tile(16, 32, 4, 1)},
    "backward_queries": {64: Tile(64, 64, 4, 1), 128: Tile(64, 32, 4, 1), 256: Tile(32, 16, 4, 1)},
    "backward_bias": {64: Tile(64, 64, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(32, 16, 4, 1)},
    "split": {64: Tile(16, 64, 4, 3), 128: Tile(16, 64, 4, 2), 256: Tile(16, 32, 4, 2)},
    "split_wide": {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(64, 16, 4, 1)},
}
FEATURED: dict[str, dict[int, Tile]] = {  # with mask, bias or dropout, whose tiles take shared memory and registers too
    "forward": {64: Tile(64, 64, 4, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 4, 1)},
    "backward_keys": {64: Tile(64, 64, 4, 2), 128: Tile(32, 64, 4, 2), 256: Tile(32, 64, 8, 1)},
    "backward_queries": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 8, 1)},
    "backward_bias": {64: Tile(64, 64, 4, 1), 128: Tile(64, 64, 4, 1), 256: Tile(32, 32, 4, 1)},
    "split": {64: Tile(16, 64, 4, 2), 128: Tile(16, 64, 4, 2), 256: Tile(16, 64, 4, 1)},
    "split_wide": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 1), 256: Tile(64, 32, 8, 1)},
}
FULL_PRECISION: dict[str, dict[int, Tile]] = {  # fp32 inputs, whose products don't run on tensor cores
    "forward": {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(16, 32, 4, 1)},
    "backward_keys": {64: Tile(32, 32, 4, 1), 128: Tile(16, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
    "backward_queries": {64: Tile(32, 32, 4, 1), 128: Tile(32, 16, 4, 1), 256: Tile(16, 16, 4, 1)},
    "backward_bias": {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
    "split": {64: Tile(16, 32, 4, 1), 128: Tile(16, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
    "split_wide": {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(16, 32, 4, 1)},
}
LARGE_MEMORY = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))  # 163 KiB and more of shared memory a program
SMALLEST = Tile(32, 16, 4, 1)  # for the interpreter: many tiles of a small problem


@lru_cache(maxsize=1024)
def tile_for(
    kernel: str, head_dim: int, value_dim: int, dtype: torch.dtype, capability: tuple[int, int], is_featured: bool = False
) -> Tile:
    """The tile of a kernel; `capability` as torch gives it, or INTERPRETER; featured is a mask, a bias or dropout."""
    if capability == INTERPRETER:
        return SMALLEST
    if dtype == torch.float32:
        table = FULL_PRECISION
    elif capability not in LARGE_MEMORY:
        table = SMALL_MEMORY
    elif is_featured:
        table = FEATURED
    else:
        table = AMPERE if capability[0] == 8 else HOPPER
    tiles = table[kernel]
    return next(tile for dim, tile in tiles.items() if max(head_dim, value_dim) <= dim)
