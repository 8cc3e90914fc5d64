"""Backends that keep only o and lse and rebuild the probabilities in the backward: their autograd, in one place.

In eager mode an `autograd.Function`; under torch.compile two opaque operators, so that no tile loop is traced, as for kernels
wherever a mode or a tracer looks on. A second derivative, and gradients in a batch, go through `naive`, which may use
O(Sq * Skv) memory.
"""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.backend import Backend
from attnzoo.backends.naive import Naive
from attnzoo.backends.observers import are_in_a_batch, is_observed, reason_against_tracing, refuse_transforms
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

__all__ = ["KEEPING", "Gradients", "RecomputingBackend", "differentiable_gradients", "empty_output", "rows_contiguous"]


class Keeping(threading.local):
    """Whether a backend may keep device memory beyond its call.

    Not within an operator: under `torch.compile(mode="reduce-overhead")` it allocates from the pool of a CUDA graph, which
    accounts for everything that lives in it.
    """

    is_allowed = True


KEEPING = Keeping()


@dataclass(frozen=True, eq=False, slots=True)
class Gradients:
    """Gradients in the shapes and dtypes of their inputs; None for those that `spec.grads` does not name."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None


class RecomputingBackend(Backend):
    """Subclasses write a forward and a backward free of autograd; `attend` makes them differentiable.

    Attributes:
        reads_memory: whether kernels do the work, which nobody who looks on operators can follow.
    """

    reads_memory = False
    instances: dict[str, RecomputingBackend] = {}  # noqa: RUF012  how an operator, which takes no objects, finds its backend
    _count = itertools.count()

    def __init__(self) -> None:
        self._register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()  # a copy's key may be another's in the process that it comes to

    def _register(self) -> None:
        self.key = f"{self.name}#{next(self._count)}"
        self.instances[self.key] = self

    @abstractmethod
    def forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """`o` `(B, Hq, Sq, Dv)` in the spec's dtype and the natural-log lse `(B, Hq, Sq)`, fp32 (fp64 for fp64)."""

    @abstractmethod
    def backward(
        self,
        spec: AttentionSpec,
        inputs: AttentionInputs,
        o: Tensor,
        lse: Tensor,
        grad_o: Tensor,
        grad_lse: Tensor | None,
    ) -> Gradients:
        """The gradients that `spec.grads` names. `grad_o` may have any strides."""

    def attend(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        is_compiling = torch.compiler.is_compiling()
        if is_compiling:
            reason = reason_against_tracing()
            if reason:
                raise NotImplementedError(reason)
        else:
            refuse_transforms(inputs, self.reads_memory)
        if is_compiling or self.needs_operators(spec, *inputs.tensors()):
            from attnzoo.backends.operators import attend_compiled

            o, lse = attend_compiled(self.key, spec, inputs)
        elif spec.grads:
            tables = () if inputs.bias is None and inputs.sinks is None else (inputs.bias, inputs.sinks)
            call = (self, spec, inputs)  # one argument: torch looks at each
            o, lse = _RecomputedAttention.apply(call, inputs.q, inputs.k, inputs.v, *tables)  # type: ignore[no-untyped-call]
        else:
            o, lse = self.forward(spec, inputs)
        return o, (lse if spec.return_lse else None)

    def needs_operators(self, spec: AttentionSpec, *tensors: Tensor | None) -> bool:
        """Whether a call must go through the operators though nothing is compiled."""
        if self.reads_memory:
            return is_observed(*tensors)
        if spec.grads and torch._C._is_tracing():  # torch.jit.trace knows no autograd.Function
            return True
        return any([type(size) is not int for size in (spec.batch, spec.q_len, spec.kv_len)])  # a loop would be traced for one length


class _RecomputedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: tuple[RecomputingBackend, AttentionSpec, AttentionInputs], *_: Tensor | None) -> Any:
        backend, spec, inputs = call
        o, lse = backend.forward(spec, inputs)
        ctx.backend, ctx.spec, ctx.layout = backend, spec, inputs.layout
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs.tensors(), o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_lse: Tensor | None) -> Any:
        *tensors, o, lse = ctx.saved_tensors
        if ctx.layout is not None:
            ctx.layout.check_unmodified()
        inputs = AttentionInputs(*tensors, layout=ctx.layout)  # type: ignore[misc]
        if not torch.compiler.is_compiling():
            _check_saved(ctx.spec, inputs, o, lse)
        spec, inputs = _as_saved(ctx.spec, inputs)
        grad_o = torch.zeros_like(o) if grad_o is None else grad_o.resolve_neg()  # kernels read memory
        grad_lse = None if grad_lse is None else grad_lse.resolve_neg()
        with torch.autocast(o.device.type, enabled=False):
            if torch.is_grad_enabled() or are_in_a_batch(grad_o, grad_lse):  # create_graph=True, is_grads_batched=True
                grads = differentiable_gradients(spec, inputs, grad_o, grad_lse)
            elif torch.compiler.is_compiling() or ctx.backend.needs_operators(spec, *inputs.tensors(), o, lse, grad_o, grad_lse):
                from attnzoo.backends.operators import gradients_compiled

                grads = gradients_compiled(ctx.backend.key, spec, inputs, o, lse, grad_o, grad_lse)
            else:
                grads = ctx.backend.backward(spec, inputs, rows_contiguous(o), lse.contiguous(), grad_o, grad_lse)
        return (None, grads.q, grads.k, grads.v, grads.bias, grads.sinks)  # torch leaves out what is None at the end


