"""segment_bounds: smallest and largest segment id of every tile of 64 positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.launch import Kernel, Plan
from attnzoo.backends.triton.table import Tile
from attnzoo.backends.triton.tiles import SEGMENT_TILE


@triton.jit
def segment_bounds_kernel(ids, bounds_ptr, length):
    """`bounds[b, t] = (min, max)` of `ids[b, 64 t : 64 (t + 1)]`, by which walks leave out foreign tiles.

    Tensors: ids `(B, S)` any integers, bounds `(B, ceil(S / 64), 2)` int64. One program a tile.
    """
    ids_ptr, batch_stride, row_stride = ids
    tiles = tl.cdiv(length, SEGMENT_TILE)
    program = tl.program_id(0).to(tl.int64)
    batch = program // tiles
    rows = program % tiles * SEGMENT_TILE + tl.arange(0, SEGMENT_TILE)
    addresses = ids_ptr + batch * batch_stride + rows.to(tl.int64) * row_stride
    found = tl.load(addresses, mask=rows < length, other=0).to(tl.int64)
    tl.store(bounds_ptr + 2 * program, tl.min(tl.where(rows < length, found, 2**63 - 1), 0))
    tl.store(bounds_ptr + 2 * program + 1, tl.max(tl.where(rows < length, found, -(2**63)), 0))


KERNEL = Kernel(segment_bounds_kernel)
TILE = Tile(64, 64, 1, 1)


def segment_bounds(ids: Tensor, capability: tuple[int, int]) -> Tensor:
    """Bounds `(B, ceil(S / 64), 2)` of ids `(B, S)`, computed on their device."""
    batch, length = ids.shape
    tiles = -(-length // TILE.block_m)
    bounds = torch.empty(batch, tiles, 2, dtype=torch.int64, device=ids.device)
    plan = Plan(KERNEL, TILE, {}, (length,), batch * tiles, (ids.dtype,), capability, ids.device)
    plan.launch(((ids, *ids.stride()), bounds, length))
    return bounds
