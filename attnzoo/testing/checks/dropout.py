"""Dropout by counter: which elements, whose generator, and the same again in the backward."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnzoo.testing.checks.accuracy import judge
from attnzoo.testing.checks.memory import same_bits
from attnzoo.testing.checks.settings import generator_state
from attnzoo.testing.failure import require
from attnzoo.testing.inputs import make_call
from attnzoo.testing.philox import kept
from attnzoo.testing.problem import Problem
from attnzoo.testing.subject import Subject

__all__ = [
    "checkpointed",
    "draws_nothing_at_zero",
    "draws_nothing_with_seed",
    "kept_elements",
    "seed_from_generator",
    "seed_of_either_type",
]


def kept_elements(subject: Subject, problem: Problem, device: torch.device) -> None:
    """With v the identity and equal scores, o shows which elements were kept: those of the contract's counter.

    Takes `head_dim == value_dim == kv_len`, values "zeros" for q and k.
    """
    require(problem.v_dim == problem.k_len and problem.dropout_p > 0, "this check takes value_dim == kv_len, and dropout")
    call = make_call(problem, device)
    q, k = torch.zeros_like(call.q.detach()), torch.zeros_like(call.k.detach())
    identity = torch.eye(problem.k_len, dtype=call.v.dtype, device=device).expand(call.v.shape).contiguous()
    o = subject(q, k, identity, **call.options)
    seed, p = problem.dropout_seed or 0, problem.dropout_p
    expected = torch.from_numpy(kept(seed, p, problem.batch, problem.q_heads, problem.q_len, problem.k_len)).to(device)
    wrong = (o != 0) != expected
    require(
        not bool(wrong.any()), f"{int(wrong.sum())} of {wrong.numel()} elements were kept or dropped against the contract's Philox counter"
    )
    height = 1 / (problem.k_len * (1 - p))
    off = float((o[expected].double() - height).abs().max()) if bool(expected.any()) else 0.0
    require(off <= 4 * torch.finfo(o.dtype).eps * height, f"kept elements are not scaled by 1 / (1 - p): off by {off:.3e} of {height:.3e}")


def draws_nothing_at_zero(subject: Subject, problem: Problem, device: torch.device) -> None:
    """p = 0 leaves the generator alone, and equals the call without dropout, bit for bit."""
    problem = replace(problem, dropout_p=0.0, dropout_seed=None)
    call = make_call(problem, device)
    before = generator_state(device)
    plain = subject.run(call)
    call.options.update(dropout_p=0.0)
    zero = subject.run(call)
    call.options.update(dropout_seed=3)
    seeded = subject.run(call)
    require(torch.equal(before, generator_state(device)), "a call without dropout advanced the default generator")
    judge(plain, problem, device)
    same_bits(plain, zero, "without dropout and with p = 0", with_grads=False)
    same_bits(plain, seeded, "without dropout and with p = 0 and a seed", with_grads=False)


def draws_nothing_with_seed(subject: Subject, problem: Problem, device: torch.device) -> None:
    """A seed that is given, as a number or a tensor, is all that dropout takes: the generator stays where it was."""
    before = generator_state(device)
    for as_tensor_seed in (False, True):
        call = make_call(replace(problem, as_tensor_seed=as_tensor_seed), device)
        judge(subject.run(call), problem, device)
        require(torch.equal(before, generator_state(device)), "dropout with a given seed advanced the default generator")


def seed_from_generator(subject: Subject, problem: Problem, device: torch.device) -> None:
    """No seed: drawn from the default generator, so manual_seed repeats a call and two calls in a row differ."""
    call = make_call(replace(problem, dropout_seed=None, as_tensor_seed=False), device)

    def draw() -> Tensor:
        with torch.no_grad():
            return subject.forward(call)[0]

    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(5)
        first, second = draw(), draw()
        torch.manual_seed(5)
        again = draw()
    require(torch.equal(first, again), "manual_seed does not repeat the dropout of a call without a seed")
    require(not torch.equal(first, second), "two calls without a seed dropped the same elements")


def seed_of_either_type(subject: Subject, problem: Problem, device: torch.device) -> None:
    """An int and a one-element int64 tensor mean the same; another seed means other elements."""
    problem = replace(problem, as_tensor_seed=False)
    number = subject.run(make_call(problem, device))
    tensor = subject.run(make_call(replace(problem, as_tensor_seed=True), device))
    judge(number, problem, device)
    judge(tensor, problem, device)
    other = subject.run(make_call(replace(problem, dropout_seed=(problem.dropout_seed or 0) + 1), device))
    require(not torch.equal(number.o, other.o), "another seed dropped the same elements")


def checkpointed(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Recomputed under activation checkpointing, dropout drops the same elements: gradients agree to the bit."""
    from torch.utils.checkpoint import checkpoint

    call = make_call(replace(problem, dropout_seed=None, as_tensor_seed=False), device)
    leaves = [call.q, call.k, call.v]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return subject(q, k, v, **call.options)  # type: ignore[no-any-return]

    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(11)
        plain = torch.autograd.grad(attend(*leaves), leaves, call.grad_o)
        torch.manual_seed(11)
        recomputed = torch.autograd.grad(checkpoint(attend, *leaves, use_reentrant=False), leaves, call.grad_o)
    for name, first, second in zip("qkv", plain, recomputed):
        size = float(first.abs().max())
        distance = float((first - second).abs().max())
        require(distance <= 16 * torch.finfo(first.dtype).eps * size, f"d{name} under checkpointing is off by {distance:.3e} of {size:.3e}")
