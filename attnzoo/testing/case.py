"""Case: a named problem and the check that judges it; run_case: what one backend makes of one case."""

from __future__ import annotations

import unittest
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnzoo.testing.failure import ConformanceError, NotApplicable, ReducedError
from attnzoo.testing.outcome import Outcome
from attnzoo.testing.problem import Problem, short_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from attnzoo.backend import Capabilities
    from attnzoo.testing.subject import Subject

__all__ = ["Case", "claimed_dtypes", "judged_problem", "run_case"]

OTHER_CHECKS = frozenset({"all_reasons", "declaration", "named_without_gpu", "unclaimed_device", "unclaimed_dtype", "without_triton"})
"""Those that look at no result: at refusals, at what the backend says of itself, at what importing it needs."""

FORWARD_CHECKS = frozenset(
    {
        "future_changes_nothing",
        "inference_mode",
        "kept_elements",
        "no_grad",
        "rules_reach_the_result",
        "seed_from_generator",
        "value_is_linear",
        "vmapped",
    }
)
"""Those that compute no gradient, whatever the problem says."""


PREFERRED_DTYPES = ("float32", "bfloat16", "float16", "float64")
"""In this order where a case may be asked in any: bfloat16 has float32's range, which the values of some problems need."""


@dataclass(frozen=True)
class Case:
    """One thing asked of every backend.

    Attributes:
        family: "T01" to "T36", as docs/faults.md lists them.
        name: what is special about it; `family-name` is the id, and is unique.
        problem: judged by `check`, the name of a function of `attnzoo.testing.checks`.
        required: may never be refused. A backend that claims no gradients at all may refuse those.
        device: "cuda" where the case says something only there; "" for any.
    """

    family: str
    name: str
    problem: Problem
    check: str = "accuracy"
    required: bool = False
    device: str = ""

    @property
    def id(self) -> str:
        return f"{self.family}-{self.name}"

    @property
    def judges_result(self) -> bool:
        """Whether a pass says that the features of the problem are served, not that something is refused as it should be."""
        return self.check not in OTHER_CHECKS and not self.check.startswith("reject ")

    @property
    def judges_gradient(self) -> bool:
        """Whether a gradient is looked at, so that a pass says something of the backward."""
        return bool(self.problem.grads) and self.judges_result and self.check not in FORWARD_CHECKS

    @property
    def is_about_dtype(self) -> bool:
        """Whether it says something of its dtype alone, so that it is refused where that is not claimed."""
        return self.problem.dtype != Problem.dtype or short_dtype(Problem.dtype) in self.name.split("-")

    @property
    def is_about_head_dims(self) -> bool:
        """Whether it says something of its head dims alone."""
        problem = self.problem
        return problem.head_dim != Problem.head_dim or problem.value_dim is not None or f"d{Problem.head_dim}" in self.name.split("-")

    @property
    def is_about_lse(self) -> bool:
        """Whether nothing is left to judge without the lse: the loss reads it alone, or the name says that it is the point."""
        return self.problem.loss == "lse" or "lse" in self.name.split("-")


def run_case(subject: Subject, case: Case, device: str | torch.device) -> Outcome:
    """Judge one case.

    A backend that gives reasons against the problem must raise UnsupportedError with them; that is a refusal. Where it
    serves the call without gradients, or without an lse that is not the point of the case, that is judged instead.

    Raises:
        ConformanceError: the backend broke the contract, or refused a required case; ReducedError in a part of a call that
            it refuses as a whole.
    """
    import torch

    device = torch.device(device)
    if case.device and case.device != device.type:
        return Outcome("not applicable", (f"needs a {case.device} device",))
    case = replace(case, problem=judged_problem(subject, case, device))
    try:
        return _run(subject, case, device)
    except _ways_out() as error:
        raise ConformanceError(f"{subject.name} raised a {type(error).__name__}, which ends a test: {error}") from error


def _ways_out() -> tuple[type[BaseException], ...]:
    """What ends a test, or the process, without failing: a verdict that is not the backend's to give."""
    import pytest

    return pytest.skip.Exception, pytest.xfail.Exception, pytest.exit.Exception, unittest.SkipTest, SystemExit


