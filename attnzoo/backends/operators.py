"""The opaque operators that stand for a recomputing backend under torch.compile.

`attnzoo::forward` and `attnzoo::backward` take the tensors and options of one call and the key of the backend.
Their fakes give the true strides: o in the memory order of q, gradients as `empty_like` of their inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.observers import are_in_a_batch, refuse_tangents
from attnzoo.backends.recompute import (
    KEEPING,
    Gradients,
    RecomputingBackend,
    differentiable_gradients,
    empty_output,
    rows_contiguous,
)
from attnzoo.inputs import AttentionInputs
from attnzoo.layout import BlockLayout
from attnzoo.spec import AttentionSpec

__all__ = ["attend_compiled"]

TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? q_ids, Tensor? kv_ids, Tensor? sinks, Tensor? seed"
OPTIONS = (
    "Tensor[] layout, str layout_facts, str key, bool causal, str? align, int? left, int? right, "
    "float scale, float? softcap, float dropout_p, bool deterministic, str grads"
)

_library = torch.library.Library("attnzoo", "DEF")
_library.define(f"forward({TENSORS}, {OPTIONS}) -> (Tensor, Tensor)")
_library.define(f"backward(Tensor o, Tensor lse, Tensor grad_o, Tensor? grad_lse, {TENSORS}, {OPTIONS}) -> Tensor[]")

N_TENSORS = 9


def attend_compiled(key: str, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """`o` and lse through the operators; traceable, differentiable."""
    return torch.ops.attnzoo.forward(*_packed(key, spec, inputs))  # type: ignore[no-any-return]


def gradients_compiled(
    key: str, spec: AttentionSpec, inputs: AttentionInputs, o: Tensor, lse: Tensor, grad_o: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """The gradients through the operators, of a forward that ran without them."""
    found = torch.ops.attnzoo.backward(o, lse, grad_o, grad_lse, *_packed(key, spec, inputs))
    return Gradients(**dict(zip(spec.grads, found)))


def _packed(key: str, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Any, ...]:
    """The arguments of the operators."""
    layout, layout_facts = ([], "") if inputs.layout is None else (inputs.layout.tensors(), inputs.layout.facts)
    left, right = spec.window or (None, None)
    return (
        *inputs.tensors(),
        layout,
        layout_facts,
        key,
        spec.causal,
        spec.align,
        left,
        right,
        spec.scale,
        spec.softcap,
        spec.dropout_p,
        spec.deterministic,
        ",".join(spec.grads),
    )


def _unpack(arguments: tuple[Any, ...]) -> tuple[RecomputingBackend, AttentionSpec, AttentionInputs]:
    """What `_packed` packed; a compiler may have given the tensors other strides since."""
    q, k, v, mask, bias, q_ids, kv_ids, sinks, seed = arguments[:N_TENSORS]
    layout_tensors, layout_facts, key, causal, align, left, right, scale, softcap, dropout_p, deterministic, grads = arguments[N_TENSORS:]
    layout = BlockLayout.restored(layout_tensors, layout_facts) if layout_facts else None
    segment_ids = None if q_ids is None else (q_ids, kv_ids)
    with torch.autocast(q.device.type, enabled=False), torch.no_grad():
        spec = AttentionSpec.of(
            q,
            k,
            v,
            causal=causal,
            align=align,
            window=None if left is None and right is None else (left, right),
            mask=mask,
            bias=bias,
            segment_ids=segment_ids,
            layout=layout,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout_p=dropout_p,
            dropout_seed=seed,
            return_lse=True,
            deterministic=deterministic,
        )
    inputs = AttentionInputs.of(spec, q, k, v, mask=mask, bias=bias, segment_ids=segment_ids, layout=layout, sinks=sinks, dropout_seed=seed)
    return _backend_of(key), replace(spec, grads=tuple(grads.split(",")) if grads else ()), inputs


def _backend_of(key: str) -> RecomputingBackend:
    found = RecomputingBackend.instances.get(key)
    if found is None:
        name, known = key.partition("#")[0], ", ".join(RecomputingBackend.instances) or "none"
        raise LookupError(
            f"no backend {key!r} in this process, there is {known}: a program that another one exported runs where the same backends "
            f"were made, the built-in ones first: call attnzoo.get({name!r}) before anything else"
        )
    return found


def _with_strides_of(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor if tensor.stride() == like.stride() else like.copy_(tensor)


@contextmanager
def _ready(inputs: AttentionInputs) -> Iterator[None]:
    """What holds while an operator runs: the layout as it was validated, no autocast, no memory kept."""
    if inputs.layout is not None:
        BlockLayout.check_owner(inputs.layout.tensors())
    with torch.autocast(inputs.q.device.type, enabled=False), _keeping_nothing():
        yield


@contextmanager
def _keeping_nothing() -> Iterator[None]:
    before, KEEPING.is_allowed = KEEPING.is_allowed, False
    try:
        yield
    finally:
        KEEPING.is_allowed = before


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    backend, spec, inputs = _unpack(arguments)
    refuse_tangents(inputs)
    with _ready(inputs):
        o, lse = backend.forward(spec, inputs)
    return _with_strides_of(o, empty_output(spec, inputs.q)), lse.contiguous()


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    _, spec, inputs = _unpack(arguments)
    lse = inputs.q.new_empty(spec.batch, spec.q_heads, spec.q_len, dtype=spec.accumulator_dtype)
    return empty_output(spec, inputs.q), lse


def _backward(o: Tensor, lse: Tensor, grad_o: Tensor, grad_lse: Tensor | None, *arguments: Any) -> list[Tensor]:
    backend, spec, inputs = _unpack(arguments)
    with _ready(inputs):
        grads = backend.backward(spec, inputs, rows_contiguous(o), lse.contiguous(), grad_o, grad_lse)
    return [_with_strides_of(getattr(grads, name), torch.empty_like(getattr(inputs, name))) for name in spec.grads]


def _backward_fake(o: Tensor, lse: Tensor, grad_o: Tensor, grad_lse: Tensor | None, *arguments: Any) -> list[Tensor]:
    _, spec, inputs = _unpack(arguments)
    return [torch.empty_like(getattr(inputs, name)) for name in spec.grads]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    layout = inputs[N_TENSORS]
    ctx.save_for_backward(*output, *inputs[:N_TENSORS], *layout)
    ctx.options = inputs[N_TENSORS + 1 :]


def _differentiate(ctx: Any, grad_o: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    o, lse, *tensors = ctx.saved_tensors
    if grad_o is None:
        grad_o = torch.zeros_like(o)
    arguments = (*tensors[:N_TENSORS], list(tensors[N_TENSORS:]), *ctx.options)
    if torch.is_grad_enabled() or are_in_a_batch(grad_o, grad_lse):  # create_graph=True, is_grads_batched=True
        found = _differentiable(arguments, grad_o, grad_lse)
    else:
        found = torch.ops.attnzoo.backward(o, lse, grad_o, grad_lse, *arguments)
    grads = dict(zip(ctx.options[-1].split(","), found))
    places = ("q", "k", "v", None, "bias", None, None, "sinks", None)
    no_layout_grads = [None] * (len(tensors) - N_TENSORS)
    return (*[grads.get(place or "") for place in places], no_layout_grads, *[None] * len(ctx.options))


def _differentiable(arguments: tuple[Any, ...], grad_o: Tensor, grad_lse: Tensor | None) -> list[Tensor]:
    _, spec, inputs = _unpack(arguments)
    if inputs.layout is not None:
        BlockLayout.check_owner(inputs.layout.tensors())
    with torch.autocast(grad_o.device.type, enabled=False):
        grads = differentiable_gradients(spec, inputs, grad_o, grad_lse)
    return [getattr(grads, name) for name in spec.grads]


def _refuse_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError("attnzoo::backward has no derivative: a second one needs create_graph=True in eager mode, or backend='naive'")


for _name, _kernel, _fake in (("forward", _forward, _forward_fake), ("backward", _backward, _backward_fake)):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attnzoo::{_name}", _fake, lib=_library)
torch.library.register_autograd("attnzoo::forward", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("attnzoo::backward", _refuse_second_derivative, lib=_library)
