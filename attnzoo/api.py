"""attention(): describe the call, choose a backend, run it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from attnzoo import registry
from attnzoo.backend import Backend
from attnzoo.explanation import Explanation
from attnzoo.inputs import AttentionInputs
from attnzoo.layout import BlockLayout
from attnzoo.recent import described
from attnzoo.registry import AUTO
from attnzoo.spec import Align, AttentionSpec, Window
from attnzoo.tracing import constant_when_traced

__all__ = ["BoundBackend", "attention", "explain", "get", "names", "use"]

Choice = str | tuple[str, ...]

_preferred: ContextVar[Choice | None] = ContextVar("attnzoo_preferred_backend", default=None)
_entered = 0
_entered_lock = threading.Lock()
_any_use_active = False  # torch.compile guards on this plain bool; it can't read a ContextVar


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    align: Align | None = None,
    window: Window | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    layout: BlockLayout | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: Choice | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, `softmax(scale * q k^T + bias) v`, on the backend of your choice.

    Args:
        q: `(B, Hq, Sq, D)`, float16, bfloat16, float32 or float64; any strides.
        k: `(B, Hkv, Skv, D)`. `Hkv` divides `Hq`; query head h reads head `h // (Hq // Hkv)`.
        v: `(B, Hkv, Skv, Dv)`.
        causal: query i sees key j only if `j <= p(i)`.
        align: where the diagonal sits if `Sq != Skv`: "top_left", `p(i) = i`, or "bottom_right",
            `p(i) = i + Skv - Sq`. Needed there with causal or a bounded window.
        window: `(left, right)`, each a non-negative int or None: `p(i) - left <= j <= p(i) + right`.
        mask: bool, True = may attend; `(Sq, Skv)` or 4 dims, each 1 or full.
        bias: float, added to the scaled, soft-capped scores; shapes as for mask; differentiable.
        segment_ids: integers `(B, S)`, or a pair `((B, Sq), (B, Skv))`: attend only within equal ids.
        layout: compute only these blocks.
        scale: of the scores; default `D ** -0.5`.
        softcap: c > 0: scores become `c * tanh(scores / c)`, before bias.
        sinks: `(Hq,)` logits that join each row's denominator; differentiable.
        dropout_p: probability that an element of the softmax is dropped, 0 <= p < 1.
        dropout_seed: int or one-element int64 tensor; None draws it from the default generator.
        return_lse: also return the natural log-sum-exp of each row, differentiable.
        deterministic: two equal calls give equal bits, forward and backward.
        backend: a name, a tuple of names in order of preference, or None for the default of `use()`,
            else automatic choice.

    Returns:
        `o`, `(B, Hq, Sq, Dv)` in the dtype of q; with return_lse also the lse, `(B, Hq, Sq)`, fp32 (fp64 for
        fp64). A row that sees no key is 0, with lse -inf.

    Raises:
        TypeError, ValueError: a malformed call; the message names the argument.
        UnsupportedError: the backend can't serve this call; all its reasons are listed.
        UnknownBackendError: no such backend.
    """
    has_tensors = not (mask is None and bias is None and segment_ids is None and layout is None and sinks is None)
    is_ready = False
    if not has_tensors and dropout_seed is None and type(dropout_p) is float and dropout_p == 0.0:
        spec, is_ready = described(q, k, v, causal, align, window, scale, softcap, return_lse, deterministic)
    else:
        spec = AttentionSpec.of(
            q,
            k,
            v,
            causal=causal,
            align=align,
            window=window,
            mask=mask,
            bias=bias,
            segment_ids=segment_ids,
            layout=layout,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            return_lse=return_lse,
            deterministic=deterministic,
        )
    choice = _default_choice() if backend is None else backend
    _load(choice)
    chosen = registry.default().select(spec, choice)
    if is_ready:
        result = chosen.attend(spec, AttentionInputs.ready(q, k, v))
    else:
        inputs = AttentionInputs.of(
            spec, q, k, v, mask=mask, bias=bias, segment_ids=segment_ids, layout=layout, sinks=sinks, dropout_seed=dropout_seed
        )
        result = _attend_without_autocast(chosen, spec, inputs)
    if not _is_result(spec, result):
        raise RuntimeError(f"backend {chosen.name!r} returned {_fault(spec, result)}; this is its fault")
    return result if return_lse else result[0]  # type: ignore[return-value]


