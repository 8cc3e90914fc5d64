"""run_case: passed, refused, not applicable, or failed; and what may not be any of these."""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attnzoo.backend import Capabilities
from attnzoo.backends.naive import Naive
from attnzoo.errors import UnsupportedError
from attnzoo.testing.case import Case, Outcome, run_case
from attnzoo.testing.cases import CASES
from attnzoo.testing.cases.claims import FEATURES
from attnzoo.testing.failure import ConformanceError, ReducedError
from attnzoo.testing.inputs import make_call
from attnzoo.testing.problem import Problem, Table
from attnzoo.testing.subject import Subject
from attnzoo.testing.verdict import Entry, Tally

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


class ForwardAlone(Naive):
    """An inference engine: masks without gradients."""

    name = "forward_alone"
    capabilities = replace(ALL, backward=ALL.backward - {"mask"})


class BlindForward(ForwardAlone):
    name = "blind_forward"

    def attend(self, spec, inputs):
        return super().attend(replace(spec, mask=None), replace(inputs, mask=None))


def test_a_call_whose_gradients_are_refused_is_judged_without_them() -> None:
    outcome = run(ForwardAlone(), MASKED)
    assert outcome.kind == "forward only"
    assert outcome.reasons == ("mask (a bool mask) is not supported with a gradient, only without",)
    with pytest.raises(ReducedError, match=r"without gradients, which are refused: ConformanceError: o: .*err"):
        run(BlindForward(), MASKED)


def test_a_call_that_is_refused_either_way_stays_refused() -> None:
    assert run(WithoutMask(), replace(MASKED, dtype="float16", grads=("q",))).kind == "refused"
    assert run(ForwardAlone(), replace(MASKED, dtype="float64", return_lse=True, loss="lse")).kind == "forward only"


class WithoutLse(Naive):
    """Most wrappers: the lse is nowhere to be had."""

    name = "without_lse"
    capabilities = replace(ALL, forward=ALL.forward - {"lse"}, backward=ALL.backward - {"lse"})


class BlindWithoutLse(WithoutLse):
    name = "blind_without_lse"

    def attend(self, spec, inputs):
        return super().attend(replace(spec, mask=None), replace(inputs, mask=None))


BOTH = replace(MASKED, return_lse=True, loss="o+lse")
NO_LSE = "lse (return_lse, and its gradient if backward) is not supported"


def test_a_call_whose_lse_alone_is_refused_is_judged_without_it() -> None:
    assert run(WithoutLse(), BOTH) == Outcome("passed", (NO_LSE,), without_lse=True)
    assert run(WithoutLse(), BOTH, check="poisoned_allocations") == Outcome("passed", (NO_LSE,), without_lse=True)
    with pytest.raises(ReducedError, match=r"without lse, which is refused: ConformanceError: o: .*err") as caught:
        run(BlindWithoutLse(), BOTH)
    assert (caught.value.without_grads, caught.value.without_lse) == (False, True)


def test_a_call_without_gradients_and_lse_is_judged_where_both_are_refused() -> None:
    class Inference(WithoutLse):
        name = "inference"
        capabilities = replace(WithoutLse.capabilities, backward=frozenset(), gradients=False)

    outcome = run(Inference(), BOTH)
    assert (outcome.kind, outcome.without_lse) == ("forward only", True)


def test_gradients_are_judged_without_the_lse_and_the_lse_without_gradients() -> None:
    class WrongLse(Naive):
        """The lse without gradients alone, and wrong."""

        name = "wrong_lse"
        capabilities = replace(ALL, backward=ALL.backward - {"lse"})

        def attend(self, spec, inputs):
            o, lse = super().attend(spec, inputs)
            return o, None if lse is None else lse + 1

    right = replace(ALL, backward=ALL.backward - {"lse"})
    outcome = run(type("ForwardLse", (Naive,), {"name": "forward_lse", "capabilities": right})(), BOTH)
    assert (outcome.kind, outcome.without_lse) == ("passed", True)
    with pytest.raises(ReducedError, match="without gradients, which are refused: ConformanceError: lse"):
        run(WrongLse(), BOTH)


def test_a_case_about_the_lse_stays_refused() -> None:
    assert run(WithoutLse(), replace(BOTH, loss="lse")).kind == "refused"
    assert run_case(Subject(WithoutLse()), Case("T00", "lse-below-zero", BOTH), "cpu").kind == "refused"
    assert run(WithoutLse(), FEATURES["lse"], check="claim").kind == "refused"
    about = {case.family for case in CASES if case.problem.return_lse and case.is_about_lse}
    assert about >= {"T15", "T21"}, "the families whose point it is"
    assert not [case.id for case in CASES if case.family == "T21" and case.problem.return_lse and not case.is_about_lse]


