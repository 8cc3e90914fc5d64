"""How many cases a backend refuses for reasons that its capabilities don't state."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnzoo.testing.cases import CASES
from attnzoo.testing.inputs import make_call
from attnzoo.testing.subject import Subject

__all__ = ["unexplained_refusals"]

BIG = 2**20  # scores; only the decision is asked for, so bigger problems are left out


def unexplained_refusals(subject: Subject, device: str) -> tuple[float, str]:
    """The share that is refused so of the accuracy cases within the capabilities, and three examples."""
    asked, unexplained = 0, []
    claims, there = subject.claims_on(device), torch.device(device)
    for case in CASES:
        problem = case.problem
        scores = problem.batch * problem.q_heads * problem.q_len * problem.k_len
        if case.check != "accuracy" or scores > BIG or case.device not in ("", device.partition(":")[0]):
            continue
        spec = replace(subject.spec(make_call(problem, torch.device("cpu"))), device=there)
        if claims.reasons_against(spec):
            continue
        asked += 1
        reasons = subject.backend.unsupported_reasons(spec)
        if reasons:
            unexplained.append(f"{case.id}: {'; '.join(reasons)}")
    return len(unexplained) / max(1, asked), " | ".join(unexplained[:3])
