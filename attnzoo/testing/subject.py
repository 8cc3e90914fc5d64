"""Subject: the backend under test, in the public signature, and one forward and backward through it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import attnzoo
from attnzoo.api import BoundBackend
from attnzoo.backend import Backend, Capabilities
from attnzoo.errors import UnsupportedError
from attnzoo.inputs import AttentionInputs
from attnzoo.registry import reasons_against
from attnzoo.spec import AttentionSpec
from attnzoo.testing.failure import ConformanceError, require
from attnzoo.testing.inputs import Call
from attnzoo.testing.oracle import Results

__all__ = ["Refused", "Subject"]


class Refused(UnsupportedError):  # noqa: N818 (a verdict, not a fault)
    """The subject's own refusal, made before `attend`; any other error out of `attend` is a failure."""

    def __init__(self, name: str, reasons: tuple[str, ...]) -> None:
        super().__init__({name: reasons})
        self.reasons = reasons

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (*self.rejected, self.reasons)


class Subject:
    """A backend, callable as `attnzoo.attention` less `backend`.

    Args:
        backend: the name of an installed one, a `Backend`, or what `attnzoo.get` returns. A `Backend` that is
            not installed is called as the registry would call it.
    """

    def __init__(self, backend: str | Backend) -> None:
        bound = attnzoo.get(backend) if isinstance(backend, str) else backend
        self.is_registered = isinstance(bound, BoundBackend)
        self.backend: Backend = bound.backend if isinstance(bound, BoundBackend) else bound
        self.name = self.backend.name
        self.capabilities = self.backend.capabilities

    def claims_on(self, device: str | torch.device) -> Capabilities:
        """What it claims there."""
        return self.backend.capabilities_on(torch.device(device).type)

    def spec(self, call: Call) -> AttentionSpec:
        """What the call asks."""
        return AttentionSpec.of(call.q, call.k, call.v, **call.options)

    def reasons(self, call: Call) -> tuple[str, ...]:
        """Why the backend refuses the call; empty if it doesn't."""
        return reasons_against(self.backend, self.spec(call))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """See `attnzoo.attention`. Raises Refused where the backend gives reasons."""
        if self.is_registered:
            try:
                return attnzoo.attention(q, k, v, backend=self.name, **options)
            except UnsupportedError as error:
                raise self._refusal(AttentionSpec.of(q, k, v, **options), error) from error
        spec = AttentionSpec.of(q, k, v, **options)
        reasons = reasons_against(self.backend, spec)
        if reasons:
            raise Refused(self.name, reasons)
        inputs = {name: options[name] for name in ("mask", "bias", "segment_ids", "layout", "sinks", "dropout_seed") if name in options}
        with _autocast_off(q):
            o, lse = self._attend(spec, AttentionInputs.of(spec, q, k, v, **inputs))
        return (o, lse) if spec.return_lse else o

    def _refusal(self, spec: AttentionSpec, error: UnsupportedError) -> Exception:
        """Refused, if the backend has reasons and the error gives them all; else what is wrong with the error."""
        reasons = reasons_against(self.backend, spec)
        if not reasons:
            return ConformanceError(f"attend refused a call that unsupported_reasons had accepted: {error}")
        if error.rejected != {self.name: reasons}:
            return ConformanceError(f"the error gives {dict(error.rejected)}, the reasons of {self.name} are {list(reasons)}")
        return Refused(self.name, reasons)

    def _attend(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        try:
            return self.backend.attend(spec, inputs)
        except UnsupportedError as error:
            raise ConformanceError(f"attend refused a call that unsupported_reasons had accepted: {error}") from error

    def forward(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """`(o, lse or None)`."""
        got = self(call.q, call.k, call.v, **call.options)
        if call.options.get("return_lse"):
            require(isinstance(got, tuple) and len(got) == 2, f"return_lse=True gave a {type(got).__name__}, not (o, lse)")
            require(isinstance(got[1], Tensor), f"return_lse=True gave a {type(got[1]).__name__} as lse, not a tensor")
            return got  # type: ignore[no-any-return]
        require(isinstance(got, Tensor), f"the call gave a {type(got).__name__}, not a tensor")
        return got, None

    def run(self, call: Call) -> Results:
        """Forward, and the gradients that the call asks for."""
        o, lse = self.forward(call)
        return Results(o.detach(), None if lse is None else lse.detach(), gradients(call, o, lse))


def gradients(call: Call, o: Tensor, lse: Tensor | None, *, retain_graph: bool = False) -> dict[str, Tensor]:
    """By name; raises ConformanceError where an output carries no gradient, or one has the wrong shape or dtype."""
    if not call.grads:
        require(not o.requires_grad and (lse is None or not lse.requires_grad), "an output requires a gradient, but no input does")
        return {}
    wanted = [(name, out, grad) for name, out, grad in (("o", o, call.grad_o), ("lse", lse, call.grad_lse)) if grad is not None]
    if set(call.grads) == {"v"}:  # the lse doesn't depend on v: it may carry no gradient, and gives none
        wanted = [part for part in wanted if part[0] == "o"]
    for name, out, grad in wanted:
        require(out is not None and out.requires_grad, f"{name} carries no gradient, but {', '.join(call.grads)} need one")
        require(out.shape == grad.shape, f"{name} has shape {tuple(out.shape)}; it is {tuple(grad.shape)}")  # type: ignore[union-attr]
        require(out.device == grad.device, f"{name} is on {out.device}; it is on {grad.device}")  # type: ignore[union-attr]
    leaves = [call.leaf(name) for name in call.grads]
    outputs, weights = [out for _, out, _ in wanted], [grad for _, _, grad in wanted]
    found: Sequence[Tensor | None] = [None for _ in leaves]
    if wanted:
        found = torch.autograd.grad(outputs, leaves, weights, allow_unused=True, retain_graph=retain_graph)  # type: ignore[arg-type]
    made = {}
    for name, leaf, gradient in zip(call.grads, leaves, found):
        gradient = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if gradient is None else gradient
        require(gradient.shape == leaf.shape, f"d{name} has shape {tuple(gradient.shape)}, {name} has {tuple(leaf.shape)}")
        require(gradient.dtype == leaf.dtype, f"d{name} has dtype {gradient.dtype}, {name} has {leaf.dtype}")
        made[name] = gradient.detach()
    return made


def _autocast_off(q: Tensor) -> contextlib.AbstractContextManager[Any]:
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        return torch.autocast(q.device.type, enabled=False)
    return contextlib.nullcontext()
