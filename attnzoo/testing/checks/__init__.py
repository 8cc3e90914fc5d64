"""What can be asked of a backend about a problem: name -> function of (subject, problem, device).

A check raises ConformanceError with its own message; a refusal of the subject passes through it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnzoo.testing.case import Outcome
from attnzoo.testing.checks.accuracy import accuracy
from attnzoo.testing.checks.claims import claim
from attnzoo.testing.problem import Problem
from attnzoo.testing.subject import Subject

__all__ = ["CHECKS"]

Check = Callable[[Subject, Problem, torch.device], Outcome | None]

CHECKS: dict[str, Check] = {check.__name__: check for check in (accuracy, claim)}