def _check_saved(spec: AttentionSpec, inputs: AttentionInputs, o: Tensor, lse: Tensor) -> None:
    """Kernels were planned for tensors of the forward's dtypes and shapes: others would be read as these, without a word.

    Raises:
        TypeError: a hook on saved tensors gave back something else than it got.
    """
    queries, keys = (spec.batch, spec.q_heads, spec.q_len), (spec.batch, spec.kv_heads, spec.kv_len)
    saved = (
        ("q", inputs.q, spec.dtype, (*queries, spec.head_dim)),
        ("k", inputs.k, spec.dtype, (*keys, spec.head_dim)),
        ("v", inputs.v, spec.dtype, (*keys, spec.value_dim)),
        ("o", o, spec.dtype, (*queries, spec.value_dim)),
        ("the lse", lse, spec.accumulator_dtype, queries),
        ("mask", inputs.mask, torch.bool, spec.mask),
        ("bias", inputs.bias, spec.bias_dtype, spec.bias),
        ("q's segment_ids", inputs.q_segment_ids, None, queries[::2]),
        ("k's segment_ids", inputs.kv_segment_ids, None, keys[::2]),
        ("sinks", inputs.sinks, spec.sinks_dtype, queries[1:2]),
        ("dropout_seed", inputs.dropout_seed, torch.int64, (1,)),
    )
    for name, tensor, dtype, shape in saved:
        if tensor is not None and ((dtype or tensor.dtype) != tensor.dtype or tensor.shape != shape or tensor.device != spec.device):
            found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            packed = f"{dtype or tensor.dtype} {tuple(shape or ())} on {spec.device}"
            raise TypeError(f"a hook on saved tensors gave {name} back as {found}, it got {packed}: unpack must undo pack")


def _as_saved(spec: AttentionSpec, inputs: AttentionInputs) -> tuple[AttentionSpec, AttentionInputs]:
    """Spec and inputs for tensors that hooks on saved tensors, such as `save_on_cpu`, have given other strides."""
    q, k, v = [rows_contiguous(tensor) for tensor in (inputs.q, inputs.k, inputs.v)]
    sinks = None if inputs.sinks is None else inputs.sinks.contiguous()
    if q is not inputs.q or k is not inputs.k or v is not inputs.v or sinks is not inputs.sinks:
        inputs = replace(inputs, q=q, k=k, v=v, sinks=sinks)
    strides = (q.stride(), k.stride(), v.stride())
    return (spec if strides == spec.strides else replace(spec, strides=strides)), inputs


def rows_contiguous(tensor: Tensor) -> Tensor:
    """With neighbours in the last dim; a copy if it must be."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def differentiable_gradients(spec: AttentionSpec, inputs: AttentionInputs, grad_o: Tensor, grad_lse: Tensor | None) -> Gradients:
    """The gradients by torch's own operators: with grad mode on a graph that can be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # aliases, so that one tensor given as q and k and v gets three gradients and not their sum thrice
        aliases = {name: getattr(inputs, name).view_as(getattr(inputs, name)) for name in spec.grads}
        o, lse = Naive().attend(replace(spec, return_lse=True), replace(inputs, **aliases))
    outputs, upstream = ((o,), (grad_o,)) if lse is None or grad_lse is None else ((o, lse), (grad_o, grad_lse))
    wanted = tuple(aliases.values())
    found = torch.autograd.grad(outputs, wanted, upstream, create_graph=create_graph, materialize_grads=True)
    return Gradients(**dict(zip(spec.grads, found)))


def empty_output(spec: AttentionSpec, q: Tensor) -> Tensor:
    """Uninitialised `o`, `(B, Hq, Sq, Dv)`, in the memory order of q: heads inside the sequence if q has them so."""
    batch, heads, length, dim = spec.batch, spec.q_heads, spec.q_len, spec.value_dim
    _, head_stride, row_stride, _ = spec.strides[0]
    if heads > 1 and head_stride < row_stride:
        strides = (length * heads * dim, dim, heads * dim, 1)
        return torch.empty_strided((batch, heads, length, dim), strides, dtype=q.dtype, device=q.device)
    return q.new_empty(batch, heads, length, dim)
