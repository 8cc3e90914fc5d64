"""claim: a feature that a backend claims must be served, one that it doesn't claim must be refused."""

from __future__ import annotations

import torch

from attnzoo.testing.case import Outcome
from attnzoo.testing.checks.accuracy import accuracy
from attnzoo.testing.failure import ConformanceError
from attnzoo.testing.problem import Problem
from attnzoo.testing.subject import Refused, Subject

__all__ = ["claim"]


def claim(subject: Subject, problem: Problem, device: torch.device) -> Outcome | None:
    """The smallest call that needs a feature: served and right, or refused with UnsupportedError."""
    served = subject.capabilities.backward if problem.grads else subject.capabilities.forward
    unclaimed = [feature for feature in problem.features if feature not in served]
    try:
        accuracy(subject, problem, device)
    except Refused as refusal:
        if not unclaimed:
            raise ConformanceError(
                f"{subject.name} claims all of {problem.features}, but refuses: {'; '.join(refusal.reasons)}"
            ) from refusal
        return Outcome("refused", refusal.reasons)
    if unclaimed:
        raise ConformanceError(f"{subject.name} doesn't claim {', '.join(unclaimed)}, but served it: claim it or refuse it")
    return None
