"""What the Hopper kernels take, from metadata alone. Imports no triton."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from attnzoo.backends.hopper.tiles import head_dim_pieces
from attnzoo.spec import AttentionSpec
from attnzoo.tracing import constant_when_traced

__all__ = ["reasons_against"]

TRITONS = ("3.6",)  # Gluon moves between versions: those that the kernels have run under, not those that merely compile them
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (32, 256)  # below, half of a tile of 64 columns would be padding; of values too
BACKWARD_HEAD_DIM = 128  # beyond it dK and dV do not fit into the registers of two warpgroups
LONGEST_WITH_GRADIENT = 65535 // 2 * 128  # 65535 programs of 64 rows, on whole tiles of 128
SCALES = (2.0**-126, 2.0**127)  # times log2(e) neither 0 nor infinite in fp32: a masked score, -inf, must stay one
LONGEST = 2**29  # positions and their sums are int32 in the kernels


def reasons_against(spec: AttentionSpec) -> list[str]:
    """Why the Hopper kernels can't serve the call, each with what was found and what is taken; empty if they can.

    A base address that is no multiple of 16 bytes shows in no spec: `launch` copies such a tensor.
    """
    if spec.is_empty:
        return [*machine_reasons(spec.device), "the call has a size of zero, which the Hopper kernels don't take"]
    reasons = [*machine_reasons(spec.device), *_of_the_sizes(spec), *_of_the_strides(spec)]
    refused = [name for name, is_asked in _other_features(spec).items() if is_asked]
    if refused:
        reasons.append(f"the call has {', '.join(refused)}, which the Hopper kernels don't take")
    if spec.deterministic and spec.grads:
        reasons.append("deterministic=True with a gradient: the Hopper backward adds up dq in an order that varies")
    if not SCALES[0] <= spec.scale <= SCALES[1]:
        reasons.append(f"scale is {spec.scale}, the Hopper kernels take {SCALES[0]:.1e} to {SCALES[1]:.1e}")
    return reasons


@constant_when_traced
def machine_reasons(device: torch.device) -> list[str]:
    """Reasons that hold for every call on the device."""
    reasons = []
    if device.type != "cuda":
        reasons.append(f"device is {device}, the Hopper kernels take cuda")
    elif (capability := torch.cuda.get_device_capability(device)) != (9, 0):
        reasons.append(f"compute capability is {capability[0]}.{capability[1]}, the Hopper kernels take 9.0")
    found = _triton_version()
    if ".".join(found.split(".")[:2]) not in TRITONS:
        reasons.append(f"triton is {found}, the Hopper kernels have been run under {', '.join(TRITONS)}")
    return reasons


_found_triton: list[str] = []


def _triton_version() -> str:
    """Of the installed distribution, looked up once; triton itself is not imported."""
    if not _found_triton:
        try:
            _found_triton.append(version("triton"))
        except PackageNotFoundError:
            _found_triton.append("of unknown version")  # a build of another distribution's name, as nightly ones of torch
    return _found_triton[0]


def _other_features(spec: AttentionSpec) -> dict[str, bool]:
    return {
        "a mask": spec.mask is not None,
        "a bias": spec.bias is not None,
        "segment_ids": spec.segments,
        "a layout": spec.layout is not None,
        "softcap": spec.softcap is not None,
        "sinks": spec.sinks_dtype is not None,
        "dropout": spec.dropout_p > 0.0,
        f"value_dim {spec.value_dim} beside head_dim {spec.head_dim}": not _serves_value_dim(spec),
    }


def _serves_value_dim(spec: AttentionSpec) -> bool:
    """Forward, O is staged where Q was: its pieces must fit there, as 128 values beside a head dim of 192 do."""
    if spec.grads or spec.value_dim == spec.head_dim:
        return spec.value_dim == spec.head_dim
    if spec.value_dim < HEAD_DIMS[0] or spec.value_dim % 8:
        return False
    first, second = head_dim_pieces(spec.head_dim)
    value_first, value_second = head_dim_pieces(spec.value_dim)
    return first == value_first and value_second in (0, second)


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
    longest = max(spec.q_len, spec.kv_len)
    most = LONGEST_WITH_GRADIENT if spec.grads else LONGEST
    if longest > most:
        reasons.append(f"a length is {longest}, the Hopper kernels take at most {most}{' with a gradient' if spec.grads else ''}")
    return reasons


def _of_the_strides(spec: AttentionSpec) -> list[str]:
    """The copy engine takes strides in multiples of 16 bytes."""
    keys = (spec.batch, spec.kv_heads, spec.kv_len)
    reasons = []
    for name, shape, strides in zip("qkv", ((spec.batch, spec.q_heads, spec.q_len), keys, keys), spec.strides):
        if any([size > 1 and (stride <= 0 or stride % 8) for size, stride in zip(shape, strides)]):
            reasons.append(f"{name} has strides {strides}, the Hopper kernels take positive multiples of 8 before the last: .contiguous()")
    return reasons
