"""The same call again: equal bits, another order of calls, other threads."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch

from attnzoo.testing.checks.accuracy import judge, known_results
from attnzoo.testing.checks.memory import same_bits
from attnzoo.testing.failure import ConformanceError
from attnzoo.testing.inputs import make_call
from attnzoo.testing.problem import Blocks, Problem, Segments, Sinks, Table
from attnzoo.testing.subject import Refused, Subject

__all__ = ["a_b_a", "changed_in_place", "equal_bits", "threads"]

REPEATS = 200
THREADS = 4


def equal_bits(subject: Subject, problem: Problem, device: torch.device) -> None:
    """`deterministic=True`: 200 equal calls give equal bits, forward and backward."""
    call = make_call(replace(problem, deterministic=True), device)
    first = subject.run(call)
    judge(first, problem, device)
    for _ in range(REPEATS - 1):
        same_bits(first, subject.run(call), "deterministic=True")


def a_b_a(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Call A, then each variation B in one thing, then A again: no cache forgets an option, a length or the strides.

    A refused variation is passed over.
    """
    call = make_call(problem, device)
    judge(subject.run(call), problem, device)
    for other in variations(problem):
        try:
            judge(subject.run(make_call(other, device)), other, device)
        except Refused:
            continue
        judge(subject.run(call), problem, device)


def variations(problem: Problem) -> list[Problem]:
    """The problem with one thing changed at a time; the rest stays, so that a cache may be tempted."""
    changes = [
        replace(problem, causal=not problem.causal),
        replace(problem, scale=0.7),
        replace(problem, scale=0.0),
        replace(problem, window=(3, 0)),
        replace(problem, window=(0, 3)),
        replace(problem, window=(0, 0)),
        replace(problem, softcap=2.0),
        replace(problem, dropout_p=0.3, dropout_seed=1),
        replace(problem, dropout_p=0.3, dropout_seed=2),
        replace(problem, dropout_p=0.5, dropout_seed=1),
        replace(problem, mask=Table("random")),
        replace(problem, mask=Table("random", "b11k")),
        replace(problem, bias=Table("random", "1hqk")),
        replace(problem, segments=Segments()),
        replace(problem, layout=Blocks("diagonal")),
        replace(problem, sinks=Sinks()),
        replace(problem, deterministic=True),
        replace(problem, storage=("bshd",) * 3, grad_storage="bshd"),
        replace(problem, q_len=problem.q_len + 1),
        replace(problem, q_len=2 * problem.q_len),
        replace(problem, return_lse=True),
        replace(problem, grads=()),
        replace(problem, grads=("v",)),
    ]
    return [change for change in changes if change != problem]


def changed_in_place(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Other numbers written into the tensors of a call, and the first ones again: nothing is known by its address.

    A layout is frozen, so it takes one that is the same for every seed.
    """
    other = replace(problem, seed=problem.seed + 1)
    if problem.segments is not None:
        other = replace(other, segments=replace(problem.segments, kind="interleaved"))
    if problem.dropout_seed is not None:
        other = replace(other, dropout_seed=problem.dropout_seed + 1)
    call = make_call(problem, device)
    for part in (problem, other, problem):
        with torch.no_grad():
            for name, tensor in make_call(part, device).tensors().items():
                if not name.startswith("layout"):
                    call.tensors()[name].copy_(tensor)
        judge(subject.run(call), part, device)


def threads(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Four threads start different calls at the same moment, on a cold cache where there is one."""
    parts = [replace(problem, seed=problem.seed + n, causal=n % 2 == 0, q_len=problem.q_len + n) for n in range(THREADS)]
    for part in parts:
        known_results(part, str(device))
    barrier, errors = threading.Barrier(THREADS), []

    def work(part: Problem) -> None:
        try:
            call = make_call(part, device)
            barrier.wait()
            for _ in range(3):
                judge(subject.run(call), part, device)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(part,), daemon=True) for part in parts]  # one that hangs must not keep the process
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise (
            errors[0] if isinstance(errors[0], (ConformanceError, NotImplementedError)) else ConformanceError(f"in a thread: {errors[0]!r}")
        )
