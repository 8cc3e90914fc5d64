"""How many cases a backend refuses for reasons that its capabilities don't state."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnzoo.spec import AttentionSpec
from attnzoo.testing.case import Case, judged_problem
from attnzoo.testing.cases import CASES
from attnzoo.testing.inputs import make_call
from attnzoo.testing.problem import Problem
from attnzoo.testing.subject import Subject

__all__ = ["is_refused_everywhere", "unexplained_refusals"]

BIG = 2**20  # scores; only the decision is asked for, so bigger problems are left out


def unexplained_refusals(subject: Subject, device: str) -> tuple[float, str]:
    """The share that is refused so of the accuracy cases within the capabilities, and three examples."""
    asked, unexplained = 0, []
    claims, there = subject.claims_on(device), torch.device(device)
    for case in CASES:
        problem = judged_problem(subject, case, device)
        if case.check != "accuracy" or _scores(problem) > BIG or case.device not in ("", device.partition(":")[0]):
            continue
        spec = replace(subject.spec(make_call(problem, torch.device("cpu"))), device=there)
        if claims.reasons_against(spec):
            continue
        asked += 1
        reasons = subject.backend.unsupported_reasons(spec)
        if reasons:
            unexplained.append(f"{case.id}: {'; '.join(reasons)}")
    return len(unexplained) / max(1, asked), " | ".join(unexplained[:3])


def is_refused_everywhere(subject: Subject, case: Case, device: str) -> bool:
    """Whether the case can't fail: its call is refused on every device that is claimed, also without gradients and lse.

    Decided from metadata; False where that says nothing, as of a check that looks at refusals, or of a big problem.
    """
    if not case.judges_result or _scores(case.problem) > BIG or case.required:
        return False
    devices = [case.device] if case.device else subject.capabilities.devices or {device}
    return all(subject.backend.unsupported_reasons(_least_spec(subject, case, name)) for name in devices)


def _least_spec(subject: Subject, case: Case, device: str) -> AttentionSpec:
    """Of the call without gradients, and without an lse that is not its point."""
    problem = judged_problem(subject, case, device)
    call = make_call(replace(problem, grads=(), return_lse=problem.return_lse and case.is_about_lse), torch.device("cpu"))
    return replace(subject.spec(call), device=torch.device(device))


def _scores(problem: Problem) -> int:
    return problem.batch * problem.q_heads * problem.q_len * problem.k_len