def test_a_call_that_needs_more_than_the_lse_stays_refused() -> None:
    outcome = run(WithoutMask(), replace(BOTH, dtype="float16"))
    assert (outcome.kind, outcome.without_lse) == ("refused", False)


def test_a_required_case_is_not_excused_by_what_is_left_of_it() -> None:
    with pytest.raises(ConformanceError, match="is required, but without_lse refuses it: lse"):
        run(WithoutLse(), BOTH, required=True)


class NoBackward(Naive):
    name = "no_backward"
    capabilities = replace(ALL, backward=frozenset(), gradients=False)


CLAIMS = [case for case in CASES if case.required or case.check == "all_reasons"]


@pytest.mark.parametrize("case", CLAIMS, ids=[case.id for case in CLAIMS])
def test_a_backend_without_a_backward_may_claim_none(case: Case) -> None:
    outcome = run_case(Subject(NoBackward()), case, "cpu")
    assert outcome.kind != "passed" or not case.judges_gradient, f"{case.id} credits gradients, and none are claimed"


def test_gradients_that_are_not_claimed_may_not_be_served() -> None:
    class Secretive(NoBackward):
        name = "secretive"

        def unsupported_reasons(self, spec):
            return []

    with pytest.raises(ConformanceError, match="doesn't claim gradients, but served it"):
        run(Secretive(), replace(FEATURES["causal"]), check="claim")


def test_claims_are_those_of_the_device() -> None:
    class ByDevice(Naive):
        """Serves masks on the CPU alone, and claims on a card what it serves there."""

        name = "by_device"

        def capabilities_on(self, device):
            return ALL if device == "cpu" else replace(ALL, forward=ALL.forward - {"mask"}, backward=ALL.backward - {"mask"})

    assert run(ByDevice(), MASKED, check="claim").kind == "passed"
    assert run(ByDevice(), PLAIN, check="declaration").kind == "passed"
    elsewhere = replace(Subject(ByDevice()).spec(make_call(MASKED, torch.device("cpu"))), device=torch.device("cuda:1"))
    assert ByDevice().unsupported_reasons(elsewhere) == ["mask (a bool mask) is not supported"]
    assert "mask" not in Subject(ByDevice()).claims_on("cuda:1").forward


def test_claims_of_a_device_are_part_of_all_claims() -> None:
    class More(Naive):
        name = "more"
        capabilities = replace(ALL, forward=ALL.forward - {"mask"}, backward=ALL.backward - {"mask"})

        def capabilities_on(self, device):
            return ALL

    with pytest.raises(ConformanceError, match="forward: claimed on cpu, but not in capabilities: mask"):
        run(More(), PLAIN, check="declaration")


class Drifting(torch.autograd.Function):
    """The identity; its gradient is wrong, and another one each time."""

    @staticmethod
    def forward(tensor, factors):
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factors = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return (torch.randn_like(grad) + 1) * next(ctx.factors), None


class WrongGradients(Naive):
    name = "wrong_gradients"

    def __init__(self):
        super().__init__()
        self.factors = itertools.cycle([4.0, 16.0, 64.0, 256.0, 1024.0])

    def attend(self, spec, inputs):
        o, lse = super().attend(spec, inputs)
        return Drifting.apply(o, self.factors), None if lse is None else Drifting.apply(lse, self.factors)


GRADED = [case for case in CASES if case.problem.grads and case.judges_result and not case.device and not case.check.startswith("compiled")]
"""With a gradient, on any device, of a backend that need not be installed."""


@pytest.mark.parametrize("check", sorted({case.check for case in GRADED}))
def test_a_gradient_is_judged_where_a_case_says_so(check: str) -> None:
    """Else `feature backward: pass` may rest on checks that compute no gradient."""
    case = next(case for case in GRADED if case.check == check)
    try:
        outcome = run_case(Subject(WrongGradients()), case, "cpu")
    except ConformanceError:
        outcome = Outcome("failed")
    failed = outcome.kind == "failed"
    assert failed is case.judges_gradient, f"{case.id} {'saw' if failed else 'did not see'} that the gradients are wrong"


def test_a_required_case_may_not_be_refused() -> None:
    with pytest.raises(ConformanceError, match="is required, but without_mask refuses it: mask"):
        run(WithoutMask(), MASKED, required=True)


