"""trial: one backend on tiny problems, forward and backward; `doctor` runs it in a process of its own.

`python -m attnzoo.trial NAME REPORT` appends a JSON line to the file REPORT before each step and at the end, so
that a crash is known by the step it happened in.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnzoo.backend import Backend
from attnzoo.errors import in_words
from attnzoo.inputs import AttentionInputs
from attnzoo.layout import BlockLayout
from attnzoo.registry import default
from attnzoo.spec import AttentionSpec

__all__ = ["Problem", "devices", "problems", "refusals"]

HEADS, LENGTH, HEAD_DIM, BLOCK = 2, 256, 64, 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TOLERANCE = 0.02  # of the largest value: tells wrong from right, the conformance kit judges accuracy


@dataclass(frozen=True)
class Problem:
    """Random q, k and v of one dtype on one device, with or without gradients and a block-triangular layout."""

    device: str
    dtype: torch.dtype
    has_grad: bool
    has_layout: bool

    def __str__(self) -> str:
        extras = [" with a layout"] * self.has_layout + [", forward only"] * (not self.has_grad)
        return f"{self.device} {str(self.dtype).removeprefix('torch.')}{''.join(extras)}"

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, 1, HEADS, LENGTH, HEAD_DIM, generator=generator).to(self.device, self.dtype)
        return q.requires_grad_(self.has_grad), k.requires_grad_(self.has_grad), v.requires_grad_(self.has_grad)

    @cached_property
    def layout(self) -> BlockLayout | None:
        if not self.has_layout:
            return None
        blocks = torch.ones(LENGTH // BLOCK, LENGTH // BLOCK, dtype=torch.bool).tril()
        return BlockLayout.from_blocks(blocks, block=BLOCK).to(self.device)

    @cached_property
    def spec(self) -> AttentionSpec:
        return AttentionSpec.of(*self.tensors, layout=self.layout)

    def expected(self) -> list[Tensor]:
        """o, and dq, dk, dv for a gradient of ones where there are gradients: the textbook, in float64 on the CPU."""
        q, k, v = (tensor.detach().cpu().double().requires_grad_() for tensor in self.tensors)
        scores = q @ k.mT * HEAD_DIM**-0.5
        if self.layout is not None:
            scores = scores.masked_fill(~self.layout.to("cpu").to_dense(), -torch.inf)
        o = scores.softmax(-1) @ v
        return [o, *torch.autograd.grad(o.sum(), (q, k, v))] if self.has_grad else [o]


def devices() -> list[str]:
    """Device types of this machine, the accelerator's first."""
    accelerator = torch.accelerator.current_accelerator()
    return [accelerator.type, "cpu"] if accelerator is not None and torch.accelerator.is_available() else ["cpu"]


def problems(device: str) -> list[Problem]:
    """From the most that is asked to the least."""
    return [Problem(device, dtype, grad, layout) for grad in (True, False) for layout in (False, True) for dtype in DTYPES]


def refusals(backend: Backend, problems: Iterable[Problem]) -> tuple[Problem | None, list[str]]:
    """The first problem that the backend takes; or none, and its reasons against the one that came closest."""
    closest: list[str] | None = None
    for problem in problems:
        reasons = backend.unsupported_reasons(problem.spec)
        if not isinstance(reasons, (list, tuple)) or not all(isinstance(reason, str) for reason in reasons):
            raise TypeError(f"unsupported_reasons returned {reasons!r}, not a list of strings")
        if not reasons:
            return problem, []
        if closest is None or len(reasons) < len(closest):
            closest = list(reasons)
    return None, closest or []


def examine(name: str, step: Callable[[str], None]) -> dict[str, Any]:
    """The verdict on one backend: ok on some device, or refused by it on all; raises whatever it raises."""
    step("importing its plugin")
    backend = default().get(name)
    lines, is_able = [], False
    for device in devices():
        step(f"asking what it supports on {device}")
        problem, reasons = refusals(backend, problems(device))
        if problem is None:
            lines.append(f"{device}: {'; '.join(reasons)}")
            continue
        is_able = True
        wrong = list(mistakes(backend, problem, step))
        if wrong:
            return {"verdict": "broken", "cause": "wrong", "detail": f"{problem}: {'; '.join(wrong)}"}
        lines.append(f"{problem}: right")
    return {"verdict": "ok" if is_able else "refuses", "detail": "\n".join(lines)}


def mistakes(backend: Backend, problem: Problem, step: Callable[[str], None]) -> Iterator[str]:
    """What is wrong with the results of one problem, a sentence each."""
    step(f"running the forward on {problem}")
    q, k, v = problem.tensors
    inputs = AttentionInputs.of(problem.spec, q, k, v, layout=problem.layout)
    o, _ = backend.attend(problem.spec, inputs)
    found = [o]
    if problem.has_grad:
        step(f"running the backward on {problem}")
        found += torch.autograd.grad(o.sum(), (q, k, v))
    for title, result, truth in zip(("o", "dq", "dk", "dv"), found, problem.expected()):
        if result.shape != truth.shape or result.dtype != problem.dtype:
            yield f"{title} is {tuple(result.shape)} {result.dtype}, not {tuple(truth.shape)} {problem.dtype}"
            continue
        error = (result.detach().cpu().double() - truth).abs().max().item()
        if not error <= TOLERANCE * truth.abs().max().item():  # so that nan counts
            yield f"{title} is off by {error:.3g} where the largest value is {truth.abs().max().item():.3g}"


def main(name: str, report: str) -> None:
    """Examine one backend and write down how it went."""

    def write(**line: Any) -> None:
        with open(report, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    try:
        write(**examine(name, lambda text: write(step=text)))
    except BaseException as error:  # SystemExit too: a plugin's doing
        traceback.print_exc()
        write(verdict="broken", cause="raised", detail=in_words(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
