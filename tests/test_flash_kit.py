"""flash through the conformance kit in Triton's interpreter: a few cases of every family, check and feature."""

from __future__ import annotations

import importlib.util
import os

import pytest

from attnzoo.backends.flash import Flash
from attnzoo.testing.case import Case, run_case
from attnzoo.testing.cases import CASES
from attnzoo.testing.covering import covering_cases
from attnzoo.testing.subject import Subject

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs triton, in its interpreter (TRITON_INTERPRET=1)",
    ),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
SUBJECT = Subject(Flash(is_interpreted=True))
UNFIT = "equal_bits"  # many calls: minutes in the interpreter
CHOSEN = covering_cases([case for case in CASES if case.check != UNFIT], features=SUBJECT.capabilities.forward)


@pytest.mark.parametrize("case", CHOSEN, ids=[case.id for case in CHOSEN])
def test_case(case: Case) -> None:
    outcome = run_case(SUBJECT, case, "cpu")
    if outcome.kind != "passed":
        pytest.skip(f"{outcome.kind}: {'; '.join(outcome.reasons)}")


def test_the_cases_are_few_and_of_every_kind() -> None:
    assert len(CHOSEN) <= 300
    assert {feature for case in CHOSEN for feature in case.problem.features} == SUBJECT.capabilities.backward - {"double_backward"}
    assert {case.problem.dtype for case in CHOSEN} >= {"float16", "bfloat16", "float32"}
