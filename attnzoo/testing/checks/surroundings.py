"""What a call may be wrapped in: autocast, torch.compile, vmap and the function transforms."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attnzoo
from attnzoo.testing.checks.accuracy import judge
from attnzoo.testing.failure import ConformanceError, NotApplicable, require
from attnzoo.testing.inputs import Call, make_call
from attnzoo.testing.oracle import Results
from attnzoo.testing.outcome import Outcome
from attnzoo.testing.problem import Problem
from attnzoo.testing.subject import Refused, Subject, gradients

__all__ = ["autocast", "compiled", "compiled_for_other_memory", "compiled_for_other_sizes", "function_transforms", "vmapped"]


def autocast(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Under autocast q, k and v, of mixed dtypes, are cast to the problem's; gradients come back in their own."""
    call = make_call(replace(problem, dtype="float32"), device)
    target = getattr(torch, problem.dtype)
    call = replace_v(call, call.v.detach().to(target).requires_grad_(call.v.requires_grad))
    with torch.autocast(device.type, dtype=target):
        o, lse = subject.forward(call)
    require(o.dtype == target, f"o has dtype {o.dtype} under autocast to {target}")
    grads = gradients(_with_gradient(call, make_call(problem, device).grad_o), o, lse)
    if "q" in grads:
        require(grads["q"].dtype == torch.float32, f"dq has dtype {grads['q'].dtype}; q has float32")
    rounded = {name: gradient.to(target) for name, gradient in grads.items()}
    judge(Results(o.detach(), None if lse is None else lse.detach(), rounded), problem, device)


def replace_v(call: Call, v: Tensor) -> Call:
    return Call(call.q, call.k, v, call.options, call.grads, call.grad_o, call.grad_lse)


def _with_gradient(call: Call, grad_o: Tensor | None) -> Call:
    return Call(call.q, call.k, call.v, call.options, call.grads, grad_o, call.grad_lse)


def compiled(subject: Subject, problem: Problem, device: torch.device) -> None:
    """torch.compile takes the call whole: right results, and o in the same memory order as in eager mode."""
    call = make_call(problem, device)
    eager, _ = subject.forward(call)
    function = _compile(subject, call, device)
    got = function(call.q, call.k, call.v)
    o, lse = got if isinstance(got, tuple) else (got, None)
    require(o.stride() == eager.stride(), f"compiled o has strides {o.stride()}, eager {eager.stride()}")
    judge(Results(o.detach(), None if lse is None else lse.detach(), gradients(call, o, lse)), problem, device)


def compiled_for_other_sizes(subject: Subject, problem: Problem, device: torch.device) -> None:
    """One compiled function, then batch 1 to 3, other lengths and more heads: right each time."""
    function = _compile(subject, make_call(problem, device), device)
    for batch, length, times in ((1, problem.q_len, 1), (3, problem.q_len, 1), (2, problem.q_len + 9, 1), (2, problem.q_len, 2)):
        part = replace(problem, batch=batch, q_len=length, q_heads=times * problem.q_heads, kv_heads=times * problem.k_heads)
        call = make_call(part, device)
        o = function(call.q, call.k, call.v)
        judge(Results(o.detach(), None, gradients(call, o, None)), part, device)


def compiled_for_other_memory(subject: Subject, problem: Problem, device: torch.device) -> None:
    """One compiled function, then tensors at odd addresses, of other strides as well, and the first ones again: right each time."""
    require(problem.mask is not None, "this check takes a problem with a mask")
    mask = replace(problem.mask, storage="step_dim")  # type: ignore[type-var]
    other = replace(problem, storage=("bshd", "slack", "last_dim"), mask=mask, offset=1)
    function = _compile(subject, make_call(problem, device), device)
    for part in (problem, replace(problem, offset=1), other, problem):
        call = make_call(part, device)
        o = function(call.q, call.k, call.v, mask=call.options["mask"])
        judge(Results(o.detach(), None, gradients(call, o, None)), part, device)


