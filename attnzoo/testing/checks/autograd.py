"""The autograd contract: repeated, double, accumulated and unwanted backwards."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnzoo.testing import oracle, yardstick
from attnzoo.testing.budget import assert_results_within_budget
from attnzoo.testing.checks.accuracy import ieee_products, judge, unchanged
from attnzoo.testing.checks.memory import same_bits
from attnzoo.testing.failure import ConformanceError, require
from attnzoo.testing.inputs import Call, make_call
from attnzoo.testing.oracle import Results
from attnzoo.testing.problem import Problem
from attnzoo.testing.rules import allowed_pairs
from attnzoo.testing.subject import Subject, gradients

__all__ = [
    "accumulates",
    "backward_twice",
    "inference_mode",
    "linear_in_gradient",
    "no_grad",
    "shared_inputs",
    "stacked",
    "two_backwards",
    "written_in_between",
]


def backward_twice(subject: Subject, problem: Problem, device: torch.device) -> None:
    """A second backward through a retained graph agrees with the first, and writes neither outputs nor inputs."""
    call = make_call(problem, device)
    with unchanged(call):
        o, lse = subject.forward(call)
        kept = o.detach().clone()
        first = Results(kept, None, gradients(call, o, lse, retain_graph=True))
        copies = {name: gradient.clone() for name, gradient in first.grads.items()}
        second = Results(o.detach(), None, gradients(call, o, lse))
    require(torch.equal(kept, o.detach()), "o was written by the backward")
    for name, copy in copies.items():
        require(torch.equal(copy, first.grads[name]), f"the first d{name} was written by the second backward")
    judge(first, problem, device)
    judge(second, problem, device)
    if problem.deterministic:
        same_bits(first, second, "two backwards through one graph")


def two_backwards(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Two forwards, then their backwards in the reverse order: no call keeps state for the next."""
    other = replace(problem, seed=problem.seed + 1, scale=0.3)
    calls = [make_call(part, device) for part in (problem, other)]
    outputs = [subject.forward(call) for call in calls]
    for part, call, (o, lse) in reversed(list(zip((problem, other), calls, outputs))):
        judge(Results(o.detach(), None, gradients(call, o, lse)), part, device)


def accumulates(subject: Subject, problem: Problem, device: torch.device) -> None:
    """`.backward()` adds to `.grad`, which stays its own tensor, laid out as torch likes."""
    call = make_call(problem, device)
    for _ in range(2):
        o, _ = subject.forward(call)
        o.backward(call.grad_o)
    halves = {}
    for name in problem.grads:
        total = call.leaf(name).grad
        require(total is not None, f"{name}.grad is None after backward()")
        assert total is not None
        halves[name] = total / 2
    judge(Results(o.detach(), None, halves), problem, device)
    unwanted = [name for name in ("q", "k", "v") if name not in problem.grads and call.leaf(name).grad is not None]
    require(not unwanted, f"{', '.join(unwanted)} got a gradient that nobody asked for")


def linear_in_gradient(subject: Subject, problem: Problem, device: torch.device) -> None:
    """The upstream gradient counts: twice the gradient, twice the result, to the bit; zero gives zero."""
    call = make_call(problem, device)
    o, lse = subject.forward(call)
    require(lse is None, "this check takes a loss of o alone")
    assert call.grad_o is not None
    once = gradients(call, o, lse, retain_graph=True)
    for factor in (2.0, -1.0, 0.0):
        scaled = Call(call.q, call.k, call.v, call.options, call.grads, call.grad_o * factor, None)
        again = gradients(scaled, o, lse, retain_graph=True)
        for name, gradient in once.items():
            distance = float((again[name].double() - factor * gradient.double()).abs().max()) if gradient.numel() else 0.0
            size = float(gradient.abs().max()) if gradient.numel() else 0.0
            allowed = 4 * torch.finfo(gradient.dtype).eps * size * abs(factor) + torch.finfo(gradient.dtype).tiny
            require(distance <= allowed, f"d{name} of {factor} times the gradient is off by {distance:.3e}, allowed {allowed:.3e}")


