"""run_case: passed, refused, not applicable, or failed; and what may not be any of these."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnzoo.backend import Capabilities
from attnzoo.backends.naive import Naive
from attnzoo.errors import UnsupportedError
from attnzoo.testing.case import Case, Outcome, run_case
from attnzoo.testing.cases.claims import FEATURES
from attnzoo.testing.failure import ConformanceError
from attnzoo.testing.problem import Problem, Table
from attnzoo.testing.subject import Subject
from attnzoo.testing.verdict import Entry, Verdicts

PLAIN = Problem(q_len=8, head_dim=8)
MASKED = replace(PLAIN, mask=Table())
ALL = Naive.capabilities


class WithoutMask(Naive):
    name = "without_mask"
    capabilities = Capabilities(dtypes={torch.float16}, head_dims=(1, 64), forward=ALL.forward - {"mask"}, backward=ALL.backward - {"mask"})


def run(backend: Naive, problem: Problem, **options: object) -> Outcome:
    return run_case(Subject(backend), Case("T00", "it", problem, **options), "cpu")


def test_a_right_backend_passes() -> None:
    assert run(Naive(), PLAIN) == Outcome("passed")


def test_a_refusal_gives_the_reasons() -> None:
    outcome = run(WithoutMask(), replace(MASKED, dtype="float16"))
    assert outcome.kind == "refused"
    assert outcome.reasons == ("mask (a bool mask) is not supported",)


def test_a_required_case_may_not_be_refused() -> None:
    with pytest.raises(ConformanceError, match="is required, but without_mask refuses it: mask"):
        run(WithoutMask(), MASKED, required=True)


def test_a_required_case_takes_a_claimed_dtype() -> None:
    assert run(WithoutMask(), PLAIN).kind == "refused"
    assert run(WithoutMask(), PLAIN, required=True).kind == "passed"


def test_a_case_of_another_device_is_not_applicable() -> None:
    assert run(Naive(), PLAIN, device="cuda") == Outcome("not applicable", ("needs a cuda device",))


def test_attend_may_not_refuse() -> None:
    class Late(Naive):
        name = "late"

        def attend(self, spec, inputs):
            raise UnsupportedError({"late": ["not today"]})

    with pytest.raises(ConformanceError, match="attend refused a call that unsupported_reasons had accepted"):
        run(Late(), PLAIN)


def test_reasons_may_not_be_blank() -> None:
    class Mute(Naive):
        name = "mute"

        def unsupported_reasons(self, spec):
            return [""]

    with pytest.raises(ConformanceError, match="an empty reason"):
        run(Mute(), PLAIN, check="all_reasons")


@pytest.mark.parametrize("feature", FEATURES)
def test_an_unclaimed_feature_may_not_be_served(feature: str) -> None:
    class Modest(Naive):
        """Claims less than it serves, and refuses nothing."""

        name = "modest"
        capabilities = replace(ALL, forward=ALL.forward - {feature}, backward=ALL.backward - {feature})

        def unsupported_reasons(self, spec):
            return []

    with pytest.raises(ConformanceError, match=rf"doesn't claim .*{feature}.* but served it"):
        run(Modest(), FEATURES[feature], check="claim")


@pytest.mark.parametrize("feature", FEATURES)
def test_a_claimed_feature_may_not_be_refused(feature: str) -> None:
    class Boastful(Naive):
        name = "boastful"

        def unsupported_reasons(self, spec):
            return ["not in the mood"]

    with pytest.raises(ConformanceError, match=r"boastful claims all of .* but refuses: not in the mood"):
        run(Boastful(), FEATURES[feature], check="claim")


def entry(case: str, kind: str, *features: str, reasons: tuple[str, ...] = ()) -> Entry:
    return Entry("it", case, case[:3], "float32", features, True, kind, reasons)


def test_one_failure_fails_a_feature() -> None:
    entries = [entry("T06-a", "passed", "causal"), entry("T06-b", "failed", "causal"), entry("T10-a", "passed")]
    verdicts = Verdicts(entries)
    assert verdicts.by_feature("it")["causal backward"].verdict("causal") == "FAILED"
    assert verdicts.by_feature("it")["plain backward"].verdict("plain") == "pass"
    assert verdicts.by_family("it")["T06"].failed == ["T06-b"]


def test_a_refused_feature_gives_its_own_reason() -> None:
    verdicts = Verdicts([entry("T22-a", "refused", "dropout", reasons=("dtype is float32", "dropout is not supported"))])
    assert verdicts.by_feature("it")["dropout backward"].verdict("dropout") == "refused (dropout is not supported)"


def test_a_verdict_does_not_depend_on_the_order_of_reports() -> None:
    entries = [entry(f"T06-{n}", kind, "causal") for n, kind in enumerate(("passed", "refused", "failed", "passed", "known failure"))]
    assert Verdicts(entries).lines() == Verdicts(reversed(entries)).lines()
