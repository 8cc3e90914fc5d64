"""What the measurements of backends on a GPU share: a call with its gradients, how wrong it is, and the tensors that are timed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.backend import Backend
from attnzoo.backends.flash import Flash
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

PORTABLE = Flash(kernels="portable")
TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TOKENS, WIDTH = 16384, 2048  # batch x length and heads x head dim of what is timed
EXTRAS = ("mask", "bias", "sinks", "segment_ids", "dropout_seed", "layout")


def attend(backend: Backend, tensors: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """o and lse by this backend.

    Raises:
        RuntimeError: it refuses the call.
    """
    arguments: dict[str, Any] = {**tensors, **options}
    spec = AttentionSpec.of(**arguments)
    extras = {name: value for name, value in arguments.items() if name in EXTRAS}
    reasons = backend.unsupported_reasons(spec)
    if reasons:
        raise RuntimeError(f"refused: {reasons}")
    return backend.attend(spec, AttentionInputs.of(spec, tensors["q"], tensors["k"], tensors["v"], **extras))


def values_and_grads(
    backend: Backend, tensors: dict[str, Tensor], options: dict[str, Any], upstream: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """o, lse and the gradients of every floating-point tensor; upstream: the gradients of o and lse."""
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    o, lse = attend(backend, leaves, {**options, "return_lse": True})
    assert lse is not None
    wanted = [t for t in leaves.values() if t.requires_grad]
    return [o, lse, *torch.autograd.grad([o, lse], wanted, [upstream[0].to(o.dtype), upstream[1]])]


def worst_error(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest of all differences, each over the largest true value of its tensor; infinite where an infinity or NaN is wrong."""
    worst = 0.0
    for one, other in zip(found, truth):
        one, other = one.float(), other.float()
        if not torch.equal(one.isneginf(), other.isneginf()):
            return float("inf")
        one, other = one.nan_to_num(neginf=0.0, nan=float("inf")), other.nan_to_num(neginf=0.0)
        if one.numel():
            worst = max(worst, ((one - other).abs().max() / other.abs().max().clamp(min=1e-2)).item())
    return worst


def require(error: float, allowed: float, what: str) -> None:
    """
    Raises:
        AssertionError: the error is larger, or NaN.
    """
    if not error <= allowed:
        raise AssertionError(f"{what}: error {error:.2e}, allowed {allowed:.0e}")


def qkv(batch: int, heads: int, length: int, dim: int) -> dict[str, Tensor]:
    """bf16 `(batch, heads, length, dim)`, views of `(batch, length, heads, dim)`."""
    return {n: torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for n in ("q", "k", "v")}


def flops(batch: int, heads: int, length: int, dim: int, causal: bool) -> float:
    """Of a forward: two products, without what causal hides."""
    return 4.0 * batch * heads * length * length * dim * (0.5 if causal else 1.0)