def shared_inputs(subject: Subject, problem: Problem, device: torch.device) -> None:
    """One tensor as q and k, as k and v, and as all three: its gradient is the sum of those of separate tensors.

    Takes q, k and v of one shape, and rows that all see a key.
    """
    for names in (("q", "k"), ("k", "v"), ("q", "k", "v")):
        made = make_call(problem, device)
        one = made.leaf(names[0])
        apart = _with_inputs(made, {name: one.detach().clone().requires_grad_() for name in names}, problem.grads)
        shared = _with_inputs(made, dict.fromkeys(names, one), tuple([name for name in problem.grads if name not in names[1:]]))
        with ieee_products():
            truth, measured = oracle.solve(apart), yardstick.solve(apart)
        first, others = f"d{names[0]}", [f"d{name}" for name in names[1:]]
        amounts = dict(truth.amounts)
        amounts[first] = tuple(sum((amounts[other][n] for other in others), amounts[first][n]) for n in (0, 1))  # type: ignore[assignment]
        truth = replace(truth, results=_summed(truth.results, names), amounts=amounts)
        assert_results_within_budget(subject.run(shared), truth, _summed(measured, names), getattr(torch, problem.dtype))


def _with_inputs(call: Call, inputs: dict[str, Tensor], grads: tuple[str, ...]) -> Call:
    q, k, v = (inputs.get(name, call.leaf(name)) for name in ("q", "k", "v"))
    return replace(call, q=q, k=k, v=v, grads=grads)


def _summed(results: Results, names: tuple[str, ...]) -> Results:
    """The gradients of several tensors as that of the first."""
    grads = dict(results.grads)
    for name in names[1:]:
        grads[names[0]] = grads[names[0]] + grads.pop(name)
    return replace(results, grads=grads)


def no_grad(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Under no_grad nothing is recorded, though inputs require a gradient."""
    call = make_call(problem, device)
    with torch.no_grad():
        o, lse = subject.forward(call)
    require(not o.requires_grad and (lse is None or not lse.requires_grad), "o requires a gradient under no_grad")
    judge(Results(o, lse, {}), problem, device)


def inference_mode(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Inference tensors have no version counter; nothing may ask for one."""
    problem = replace(problem, grads=())
    with torch.inference_mode():
        o, lse = subject.forward(make_call(problem, device))
    judge(Results(o.clone(), None if lse is None else lse.clone(), {}), problem, device)


def stacked(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Two layers in a row over a padded batch: what rows without a key hold never reaches the others.

    0 * NaN is NaN, so one NaN in a padding row of the first layer spoils the second, and every gradient.
    """
    call = make_call(replace(problem, grads=()), device)
    real = allowed_pairs(call).any(-1).all(1)[:, None, :, None]  # (B, 1, S, 1)
    results = []
    for fill in (0.0, 3.0):
        x = torch.where(real, call.q, torch.full_like(call.q, fill)).detach().requires_grad_()
        hidden = subject(x, x, x, **call.options)
        out = subject(x + hidden, x + hidden, x + hidden, **call.options)
        (gradient,) = torch.autograd.grad(out.masked_fill(~real, 0.0).float().sum(), x)
        for name, tensor in (("the second layer", out), ("the gradient", gradient)):
            require(bool(tensor.isfinite().all()), f"{name} is not finite")
        results.append((out.detach(), gradient))
    for first, second in zip(*results):
        distance = (first - second).masked_fill(~real, 0.0).abs().max()
        allowed = 64 * torch.finfo(first.dtype).eps * float(first.abs().max())
        require(float(distance) <= allowed, f"real rows depend on the content of padding rows, by {float(distance):.3e}")


def written_in_between(subject: Subject, problem: Problem, device: torch.device) -> None:
    """What the caller writes between forward and backward, into inputs or outputs, makes the backward raise, or no difference."""
    call = make_call(problem, device)
    judge(subject.run(call), problem, device)
    for name in [name for name in (*call.tensors(), "o", "lse") if not name.startswith("the gradient")]:
        call = make_call(problem, device)
        o, lse = subject.forward(call)
        kept = Results(o.detach().clone(), None, {})
        written = {**call.tensors(), "o": o, "lse": lse}[name]
        if written is None:
            continue
        with torch.no_grad():
            written.zero_()
        try:
            grads = gradients(call, o, lse)
        except RuntimeError as error:
            require("modified" in str(error), f"{name} was written before the backward, whose error does not say so: {error}")
            continue
        try:
            judge(replace(kept, grads=grads), problem, device)
        except ConformanceError as error:
            raise ConformanceError(f"{name} was written between forward and backward, which went on with that: {error}") from error
