"""Host-side TMA descriptors: cheap to build, since a call builds up to nine."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.hopper.names import TensorDescriptor, gl

__all__ = ["aligned", "row_descriptor", "tile_descriptor"]

GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


class Descriptor(TensorDescriptor):
    """Gluon's, less the checks of its construction, which cost 3 us: `support` and `aligned` have made them."""

    def __post_init__(self) -> None:
        pass


@lru_cache
def _swizzled(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_DTYPES[dtype])


@lru_cache
def _unswizzled(rank: int) -> Any:
    return gl.NVMMASharedLayout(0, 32, rank=rank)


def tile_descriptor(tensor: Tensor, rows: int, columns: int) -> Descriptor:
    """Tiles of the last two dims of a 3-D or 4-D tensor, as `aligned` gives it."""
    return Descriptor(tensor, tensor.shape, *_tiles(tensor.shape, tensor.stride(), tensor.dtype, rows, columns))


@lru_cache(maxsize=1024)
def _tiles(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int, columns: int) -> tuple[Any, ...]:
    """Strides, block and layout of a descriptor. A dim of size 1 may carry any stride, also one that TMA does not take."""
    block = (1,) * (len(shape) - 2) + (rows, columns)
    taken = [16 if size == 1 else stride for size, stride in zip(shape, strides)]
    return [*taken[:-1], 1], block, _swizzled(block, dtype)


def row_descriptor(tensor: Tensor, columns: int) -> Descriptor:
    """Pieces of the rows of a contiguous 2-D fp32 tensor, read as vectors."""
    return Descriptor(tensor, tensor.shape, tensor.stride(), (1, columns), _unswizzled(2))


def aligned(tensor: Tensor) -> Tensor:
    """As TMA needs it: rows contiguous, base and strides multiples of 16 bytes, no overlap; a copy if it must be."""
    is_fine = tensor.data_ptr() % 16 == 0 and _are_taken(tensor.shape, tensor.stride(), 16 // tensor.element_size())
    return tensor if is_fine else tensor.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _are_taken(shape: tuple[int, ...], strides: tuple[int, ...], unit: int) -> bool:
    *outer, last = zip(shape, strides)
    return (last[1] == 1 or last[0] == 1) and all([size == 1 or (stride > 0 and stride % unit == 0) for size, stride in outer])
