"""BackendConformance: subclass it, give it one fixture, run pytest.

    class TestMine(BackendConformance):
        @pytest.fixture
        def backend(self):
            return MyBackend()  # or the name of an installed one

The options of `attnzoo.pytest_plugin` choose device, dtypes and profile.
"""

from __future__ import annotations

import fnmatch
import itertools
import shlex
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from attnzoo.backend import Backend
from attnzoo.pytest_plugin import DEEP_CHUNKS, chosen_random_problems
from attnzoo.testing.case import Case, judged_problem, run_case
from attnzoo.testing.failure import ReducedError, require
from attnzoo.testing.journal import note
from attnzoo.testing.outcome import Outcome
from attnzoo.testing.problem import DTYPES, Problem
from attnzoo.testing.refusals import is_refused_everywhere, unexplained_refusals
from attnzoo.testing.subject import Subject
from attnzoo.testing.verdict import PLAIN

__all__ = ["BackendConformance"]

UNASKED = Outcome("not applicable", ("only dtypes that it does not claim are asked for",))


class BackendConformance:
    """Every case, every claim and random problems, for one backend.

    Attributes:
        known_failures: glob of case ids -> reason. A strict xfail: a known failure that passes fails the run.
        most_unexplained_refusals: share of the cases that the backend may refuse for reasons which its
            capabilities don't state.
    """

    known_failures: ClassVar[Mapping[str, str]] = {}
    most_unexplained_refusals: ClassVar[float] = 0.25

    @pytest.fixture
    def backend(self) -> str | Backend:
        """What to judge."""
        raise NotImplementedError("give a fixture `backend` that returns a Backend, or the name of an installed one")

    @pytest.fixture
    def subject(self, backend: str | Backend) -> Subject:
        return Subject(backend)

    @pytest.fixture
    def attn_record(self, subject: Subject, record_property: Callable[[str, object], None]) -> dict[str, Any]:
        """What the verdict and the certificate are made of; it travels with the report of the test."""
        record = {"backend": subject.name, "name": "", "kind": "passed", "reasons": []}
        record_property("attnzoo", record)
        return record

    @pytest.fixture
    def attn_repeat(self, request: pytest.FixtureRequest, subject: Subject, attn_device: str) -> Callable[..., str]:
        """A check of a problem -> the command that repeats it; the test itself where no other process finds the backend."""

        def command(problem: Problem, check: str = "accuracy") -> str:
            if subject.is_registered:
                return problem.reproduction(subject.name, check, attn_device)
            return " ".join(["pytest", shlex.quote(request.node.nodeid), *_options_of(request)])

        return command

    @pytest.fixture
    def known_failure(self, request: pytest.FixtureRequest, subject: Subject) -> Callable[[str], None]:
        """Marks the running test as a strict xfail if its id is a declared one, by the class or by option."""
        declared = {**self.known_failures, **_by_option(request, subject.name)}

        def mark(case_id: str) -> None:
            for pattern, reason in declared.items():
                if fnmatch.fnmatchcase(case_id, pattern):
                    request.applymarker(pytest.mark.xfail(reason=reason, strict=True, raises=Exception))

        return mark

    def test_random_problems(
        self,
        attn_random: str,
        attn_profile: str,
        attn_dtypes: tuple[str, ...],
        subject: Subject,
        attn_device: str,
        known_failure: Callable[[str], None],
        attn_record: dict[str, Any],
        attn_repeat: Callable[..., str],
    ) -> None:
        """Hypothesis draws whole problems; a failure is shrunk and printed as one line.

        Before the cases: a chunk takes longest, above all where each kind of call is compiled, and should not be what workers wait for.

        `attn_random` is "chunk-N", or "variant-N" in the deep profile: the kernel variants come first, so that all
        workers compile side by side. If all of its problems are refused, so is the chunk.
        """
        from attnzoo.testing.random_problems import run_chunk, run_variant

        known_failure(f"random-{attn_random}")
        attn_record["name"] = attn_random
        kind, _, number = attn_random.partition("-")
        if kind == "variant":
            outcome = run_variant(subject, attn_device, int(number), dtypes=attn_dtypes, repeat=attn_repeat)
        else:
            chunk = int(number)
            outcome = run_chunk(subject, attn_device, profile=attn_profile, chunk=chunk, dtypes=attn_dtypes, repeat=attn_repeat)
        attn_record |= {"kind": outcome.kind, "reasons": list(outcome.reasons)}
        if outcome.kind != "passed":
            pytest.skip(f"{outcome.kind}: {'; '.join(outcome.reasons)}")

    def test_case(
        self,
        attn_case: Case,
        subject: Subject,
        attn_device: str,
        attn_dtypes: tuple[str, ...],
        known_failure: Callable[[str], None],
        attn_record: dict[str, Any],
        attn_repeat: Callable[..., str],
    ) -> None:
        """One case, as `attnzoo.testing.cases` lists it."""
        known_failure(attn_case.id)
        attn_record |= _record(subject, attn_case, attn_device)
        problem = judged_problem(subject, attn_case, attn_device)
        attn_record["dtype"] = problem.dtype
        repeat = attn_repeat(problem, attn_case.check)
        note(repeat)
        try:
            outcome = run_case(subject, attn_case, attn_device) if problem.dtype in (attn_dtypes or DTYPES) else UNASKED
        except (Exception, pytest.fail.Exception) as error:  # the latter where the time is up
            error.add_note(f"repeat: {repeat}")
            if isinstance(error, ReducedError):
                attn_record |= {"has_backward": attn_case.judges_gradient and not error.without_grads, "without_lse": error.without_lse}
            raise
        attn_record |= {"kind": outcome.kind, "reasons": list(outcome.reasons), "without_lse": outcome.without_lse}
        if outcome.kind in ("refused", "not applicable") and (not attn_case.required or outcome is UNASKED):
            pytest.skip(f"{outcome.kind}: {'; '.join(outcome.reasons)}")

    def test_refusals_are_explained(self, subject: Subject, attn_device: str, attn_record: dict[str, Any]) -> None:
        """Skips are bounded: a refusal beyond the capabilities is allowed, most of the suite refused so is not."""
        share, examples = unexplained_refusals(subject, attn_device)
        require(
            share <= self.most_unexplained_refusals,
            f"{subject.name} refuses {share:.0%} of the cases for reasons that its capabilities don't state; at most "
            f"{self.most_unexplained_refusals:.0%}: {examples}",
        )

    def test_known_failures_exist(
        self, subject: Subject, request: pytest.FixtureRequest, attn_device: str, attn_record: dict[str, Any]
    ) -> None:
        """A known failure whose glob names no case, or refused ones alone, hides nothing and explains nothing: it is out of date."""
        from attnzoo.testing.cases import CASES

        chunks = [*chosen_random_problems(request.config), *[f"chunk-{number}" for number in range(DEEP_CHUNKS)]]
        cases: dict[str, Case | None] = {case.id: case for case in CASES} | dict.fromkeys(f"random-{name}" for name in chunks)
        declared = {**self.known_failures, **_by_option(request, subject.name)}
        named = {pattern: [cases[name] for name in fnmatch.filter(cases, pattern)] for pattern in declared}
        stale = [pattern for pattern, found in named.items() if not found]
        require(not stale, f"known failures of {subject.name} that name no case: {', '.join(stale)}")
        refused = [
            pattern
            for pattern, found in named.items()
            if all(case is not None and is_refused_everywhere(subject, case, attn_device) for case in found)
        ]
        require(not refused, f"known failures of {subject.name} whose every case it refuses, so that none fails: {', '.join(refused)}")


