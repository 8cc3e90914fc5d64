"""What only a GPU can show: graph capture, streams, a second device, tensors beyond 2^31 elements."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from attnzoo.testing import oracle, yardstick
from attnzoo.testing.budget import assert_within_budget
from attnzoo.testing.checks.accuracy import ieee_products, judge, known_results
from attnzoo.testing.failure import NotApplicable, require
from attnzoo.testing.inputs import Call, make_call
from attnzoo.testing.oracle import Results
from attnzoo.testing.problem import Problem
from attnzoo.testing.subject import Subject, gradients

__all__ = ["graph_capture", "last_rows", "second_device", "side_stream", "tf32"]

TAIL = 32
BYTES_A_PAIR = 3  # the mask, and while it is made
BYTES_A_SCORE = 40  # scores, probabilities and their gradients, in fp32
TF32_EPSILON = 2.0**-10


def graph_capture(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Captured once, replayed on other data: right, forward and backward."""
    other = replace(problem, seed=problem.seed + 1)
    call, fresh = make_call(problem, device), make_call(other, device)
    with side_stream_of(device):
        subject.run(call)  # compiles, tunes
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = subject.run(call)
    graph.replay()
    judge(results, problem, device)
    with torch.no_grad():
        for name, tensor in call.tensors().items():
            if not name.startswith("layout"):  # the same for both, and not to be written
                tensor.copy_(fresh.tensors()[name])
    graph.replay()
    judge(results, other, device)


@contextlib.contextmanager
def side_stream_of(device: torch.device) -> Iterator[None]:
    """A stream beside the current one, which it waits for.

    The host waits for it at the end, also where the backend refuses: what it is still to write lies in memory of the current
    stream, which would go to the next case.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


def side_stream(subject: Subject, problem: Problem, device: torch.device) -> None:
    """On a side stream, behind a slow producer of q: nothing runs ahead of it, nothing is freed under it."""
    call = make_call(problem, device)
    values = call.q.detach().clone()
    with torch.no_grad():
        call.q.fill_(torch.nan)
    with side_stream_of(device):
        torch.cuda._sleep(20_000_000)
        with torch.no_grad():
            call.q.copy_(values)
        results = subject.run(call)
        churn = [torch.full((2**16,), torch.nan, device=device) for _ in range(8)]
    del churn
    judge(results, problem, device)


def tf32(subject: Subject, problem: Problem, device: torch.device) -> None:
    """fp32 products in TF32 where torch is told so, and in fp32 again afterwards."""
    call = make_call(problem, device)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        coarse = subject.run(call)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    truth, _ = known_results(problem, str(device))
    for name, value in coarse.named().items():
        error = float((value.double() - truth.results.named()[name]).abs().max())
        allowed = 8 * TF32_EPSILON * float(truth.amounts[name][1].max())
        require(math.isfinite(allowed), f"{name}: the amounts of the oracle are not finite, so this case judges nothing")
        require(error <= allowed, f"{name} in TF32: max|err| is {error:.3e}, allowed {allowed:.3e}")
    judge(subject.run(call), problem, device)


def second_device(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Tensors on cuda:1 while cuda:0 is current: right, and the current device stays."""
    if torch.cuda.device_count() < 2:
        raise NotApplicable("needs two GPUs")
    torch.cuda.set_device(0)
    there = torch.device("cuda:1")
    call = make_call(problem, there)
    results = subject.run(call)
    require(torch.cuda.current_device() == 0, "the call changed the current device")
    require(results.o.device == there, f"o is on {results.o.device}, q on {there}")
    judge(results, problem, there)


def last_rows(subject: Subject, problem: Problem, device: torch.device) -> None:
    """A table of more than 2^31 elements: the last rows, which a 32-bit offset gets wrong, against the truth.

    Takes one head and a long q; builds its own mask, since the kit's would be drawn on the CPU.
    """
    scores = problem.batch * problem.q_heads * problem.q_len * problem.k_len
    needed = scores * (BYTES_A_SCORE if subject.claims_on(device).materializes_scores else BYTES_A_PAIR)
    free, _ = torch.cuda.mem_get_info(device)
    if free < needed:
        raise NotApplicable(f"needs {needed / 2**30:.0f} GiB of free GPU memory")
    call = make_call(replace(problem, mask=None), device)
    rows = torch.arange(problem.q_len, device=device)
    shape = (problem.batch, problem.q_heads, problem.q_len, problem.k_len)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    for keys in range(0, problem.k_len, 2**12):  # asymmetric, and different in every row
        column = torch.arange(keys, min(keys + 2**12, problem.k_len), device=device)
        mask[..., keys : keys + 2**12] = (rows[:, None] * 7 + column[None, :] * 3) % 11 < 2
    o, _ = subject.forward(Call(call.q, call.k, call.v, {**call.options, "mask": mask}, call.grads, call.grad_o, None))
    tail = slice(problem.q_len - TAIL, problem.q_len)
    grad_o = torch.zeros_like(o)
    assert call.grad_o is not None
    grad_o[:, :, tail] = call.grad_o[:, :, tail]
    whole = Call(call.q, call.k, call.v, {}, ("q", "k", "v"), grad_o, None)
    got = gradients(whole, o, None)
    part = Call(call.q.detach()[:, :, tail], call.k, call.v, {"mask": mask[:, :, tail]}, ("q", "k", "v"), call.grad_o[:, :, tail], None)
    with ieee_products():
        truth, measured = oracle.solve(part), yardstick.solve(part)
    results = Results(o.detach()[:, :, tail], None, {**got, "q": got["q"][:, :, tail]})
    expected = truth.results.named()
    for name, tensor in results.named().items():
        assert_within_budget(tensor, expected[name], measured.named()[name], truth.amounts[name], f"{name} of the last rows")
