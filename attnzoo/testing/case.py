"""Case: a named problem and the check that judges it; run_case: what one backend makes of one case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnzoo.testing.failure import ConformanceError, ForwardError, NotApplicable
from attnzoo.testing.problem import DTYPES, Problem

if TYPE_CHECKING:
    import torch

    from attnzoo.testing.subject import Subject

__all__ = ["Case", "Outcome", "run_case"]

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

Check = Callable[["Subject", Problem, "torch.device"], "Outcome | None"]


@dataclass(frozen=True)
class Case:
    """One thing asked of every backend.

    Attributes:
        family: "T01" to "T36", as docs/faults.md lists them.
        name: what is special about it; `family-name` is the id, and is unique.
        problem: judged by `check`, the name of a function of `attnzoo.testing.checks`.
        required: may never be refused; its dtype is then one that the backend claims. A backend that claims no
            gradients at all may refuse those.
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


@dataclass(frozen=True)
class Outcome:
    """What became of a case that did not fail.

    Attributes:
        kind: "passed", "forward only" (the gradients were refused, the same call without them passed), "refused" or
            "not applicable".
        reasons: the backend's own, or what the machine lacks.
    """

    kind: str
    reasons: tuple[str, ...] = ()


def run_case(subject: Subject, case: Case, device: str | torch.device) -> Outcome:
    """Judge one case.

    A backend that gives reasons against the problem must raise UnsupportedError with them; that is a refusal. Where it
    serves the call without gradients, that is judged instead.

    Raises:
        ConformanceError: the backend broke the contract, or refused a required case; ForwardError in the forward of a
            call whose gradients it refuses.
    """
    import torch

    from attnzoo.testing.checks import CHECKS
    from attnzoo.testing.subject import Refused

    device = torch.device(device)
    if case.device and case.device != device.type:
        return Outcome("not applicable", (f"needs a {case.device} device",))
    problem = _in_claimed_dtype(subject, case, device)
    try:
        return CHECKS[case.check](subject, problem, device) or Outcome("passed")
    except NotApplicable as reason:
        return Outcome("not applicable", (str(reason),))
    except Refused as refusal:
        if not (refusal.reasons and all([reason.strip() for reason in refusal.reasons])):
            raise ConformanceError(f"{subject.name} refused {case.id} without a reason") from refusal
        is_forward_served = case.check == "accuracy" and problem.grads and _passes_forward(subject, problem, device)
        if case.required and not (is_forward_served and not subject.claims_on(device).gradients):
            raise ConformanceError(f"{case.id} is required, but {subject.name} refuses it: {'; '.join(refusal.reasons)}") from refusal
        return Outcome("forward only" if is_forward_served else "refused", refusal.reasons)


def _passes_forward(subject: Subject, problem: Problem, device: torch.device) -> bool:
    """Judge the call without gradients; False if it is refused as well."""
    from attnzoo.testing.checks import CHECKS
    from attnzoo.testing.subject import Refused

    try:
        CHECKS["accuracy"](subject, replace(problem, grads=(), loss="o"), device)
    except Refused:
        return False
    except Exception as error:
        raise ForwardError(f"without gradients, which are refused: {type(error).__name__}: {error}") from error
    return True


def _in_claimed_dtype(subject: Subject, case: Case, device: torch.device) -> Problem:
    dtypes = subject.claims_on(device).dtypes
    claimed = [dtype for dtype in ("float32", *DTYPES) if any(str(d) == f"torch.{dtype}" for d in dtypes)]
    if not case.required or case.problem.dtype in claimed or not claimed:
        return case.problem
    return replace(case.problem, dtype=claimed[0])
