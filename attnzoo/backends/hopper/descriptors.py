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
    block = (1,) * (tensor.ndim - 2) + (rows, columns)
    # a dim of size 1 may carry any stride, also one that TMA does not take
    strides = [16 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride())]
    strides[-1] = 1
    return Descriptor(tensor, tensor.shape, strides, block, _swizzled(block, tensor.dtype))


def row_descriptor(tensor: Tensor, columns: int) -> Descriptor:
    """Pieces of the rows of a contiguous 2-D fp32 tensor, read as vectors."""
    return Descriptor(tensor, tensor.shape, tensor.stride(), (1, columns), _unswizzled(2))


def aligned(tensor: Tensor) -> Tensor:
    """As TMA needs it: rows contiguous, base and strides multiples of 16 bytes, no overlap; a copy if it must be."""
    unit = 16 // tensor.element_size()
    *strides, last = tensor.stride()
    is_fine = tensor.data_ptr() % 16 == 0 and (last == 1 or tensor.shape[-1] == 1)
    for size, stride in zip(tensor.shape, strides):
        is_fine = is_fine and (size == 1 or (stride > 0 and stride % unit == 0))
    return tensor if is_fine else tensor.clone(memory_format=torch.contiguous_format)