def _run(subject: Subject, case: Case, device: torch.device) -> Outcome:
    """As run_case, of a case that this device and dtype can judge."""
    from attnzoo.testing.checks import CHECKS
    from attnzoo.testing.subject import Refused

    try:
        return CHECKS[case.check](subject, case.problem, device) or Outcome("passed")
    except NotApplicable as reason:
        return Outcome("not applicable", (str(reason),))
    except Refused as refusal:
        if not (refusal.reasons and all([reason.strip() for reason in refusal.reasons])):
            raise ConformanceError(f"{subject.name} refused {case.id} without a reason") from refusal
        outcome = _run_parts(subject, case, device, refusal.reasons)
        is_excused = outcome == Outcome("forward only", refusal.reasons) and not subject.claims_on(device).gradients
        if case.required and not is_excused:
            raise ConformanceError(f"{case.id} is required, but {subject.name} refuses it: {'; '.join(refusal.reasons)}") from refusal
        return outcome


def _run_parts(subject: Subject, case: Case, device: torch.device, reasons: tuple[str, ...]) -> Outcome:
    """Judge what is left of a refused call without its gradients, without its lse, or without both, as far as it is served."""
    problem = case.problem
    has_forward = case.check == "accuracy" and bool(problem.grads)
    forward_passed = has_forward and _passes(subject, case, device, without_grads=True)
    if problem.return_lse and not case.is_about_lse:
        if _passes(subject, case, device, without_lse=True):
            return Outcome("passed", reasons, without_lse=True)
        if has_forward and not forward_passed and _passes(subject, case, device, without_grads=True, without_lse=True):
            return Outcome("forward only", reasons, without_lse=True)
    return Outcome("forward only" if forward_passed else "refused", reasons)


def _passes(subject: Subject, case: Case, device: torch.device, *, without_grads: bool = False, without_lse: bool = False) -> bool:
    """Judge a part of the call; False if it is refused as well, or says nothing on this machine."""
    from attnzoo.testing.checks import CHECKS
    from attnzoo.testing.subject import Refused

    problem = replace(case.problem, loss="o")
    problem = replace(problem, grads=()) if without_grads else problem
    problem = replace(problem, return_lse=False) if without_lse else problem
    try:
        outcome = CHECKS[case.check](subject, problem, device)
    except (Refused, NotApplicable):
        return False
    except Exception as error:
        parts = " and ".join(["gradients"] * without_grads + ["lse"] * without_lse)
        text = f"without {parts}, which {'are' if without_grads else 'is'} refused: {type(error).__name__}: {error}"
        raise ReducedError(text, without_grads=without_grads, without_lse=without_lse) from error
    return outcome is None or outcome.kind == "passed"


def claimed_dtypes(claims: Capabilities, order: Sequence[str]) -> list[str]:
    """By name, in this order."""
    return [dtype for dtype in order if any(str(claim) == f"torch.{dtype}" for claim in claims.dtypes)]


def judged_problem(subject: Subject, case: Case, device: str | torch.device) -> Problem:
    """The case's, in a dtype and, where the result is judged, with head dims that the backend claims.

    A required case is always asked so; any other where it is about neither: it keeps the default, and is not named for it.
    """
    claims, problem = subject.claims_on(device), case.problem
    claimed = claimed_dtypes(claims, PREFERRED_DTYPES)
    if claimed and problem.dtype not in claimed and (case.required or not case.is_about_dtype):
        problem = replace(problem, dtype=claimed[0])
    if not case.judges_result or (case.is_about_head_dims and not case.required):
        return problem
    dims = [claims.nearest_head_dim(dim) for dim in (problem.head_dim, problem.v_dim)]
    if problem.value_dim is None:
        return replace(problem, head_dim=dims[0])
    if dims[0] == dims[1] and problem.v_dim != problem.head_dim:  # they are to differ
        smallest, largest = claims.head_dims
        dims[1] = smallest if dims[0] == largest else largest
    return replace(problem, head_dim=dims[0], value_dim=dims[1])
