"""Sdpa: a backend over one or several of torch's kernels."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from attnzoo import AttentionInputs, AttentionSpec, Backend, Capabilities
from attnzoo_sdpa.convert import convert
from attnzoo_sdpa.kernels import Kernel

__all__ = ["Sdpa"]

_pinning = threading.Lock()  # torch's switches belong to the process: two threads must not pin at once


class Sdpa(Backend):
    """scaled_dot_product_attention, held to those of its kernels that can serve the call.

    Args:
        name: of the backend.
        kernels: torch chooses among those that can serve the call.
    """

    def __init__(self, name: str, kernels: tuple[Kernel, ...]) -> None:
        self.name = name
        self.kernels = kernels
        self.capabilities = union([kernel.capabilities for kernel in kernels])
        self.on_device = {
            device: union([kernel.capabilities for kernel in kernels if device in kernel.capabilities.devices])
            for device in self.capabilities.devices
        }

    def capabilities_on(self, device: str) -> Capabilities:
        return self.on_device.get(device, self.capabilities)

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        kernels = [kernel for kernel in self.kernels if kernel.serves_device(spec)]
        if not kernels:
            return self.capabilities.reasons_against(spec)
        reasons = []
        for kernel in kernels:
            found = kernel.reasons(spec)
            if not found:
                return []
            reasons += found if len(kernels) == 1 else [f"{kernel.label}: {reason}" for reason in found]
        return reasons

    def attend(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        able = [kernel for kernel in self.kernels if kernel.serves_device(spec) and not kernel.reasons(spec)]
        wants = able[0].wants(spec)
        arguments = convert(spec, inputs, wants)
        chosen = [kernel.backend for kernel in able if kernel.wants(spec) == wants]
        with contextlib.nullcontext() if torch.compiler.is_compiling() else _pinning, sdpa_kernel(chosen):
            return arguments.run(), None


def union(claims: list[Capabilities]) -> Capabilities:
    """What at least one of them claims; second derivatives only if all do, since torch chooses."""
    backward = frozenset[str]().union(*[claim.backward for claim in claims])
    if not all("double_backward" in claim.backward for claim in claims):
        backward -= {"double_backward"}
    return Capabilities(
        devices=frozenset[str]().union(*[claim.devices for claim in claims]),
        dtypes=frozenset[torch.dtype]().union(*[claim.dtypes for claim in claims]),
        head_dims=(min(claim.head_dims[0] for claim in claims), max(claim.head_dims[1] for claim in claims)),
        forward=frozenset[str]().union(*[claim.forward for claim in claims]),
        backward=backward,
        materializes_scores=all(claim.materializes_scores for claim in claims),
    )
