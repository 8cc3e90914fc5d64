"""copied: a copy of a tensor that torch.compile keeps, for kernels that can't read every address."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["copied"]

_library = torch.library.Library("attnzoo", "FRAGMENT")
_library.define("copied(Tensor tensor, bool keeps_order) -> Tensor")


def copied(tensor: Tensor, *, keeps_order: bool = False) -> Tensor:
    """A copy at an address of its own, which is a multiple of 16 bytes; differentiable.

    Inductor takes a `clone()` whose strides are those of its source for nothing and drops it, with the address that the clone was
    made for: a kernel that loads 16 bytes at a time then reads elsewhere. An operator of ours is opaque to it.

    Args:
        tensor: of any shape, dtype and strides.
        keeps_order: the order of the dims in memory, instead of contiguous.
    """
    if torch.compiler.is_compiling():
        return torch.ops.attnzoo.copied(tensor, keeps_order)  # type: ignore[no-any-return]
    return _clone(tensor, keeps_order)


def _clone(tensor: Tensor, keeps_order: bool) -> Tensor:
    return tensor.clone(memory_format=torch.preserve_format if keeps_order else torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
    pass


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


_library.impl("copied", _clone, "CompositeExplicitAutograd")
torch.library.register_fake("attnzoo::copied", _clone, lib=_library)
torch.library.register_autograd("attnzoo::copied", _backward, setup_context=_save, lib=_library)