def _attend_without_autocast(backend: Backend, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """The inputs are cast: inside a backend nothing is cast again."""
    kind = spec.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return backend.attend(spec, inputs)
    return backend.attend(spec, inputs)


def _is_result(spec: AttentionSpec, result: object) -> bool:
    if type(result) is not tuple or len(result) != 2:
        return False
    o, lse = result
    if not isinstance(o, Tensor) or o.dtype != spec.dtype or o.shape != (spec.batch, spec.q_heads, spec.q_len, spec.value_dim):
        return False
    return not spec.return_lse or (isinstance(lse, Tensor) and lse.dtype == spec.accumulator_dtype and lse.shape == o.shape[:3])


def _described(result: object) -> str:
    if isinstance(result, Tensor):
        return f"a tensor {tuple(result.shape)} {result.dtype}"
    if isinstance(result, tuple):
        return f"({', '.join([_described(part) for part in result])})"
    return "None" if result is None else f"a {type(result).__name__}"


def _fault(spec: AttentionSpec, result: object) -> str:
    if isinstance(result, tuple) and len(result) == 2 and spec.return_lse and result[1] is None:
        return "no lse where return_lse=True"
    o = (spec.batch, spec.q_heads, spec.q_len, spec.value_dim)
    lse = f"a tensor {o[:3]} {spec.accumulator_dtype}" if spec.return_lse else "None"
    return f"{_described(result)} where (a tensor {o} {spec.dtype}, {lse}) is due"


class BoundBackend(Backend):
    """A backend in the public signature: call it as `attnzoo.attention`, less `backend`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.name = backend.name
        self.api_version = backend.api_version
        self.capabilities = backend.capabilities

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        return self.backend.unsupported_reasons(spec)

    def attend(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        return self.backend.attend(spec, inputs)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        """See `attnzoo.attention`."""
        if "backend" in options:
            raise TypeError(f"backend is {options['backend']!r}, but this is the backend {self.name!r} itself")
        return attention(q, k, v, backend=self.name, **options)


def get(name: str) -> BoundBackend:
    """The backend of that name, callable as `attention`, less `backend`.

    Succeeds for a backend that is known but can't run here; calling it then says why.

    Raises:
        UnknownBackendError: not installed, or its plugin failed to load.
    """
    return BoundBackend(registry.default().get(name))


def names() -> tuple[str, ...]:
    """Every known backend, sorted. Imports no plugin."""
    return registry.default().names()


def explain(q: Tensor, k: Tensor, v: Tensor, *, backend: Choice | None = None, **options: Any) -> Explanation:
    """Which backend `attention` would run with these arguments, why not the others, and the predicted cost.

    Asks every known backend, so it imports their plugins. Print the result, or take its `to_dict()`.
    """
    spec = AttentionSpec.of(q, k, v, **options)
    return Explanation.of(registry.default(), spec, _default_choice() if backend is None else backend)


@contextlib.contextmanager
def use(backend: Choice) -> Iterator[None]:
    """The default backend, or order of preference, within this context; threads and tasks keep their own.

    While any thread is inside, a call under torch.compile must name its backend, or raises RuntimeError.
    """
    known = registry.default()
    known.require_known(known.order(backend))
    token = _preferred.set(backend)
    _count_use(+1)
    try:
        yield
    finally:
        _count_use(-1)
        _preferred.reset(token)


def _count_use(change: int) -> None:
    global _entered, _any_use_active
    with _entered_lock:
        _entered += change
        _any_use_active = _entered > 0


def _default_choice() -> Choice:
    if torch.compiler.is_compiling():
        if _any_use_active:
            raise RuntimeError("while any thread is inside attnzoo.use(), a compiled call must name its backend: it can't see the context")
        return AUTO
    return _preferred.get() or AUTO


@constant_when_traced
def _load(choice: Choice) -> bool:
    """Import what stands behind a choice: here, outside of what torch.compile traces."""
    known = registry.default()
    known.load(known.order(choice))
    return True
