"""BackendConformance: subclass it, give it one fixture, run pytest.

    class TestMine(BackendConformance):
        @pytest.fixture
        def backend(self):
            return MyBackend()  # or the name of an installed one

The options of `attnzoo.pytest_plugin` choose device, dtypes and profile.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from attnzoo.backend import Backend
from attnzoo.pytest_plugin import DEEP_CHUNKS, chosen_random_problems
from attnzoo.testing.case import Case, Outcome, run_case
from attnzoo.testing.failure import ForwardError, require
from attnzoo.testing.refusals import unexplained_refusals
from attnzoo.testing.subject import Subject

__all__ = ["BackendConformance"]


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
    def known_failure(self, request: pytest.FixtureRequest, subject: Subject) -> Callable[[str], None]:
        """Marks the running test as a strict xfail if its id is a declared one, by the class or by option."""
        declared = {**self.known_failures, **_by_option(request, subject.name)}

        def mark(case_id: str) -> None:
            for pattern, reason in declared.items():
                if fnmatch.fnmatchcase(case_id, pattern):
                    request.applymarker(pytest.mark.xfail(reason=reason, strict=True, raises=Exception))

        return mark

    def test_case(
        self,
        attn_case: Case,
        subject: Subject,
        attn_device: str,
        known_failure: Callable[[str], None],
        record_property: Callable[[str, object], None],
    ) -> None:
        """One case, as `attnzoo.testing.cases` lists it."""
        known_failure(attn_case.id)
        record = _record(subject, attn_case)
        record_property("attnzoo", record)
        try:
            outcome = run_case_with_reproduction(subject, attn_case, attn_device)
        except ForwardError:
            record["has_backward"] = False
            raise
        record |= {"kind": outcome.kind, "reasons": list(outcome.reasons)}
        if outcome.kind in ("refused", "not applicable") and not attn_case.required:
            pytest.skip(f"{outcome.kind}: {'; '.join(outcome.reasons)}")

    def test_refusals_are_explained(self, subject: Subject, attn_device: str) -> None:
        """Skips are bounded: a refusal beyond the capabilities is allowed, most of the suite refused so is not."""
        share, examples = unexplained_refusals(subject, attn_device)
        require(
            share <= self.most_unexplained_refusals,
            f"{subject.name} refuses {share:.0%} of the cases for reasons that its capabilities don't state; at most "
            f"{self.most_unexplained_refusals:.0%}: {examples}",
        )

    def test_known_failures_exist(self, subject: Subject, request: pytest.FixtureRequest) -> None:
        """A known failure whose glob names no case hides nothing and explains nothing: it is out of date."""
        from attnzoo.testing.cases import CASES

        chunks = [*chosen_random_problems(request.config), *[f"chunk-{number}" for number in range(DEEP_CHUNKS)]]
        names = [*[case.id for case in CASES], *[f"random-{name}" for name in chunks]]
        declared = {**self.known_failures, **_by_option(request, subject.name)}
        stale = [pattern for pattern in declared if not fnmatch.filter(names, pattern)]
        require(not stale, f"known failures of {subject.name} that name no case: {', '.join(stale)}")

    def test_random_problems(
        self,
        attn_random: str,
        attn_profile: str,
        attn_dtypes: tuple[str, ...],
        subject: Subject,
        attn_device: str,
        known_failure: Callable[[str], None],
        record_property: Callable[[str, object], None],
    ) -> None:
        """Hypothesis draws whole problems; a failure is shrunk and printed as one line.

        `attn_random` is "chunk-N", or "variant-N" in the deep profile: the kernel variants come first, so that all
        workers compile side by side. If all of its problems are refused, so is the chunk.
        """
        from attnzoo.testing.random_problems import run_chunk, run_variant

        known_failure(f"random-{attn_random}")
        kind, _, number = attn_random.partition("-")
        if kind == "variant":
            outcome = run_variant(subject, attn_device, int(number), dtypes=attn_dtypes)
        else:
            outcome = run_chunk(subject, attn_device, profile=attn_profile, chunk=int(number), dtypes=attn_dtypes)
        record_property("attnzoo_random", {"kind": outcome.kind, "reasons": list(outcome.reasons)})
        if outcome.kind != "passed":
            pytest.skip(f"{outcome.kind}: {'; '.join(outcome.reasons)}")


def run_case_with_reproduction(subject: Subject, case: Case, device: str) -> Outcome:
    """As `run_case`; whatever is raised ends with the line that repeats it."""
    try:
        return run_case(subject, case, device)
    except Exception as error:
        error.add_note(f"repeat: {case.problem.reproduction(subject.name, case.check, device)}")
        raise


def _record(subject: Subject, case: Case) -> dict[str, Any]:
    problem = case.problem
    return {
        "backend": subject.name,
        "case": case.id,
        "family": case.family,
        "dtype": problem.dtype,
        "features": list(problem.features),
        "has_backward": case.judges_gradient,
        "judges_result": case.judges_result,
        "kind": "failed",
        "reasons": [],
    }


def _by_option(request: pytest.FixtureRequest, name: str) -> dict[str, str]:
    """`--attn-known-failure "[BACKEND:]GLOB=REASON"`."""
    declared = {}
    for text in request.config.getoption("--attn-known-failure") or []:
        pattern, _, reason = text.partition("=")
        backend, colon, glob = pattern.rpartition(":")
        if not colon or backend == name:
            declared[glob] = reason or "declared on the command line"
    return declared
