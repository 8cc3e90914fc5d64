"""block_sparse through the conformance kit in Triton's interpreter: a few cases with a layout, of every family and feature.

Calls without a layout are flash's, and `test_flash_kit.py` has them.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

from attnzoo.backends.block_sparse import BlockSparse
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
SUBJECT = Subject(BlockSparse(is_interpreted=True))
SMALLEST_BLOCK = 16  # smaller ones are many tiles
UNFIT = ("equal_bits", "a_b_a")  # many calls: minutes in the interpreter
WITH_LAYOUT = [case for case in CASES if case.problem.layout and case.check not in UNFIT]
CHOSEN = covering_cases(
    [case for case in WITH_LAYOUT if min(case.problem.layout.block) >= SMALLEST_BLOCK and case.problem.dtype != "float64"],
    features=SUBJECT.capabilities.forward,
    most_tiles=200,
)


@pytest.mark.parametrize("case", CHOSEN, ids=[case.id for case in CHOSEN])
def test_case(case: Case) -> None:
    outcome = run_case(SUBJECT, case, "cpu")
    if outcome.kind != "passed":
        pytest.skip(f"{outcome.kind}: {'; '.join(outcome.reasons)}")


def test_the_cases_are_few_and_of_every_kind() -> None:
    assert len(CHOSEN) <= 80
    assert {case.check for case in CHOSEN} >= {"accuracy", "layout_as_mask", "claim"}
    features = {feature for case in CHOSEN for feature in case.problem.features}
    assert features >= {"layout", "causal", "window", "mask", "bias", "bias_grad", "segments", "softcap", "dropout", "lse", "value_dim"}
