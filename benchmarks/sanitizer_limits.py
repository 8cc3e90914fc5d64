"""A right kernel made of the parts of the Hopper kernels, for compute-sanitizer: what a tool reports of it says what the tool can't follow.

    compute-sanitizer --tool racecheck python benchmarks/sanitizer_limits.py

A producer warp copies tiles in with the bulk copy engine and notes in shared memory which tile it was. Two warpgroups, started by
Triton's warp specialisation, wait for it at an mbarrier, meet at a named barrier and copy the tile out. A plain kernel reads that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.hopper.barriers import barrier_arrive, barrier_sync
from attnzoo.backends.hopper.names import TensorDescriptor, gl, gluon, mbarrier, partition_barrier, tma_load, tma_store, tma_store_wait

TILES, ROWS, COLUMNS = 8, 128, 64
EMPTY = gl.constexpr(5)  # named barriers: the consumers have left the tile; both have read which one it is
READ = gl.constexpr(9)


@gluon.jit
def producer(source, tile, number, full, tiles: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in range(tiles):
        if i > 0:
            barrier_sync(EMPTY, 288)
        number.store(gl.full([1], 0, gl.int32, layout) + i)
        partition_barrier()
        mbarrier.expect(full, source.block_type.nbytes)
        tma_load(source, [i * tile.shape[0], 0], full, tile)
    barrier_sync(EMPTY, 288)


@gluon.jit
def consumer(WG: gl.constexpr, target, tile, number, full, tiles: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    HALF: gl.constexpr = tile.shape[0] // 2
    for i in range(tiles):
        mbarrier.wait(full, i & 1)
        which = gl.max(number.load(layout), 0)
        barrier_sync(READ, 256)
        tma_store(target, [which * tile.shape[0] + WG * HALF, 0], tile.slice(WG * HALF, HALF, 0))
        tma_store_wait(0)
        partition_barrier()
        barrier_arrive(EMPTY, 288)


@gluon.jit
def copy_tiles(source, target, tiles: gl.constexpr):
    tile = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    number = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    gl.warp_specialize(
        [
            (consumer, (gl.constexpr(0), target, tile, number, full, tiles)),
            (consumer, (gl.constexpr(1), target, tile, number, full, tiles)),
            (producer, (source, tile, number, full, tiles)),
        ],
        [4, 1],
        [64, 40],
    )


@triton.jit
def add_one(source, target, SIZE: tl.constexpr):
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(target + places, tl.load(source + places) + 1)


def described(tensor: Tensor, rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([rows, COLUMNS], gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor, [rows, COLUMNS], layout)


def main() -> None:
    source = torch.randn(TILES * ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
    copied, result = torch.empty_like(source), torch.empty_like(source)
    copy_tiles[(1,)](described(source, ROWS), described(copied, ROWS // 2), TILES, num_warps=4)
    add_one[(source.numel() // 1024,)](copied, result, 1024)
    if not torch.equal(result, source + 1):
        raise AssertionError("the kernel is wrong")
    print("right")


if __name__ == "__main__":
    main()