def test_a_case_takes_a_claimed_dtype_unless_it_is_about_its_own() -> None:
    assert run(WithoutMask(), PLAIN).kind == "passed"
    assert run(WithoutMask(), replace(PLAIN, dtype="bfloat16")).kind == "refused"
    assert run(WithoutMask(), replace(PLAIN, dtype="bfloat16"), required=True).kind == "passed"


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


def tally(feature: str, *entries: Entry) -> Tally:
    """Of the backward of a feature."""
    made = Tally()
    for entry in entries:
        for credit in entry.credits:
            if (credit.feature, credit.direction) == (feature, "backward"):
                made.add(entry, credit)
    return made


def entry(kind: str, *features: str, **options: object) -> Entry:
    return Entry("T06-a", "T06", "float32", features, True, kind, **options)  # type: ignore[arg-type]


def test_one_failure_fails_a_feature() -> None:
    entries = [entry("passed", "causal"), entry("failed", "causal"), entry("passed")]
    assert tally("causal", *entries).verdict == "FAILED"
    assert tally("plain", *entries).verdict == "pass"


def test_a_refused_feature_gives_its_own_reason() -> None:
    refused = tally("dropout", entry("refused", "dropout", reasons=("dtype is float32", "dropout is not supported")))
    assert (refused.verdict, refused.reason("dropout")) == ("refused", "dropout is not supported")


def test_a_known_failure_gives_its_reason() -> None:
    known = tally("causal", entry("known failure", "causal", reasons=("it rounds",)), entry("refused", "causal", reasons=("causal",)))
    assert (known.verdict, known.reason("causal")) == ("known failure", "it rounds")


def test_a_claimed_feature_that_only_other_reasons_refuse_is_not_tested() -> None:
    """As in a sample whose every case with the feature asks for something else, which is refused."""
    refused = entry("refused", "causal", "dropout", reasons=("dropout is not supported",), claimed=("causal",))
    assert (tally("causal", refused).verdict, tally("causal", refused).reason("causal")) == ("not tested", "")
    assert tally("dropout", refused).verdict == "refused"


def test_a_case_judged_without_its_lse_is_refused_for_the_lse_alone() -> None:
    judged = entry("passed", "causal", "lse", reasons=("lse is not supported",), without_lse=True)
    assert tally("causal", judged).verdict == "pass"
    assert (tally("lse", judged).verdict, tally("lse", judged).reason("lse")) == ("refused", "lse is not supported")


class Skipping(Naive):
    """Ends the test that judges it: pytest would call that skipped, expected to fail, or the end of the session."""

    name = "skipping"

    def __init__(self, way_out: BaseException) -> None:
        self.way_out = way_out

    def attend(self, spec, inputs):
        if inputs.mask is not None:
            raise self.way_out
        return super().attend(spec, inputs)


@pytest.mark.parametrize(
    "way_out",
    [
        pytest.skip.Exception("no masks"),
        pytest.xfail.Exception("no masks"),
        pytest.exit.Exception("no masks", returncode=0),
        unittest.SkipTest("no masks"),
        SystemExit(0),
    ],
    ids=lambda way_out: type(way_out).__name__,
)
def test_a_backend_does_not_end_the_test_that_judges_it(way_out: BaseException) -> None:
    assert run(Skipping(way_out), PLAIN) == Outcome("passed")
    with pytest.raises(ConformanceError, match=rf"^skipping raised a {type(way_out).__name__}"):
        run(Skipping(way_out), MASKED)


class Careless(Naive):
    """Leaves a setting of torch changed."""

    name = "careless"

    def __init__(self, change: Callable[[], object]) -> None:
        self.change = change

    def attend(self, spec, inputs):
        self.change()
        return super().attend(spec, inputs)


@pytest.mark.parametrize(
    ("change", "back", "said"),
    [
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32), "the default dtype"),
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False), "deterministic algorithms"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), lambda: torch.set_num_threads(1), "the number of threads"),
        (lambda: torch.rand(1), lambda: None, "the default generator"),
    ],
    ids=["dtype", "deterministic", "threads", "generator"],
)
def test_a_call_leaves_the_process_as_it_was(change: Callable[[], object], back: Callable[[], object], said: str) -> None:
    try:
        with pytest.raises(ConformanceError, match=f"the call (changed|advanced) {said}"):
            run(Careless(change), PLAIN)
    finally:
        back()
