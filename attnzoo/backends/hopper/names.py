"""Gluon under one set of names: they move between Triton 3.6, 3.7 and 3.8, and the kernels import them from here.

`partition_barrier`: all threads of the calling partition meet.
`tma_load`, `tma_store`, `tma_add`: a tile from global to shared memory, back, and fp32 added to global memory.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "partition_barrier",
    "tma_add",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

partition_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # 3.6; 3.7
tma_store_wait = tma.store_wait
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # 3.8; 3.6
_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # 3.8; 3.6


@_core.builtin
def _tma_reduce_add(tensor_desc, coord, src, _semantic=None):
    """cp.reduce.async.bulk.tensor with add: in the compiler, but without a Python name before 3.8."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _tma_reduce_add


def _require_one_tile(tensor_desc, buffer):
    """Raise ValueError unless the descriptor's block is the buffer's tile: nobody else asks, and the copy would silently be another."""
    block, tile = [int(side) for side in tensor_desc.block_type.shape], [int(side) for side in buffer.shape]
    if block != [1] * (len(block) - len(tile)) + tile:
        raise ValueError(f"a descriptor of blocks {block} can't copy a tile {tile}")


@_core.builtin
def tma_load(tensor_desc, coord, barrier, result, _semantic=None):
    _require_one_tile(tensor_desc, result)
    _load(tensor_desc, coord, barrier, result, _semantic=_semantic)


@_core.builtin
def tma_store(tensor_desc, coord, src, _semantic=None):
    _require_one_tile(tensor_desc, src)
    _store(tensor_desc, coord, src, _semantic=_semantic)


@_core.builtin
def tma_add(tensor_desc, coord, src, _semantic=None):
    _require_one_tile(tensor_desc, src)
    _add(tensor_desc, coord, src, _semantic=_semantic)
