"""What the Hopper kernels take, from metadata alone. Imports no triton."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import torch

from attnzoo.backend import features_of
from attnzoo.spec import AttentionSpec

__all__ = ["reasons_against"]

TRITONS = ("3.6",)  # Gluon moves between versions: those that the kernels have run under, not those that merely compile them
DTYPES = (torch.float16, torch.bfloat16)
FEATURES = frozenset({"causal", "top_left", "bottom_right", "window", "lse", "grouped_heads", "deterministic"})
HEAD_DIMS = (32, 256)  # forward; below, half of a tile of 64 columns would be padding
BACKWARD_HEAD_DIM = 128  # beyond it dK and dV do not fit into two warpgroups' registers


@lru_cache
def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "missing"


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def reasons_against(spec: AttentionSpec) -> list[str]:
    """Why the Hopper kernels can't serve the call, each with what was found and what is taken; empty if they can."""
    reasons = [*_of_the_machine(spec.device), *_of_the_sizes(spec), *_of_the_strides(spec)]
    refused = [feature for feature in features_of(spec) if feature not in FEATURES]
    if refused:
        reasons.append(f"the call needs {', '.join(refused)}; the Hopper kernels take {', '.join(sorted(FEATURES))}")
    if spec.deterministic and spec.grads:
        reasons.append("deterministic=True with a gradient: the Hopper backward adds up dq in an order that varies")
    if spec.scale <= 0.0:
        reasons.append(f"scale is {spec.scale}, the Hopper kernels take a positive one")
    return reasons


def _of_the_machine(device: torch.device) -> list[str]:
    reasons = []
    if device.type != "cuda":
        reasons.append(f"device is {device}, the Hopper kernels take cuda")
    elif _capability(device) != (9, 0):
        reasons.append(f"compute capability is {'.'.join(map(str, _capability(device)))}, the Hopper kernels take 9.0")
    found = _triton_version()
    if not found.startswith(TRITONS):
        reasons.append(f"triton is {found}, the Hopper kernels have been run under {', '.join(TRITONS)}")
    return reasons


def _of_the_sizes(spec: AttentionSpec) -> list[str]:
    reasons = []
    if spec.dtype not in DTYPES:
        reasons.append(f"dtype is {spec.dtype}, the Hopper kernels take float16 and bfloat16")
    smallest, largest = HEAD_DIMS
    if spec.grads:
        largest = BACKWARD_HEAD_DIM
    if not smallest <= spec.head_dim <= largest or spec.head_dim % 8:
        with_gradient = " with a gradient" if spec.grads else ""
        reasons.append(f"head_dim is {spec.head_dim}, the Hopper kernels take multiples of 8 from {smallest} to {largest}{with_gradient}")
    return reasons


def _of_the_strides(spec: AttentionSpec) -> list[str]:
    """The copy engine takes strides in multiples of 16 bytes."""
    shapes = (
        (spec.batch, spec.q_heads, spec.q_len),
        (spec.batch, spec.kv_heads, spec.kv_len),
        (spec.batch, spec.kv_heads, spec.kv_len),
    )
    reasons = []
    for name, shape, strides in zip("qkv", shapes, spec.strides):
        if any(size > 1 and (stride <= 0 or stride % 8) for size, stride in zip(shape, strides)):
            reasons.append(f"{name} has strides {strides}, the Hopper kernels take positive multiples of 8 before the last; .contiguous() has them")
    return reasons
