"""merge: attention over the union of disjoint key sets, from the parts' outputs and log-sum-exps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["merge"]


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Combine results of `attention(..., return_lse=True)` over disjoint keys. Differentiable.

    Accumulates in fp32 (fp64 for fp64). At most one part may carry sinks; parts with dropout don't add up to
    the undivided call. Rows that are empty in every part give 0 and -inf. An lse is fp32: beyond 1e8, as under a bias of
    finfo.min, it no longer says how many keys a part saw, and parts count alike.

    Args:
        parts: `(o, lse)` pairs, `o (B, H, Sq, Dv)` of one dtype, `lse (B, H, Sq)`.

    Returns:
        `(o, lse)` of the union, in the dtypes of the parts.

    Raises:
        ValueError: no part, or shapes that differ. TypeError: a part that is not a pair of tensors.
    """
    outputs, lses = _checked(parts)
    accumulate = torch.float64 if outputs[0].dtype == torch.float64 else torch.float32
    lse = torch.stack(lses).to(accumulate)
    pivot = lse.detach().amax(0)
    pivot = pivot.masked_fill(pivot == -torch.inf, 0.0)  # a row that is empty everywhere would give nan
    weights = torch.exp(lse - pivot)
    total = weights.sum(0)
    is_empty = total == 0
    safe_total = total.masked_fill(is_empty, 1.0)
    weighted = torch.stack([o.to(accumulate) for o in outputs]) * (weights / safe_total)[..., None]
    merged_lse = (pivot + safe_total.log()).masked_fill(is_empty, -torch.inf)
    return weighted.sum(0).to(outputs[0].dtype), merged_lse.to(lses[0].dtype)


def _checked(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    if not isinstance(parts, Iterable):
        raise TypeError(f"parts is a {type(parts).__name__}; merge takes a sequence of (o, lse)")
    parts = list(parts)
    if not parts:
        raise ValueError("parts is empty; merge takes at least one (o, lse)")
    for place, part in enumerate(parts):
        _check_part(f"parts[{place}]", part)
        if _kind(part) != _kind(parts[0]):
            raise ValueError(f"parts[{place}] has {_kind(part)}, parts[0] has {_kind(parts[0])}; they need to be alike")
    return [o for o, _ in parts], [lse for _, lse in parts]


def _check_part(name: str, part: object) -> None:
    if not isinstance(part, (tuple, list)):
        raise TypeError(f"{name} is a {type(part).__name__}; it takes a pair of tensors (o, lse)")
    if len(part) != 2 or not all(isinstance(tensor, Tensor) for tensor in part):
        raise TypeError(f"{name} is a {type(part).__name__} of {len(part)}; it takes a pair of tensors (o, lse)")
    o, lse = part
    if not (o.is_floating_point() and lse.is_floating_point()):
        raise TypeError(f"{name} has {_kind(part)}; o and lse take float dtypes")
    if o.ndim != 4 or o.shape[:-1] != lse.shape:
        raise ValueError(f"{name} has o {tuple(o.shape)} and lse {tuple(lse.shape)}; they take (B, H, S, D) and (B, H, S)")
    if o.device != lse.device:
        raise ValueError(f"{name} has {_kind(part)}; they need one device")


def _kind(part: Sequence[Tensor]) -> str:
    """What the parts of one merge have in common."""
    o, lse = part
    return f"o {tuple(o.shape)} {o.dtype} on {o.device}, lse {lse.dtype} on {lse.device}"
