"""copied: a copy of a tensor that torch.compile keeps, for kernels that can't read every address."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["copied"]


def copied(tensor: Tensor, *, keeps_order: bool = False) -> Tensor:
    """A copy at an address of its own, which is a multiple of 16 bytes; differentiable.

    Inductor takes a `clone()` whose strides are those of its source for nothing and drops it, with the address that the clone was
    made for: a kernel that loads 16 bytes at a time then reads elsewhere. A choice between a tensor and itself it computes. An operator
    of ours would do too, but not under forward-mode derivatives and `torch.func`.

    Args:
        tensor: of any shape, dtype and strides.
        keeps_order: the order of the dims in memory, instead of contiguous.
    """
    if not torch.compiler.is_compiling():
        return tensor.clone(memory_format=torch.preserve_format if keeps_order else torch.contiguous_format)
    copy = torch.where(tensor == tensor, tensor, tensor)
    return copy if keeps_order else copy.contiguous()
