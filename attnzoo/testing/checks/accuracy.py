"""accuracy: forward and gradients against the float64 truth, and the call left all else as it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from attnzoo.testing import oracle, yardstick
from attnzoo.testing.budget import assert_results_within_budget
from attnzoo.testing.checks.settings import generator_state, shared_settings
from attnzoo.testing.failure import require
from attnzoo.testing.inputs import Call, make_call
from attnzoo.testing.oracle import Results, Truth
from attnzoo.testing.problem import Problem
from attnzoo.testing.storage import bytes_of
from attnzoo.testing.subject import Subject

__all__ = ["accuracy", "judge", "known_results", "unchanged"]


def accuracy(subject: Subject, problem: Problem, device: torch.device) -> None:
    """One forward and backward, within the budget."""
    call = make_call(problem, device)
    with unchanged(call):
        results = subject.run(call)
    judge(results, problem, device)


def judge(results: Results, problem: Problem, device: torch.device) -> None:
    """Hold results to the truth of a problem."""
    truth, measured = known_results(problem, str(device))
    assert_results_within_budget(results, truth, measured, getattr(torch, problem.dtype))


@functools.lru_cache(maxsize=16)
def known_results(problem: Problem, device: str) -> tuple[Truth, Results]:
    """Truth and yardstick of a problem; kept for the next backend that is asked the same."""
    call = make_call(problem, device)
    with ieee_products():
        return oracle.solve(call), yardstick.solve(call)


@contextlib.contextmanager
def ieee_products() -> Iterator[None]:
    """fp32 products in fp32: a yardstick in TF32 would excuse anything."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@contextlib.contextmanager
def unchanged(call: Call) -> Iterator[None]:
    """Raise unless every input, its slack included, has the same bits and version afterwards, and the process its settings."""
    named, draws = call.tensors(), bool(call.options.get("dropout_p")) and "dropout_seed" not in call.options
    before: dict[str, tuple[Tensor, int]] = {name: (bytes_of(tensor), tensor._version) for name, tensor in named.items()}
    settings, generator = shared_settings(call.q.device), generator_state(call.q.device)
    yield
    for name, value in shared_settings(call.q.device).items():
        require(value == settings[name], f"the call changed {name} for the whole process: {settings[name]} before, {value} after")
    is_same = torch.equal(generator_state(call.q.device), generator)
    require(draws or is_same, "the call advanced the default generator, though it has no dropout, or has its seed")
    for name, tensor in named.items():
        bits, version = before[name]
        require(torch.equal(bytes_of(tensor), bits), f"{name} was written: its memory differs after the call")
        require(tensor._version == version, f"{name} was written in place: its version went from {version} to {tensor._version}")