def _record(subject: Subject, case: Case, device: str) -> dict[str, Any]:
    claims, problem = subject.claims_on(device), case.problem
    served = {PLAIN} | (claims.backward if case.judges_gradient else claims.forward)
    is_served = claims.gradients or not case.judges_gradient
    claimed = [feature for feature in problem.features or (PLAIN,) if feature in served and is_served]
    return {"name": case.id, "has_backward": case.judges_gradient, "claimed": claimed}


def _options_of(request: pytest.FixtureRequest) -> list[str]:
    """The options of this run without which the test would be another one, or none."""
    callspec = getattr(request.node, "callspec", None)
    kind, _, number = str(callspec.params.get("attn_random", "") if callspec else "").partition("-")
    chosen = {"--attn-device": request.config.getoption("--attn-device")}
    if kind:
        chosen["--attn-profile"] = request.config.getoption("--attn-profile")
    if kind == "chunk":
        chosen["--attn-seeds"] = f"{number}:{int(number) + 1}"
    dtypes = request.config.getoption("--attn-dtype") or () if kind else ()
    return [*itertools.chain(*chosen.items()), *[part for dtype in dtypes for part in ("--attn-dtype", dtype)]]


def _by_option(request: pytest.FixtureRequest, name: str) -> dict[str, str]:
    """`--attn-known-failure "[BACKEND:]GLOB=REASON"`."""
    declared = {}
    for text in request.config.getoption("--attn-known-failure") or []:
        pattern, _, reason = text.partition("=")
        backend, colon, glob = pattern.rpartition(":")
        if not colon or backend == name:
            declared[glob] = reason or "declared on the command line"
    return declared
