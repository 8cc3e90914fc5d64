"""Who else must see a call: torch.func and tangents, tracers and modes follow operators, and kernels only read memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnzoo.inputs import AttentionInputs
from attnzoo.tracing import constant_when_traced

__all__ = ["are_in_a_batch", "is_observed", "reason_against_tracing", "refuse_tangents", "refuse_transforms"]

TRANSFORMS = "torch.func's transforms (vmap, grad, jvp, ..) can't see into its kernels and tile loops: name backend='naive' under them"
NO_TORCH_DISPATCH = torch._C._disabled_torch_dispatch_impl


def refuse_transforms(inputs: AttentionInputs, reads_memory: bool) -> None:
    """A recomputing backend would see neither the batches of vmap nor the tangents of forward-mode differentiation.

    Args:
        reads_memory: what it allocates must be plain too, which nothing is while a transform is active.

    Raises:
        NotImplementedError: a transform has wrapped an input or, with reads_memory, is active; or an input carries a tangent.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        if reads_memory or any([tensor is not None and wrapped(tensor) for tensor in inputs.tensors()]):
            raise NotImplementedError(TRANSFORMS)
    refuse_tangents(inputs)


def refuse_tangents(inputs: AttentionInputs) -> None:
    """Raises NotImplementedError if q, k, v, bias or sinks carry a tangent."""
    if forward_ad._current_level < 0:
        return
    for name in ("q", "k", "v", "bias", "sinks"):
        tensor = getattr(inputs, name)
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{name} carries a tangent, and kernels have no forward-mode derivative: name backend='naive'")


@constant_when_traced
def reason_against_tracing() -> str:
    """Why torch.compile can't take a call here; empty if it can. It traces with tensors that don't tell what wraps them, and
    its operators would drop tangents without a word."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return TRANSFORMS
    if forward_ad._current_level >= 0:
        return "a level of forward-mode differentiation is active, and kernels have no derivative of that kind: name backend='naive'"
    return ""


def is_observed(*tensors: Tensor | None) -> bool:
    """Whether a kernel's work would go unseen: a tracer or a mode looks on, or a tensor has no memory of its own to read.

    Without memory are subclasses that answer operators themselves (fakes, wrappers) and torch's tensors of zeros.
    """
    if torch._C._is_tracing() or torch._C._len_torch_dispatch_stack():
        return True
    for tensor in tensors:
        if tensor is not None:
            kind = type(tensor)
            if (kind is not Tensor and kind.__torch_dispatch__ is not NO_TORCH_DISPATCH) or tensor._is_zerotensor():
                return True
    return False


def are_in_a_batch(*tensors: Tensor | None) -> bool:
    """Whether a tensor is one of vmap's, as gradients are under `is_grads_batched`."""
    return not torch.compiler.is_compiling() and any([tensor is not None and _is_batched(tensor) for tensor in tensors])


def _is_batched(tensor: Tensor) -> bool:
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