def _compile(subject: Subject, call: Call, device: torch.device) -> Any:
    """The public call as one full graph; on a CPU without code generation, so that no C++ compiler is needed."""
    if not subject.is_registered:
        raise NotApplicable("a compiled call names its backend, and this one is not installed")
    subject.forward(call)  # refusals are judged in eager mode
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor, **changed: Tensor) -> Any:
        return attnzoo.attention(q, k, v, backend=subject.name, **{**call.options, **changed})

    return torch.compile(attend, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")


def vmapped(subject: Subject, problem: Problem, device: torch.device) -> Outcome | None:
    """vmap over an extra dim: right, or a clear error, which is a refusal."""
    call = make_call(replace(problem, grads=()), device)
    expected = subject(call.q, call.k, call.v, **call.options)
    other = subject(call.q.flip(2), call.k, call.v.flip(2), **call.options)
    q, k, v = (torch.stack([t, t if t is call.k else t.flip(2)]) for t in (call.q, call.k, call.v))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return subject(q, k, v, **call.options)  # type: ignore[no-any-return]

    got, reasons = _attempt(lambda: torch.func.vmap(attend)(q, k, v), "vmap")
    if got is None:
        return Outcome("refused", reasons)
    require(got.shape == (2, *expected.shape), f"vmap gave shape {tuple(got.shape)}")
    judge(Results(got[0], None, {}), replace(problem, grads=()), device)
    distance = float((got[1] - other).abs().max())
    allowed = 16 * torch.finfo(other.dtype).eps * float(other.abs().max())
    require(distance <= allowed, f"vmap's second slice is off by {distance:.3e}, allowed {allowed:.3e}")
    return None


def function_transforms(subject: Subject, problem: Problem, device: torch.device) -> Outcome | None:
    """torch.func.grad and forward-mode jvp: right, or a clear error; two of these are a refusal."""
    call = make_call(problem, device)
    require(call.grad_o is not None and problem.grads == ("q", "k", "v"), "this check takes the gradients of q, k and v")
    plain = [leaf.detach() for leaf in (call.q, call.k, call.v)]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (subject(q, k, v, **call.options) * call.grad_o).sum()  # type: ignore[no-any-return]

    grads, no_grad = _attempt(lambda: torch.func.grad(loss, argnums=(0, 1, 2))(*plain), "torch.func.grad")
    if grads is not None:
        with torch.no_grad():
            o, _ = subject.forward(call)
        judge(Results(o, None, dict(zip("qkv", grads))), problem, device)
    directions = tuple(torch.ones_like(tensor) for tensor in plain)
    jvp = partial(torch.func.jvp, lambda *args: subject(*args, **call.options), tuple(plain), directions)
    pair, no_jvp = _attempt(jvp, "torch.func.jvp")
    if pair is not None:
        _judge_jvp(subject, call, pair[1], directions)
    return Outcome("refused", no_grad + no_jvp) if grads is None and pair is None else None


def _judge_jvp(subject: Subject, call: Call, derivative: Tensor, directions: tuple[Tensor, ...]) -> None:
    """<grad_o, J u> = <J^T grad_o, u>: forward mode against reverse mode."""
    results = subject.run(call)
    assert call.grad_o is not None
    forward = float((derivative.double() * call.grad_o.double()).sum())
    reverse = sum(float((results.grads[name].double() * u.double()).sum()) for name, u in zip("qkv", directions))
    size = sum(float(results.grads[name].double().abs().sum()) for name in "qkv")
    allowed = 16 * torch.finfo(derivative.dtype).eps * size
    require(abs(forward - reverse) <= allowed, f"jvp gives {forward:.6g}, the gradients {reverse:.6g}, allowed {allowed:.1e}")


def _attempt(function: Any, name: str) -> tuple[Any, tuple[str, ...]]:
    """The result, or None and the reason after a clear error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about its transforms
            return function(), ()
    except Refused:
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if len(str(error)) < 10:
            raise ConformanceError(f"{name} failed without a clear error: {error!r}") from error
        return None, (f"{name} raises a {type(error).__name__}",)
