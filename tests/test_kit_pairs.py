"""Every two features that can meet in a call meet in a fixed case that judges the gradients."""

from __future__ import annotations

from itertools import combinations

import pytest

from attnzoo.backend import FEATURES
from attnzoo.testing.cases import CASES
from attnzoo.testing.cases.pairs import NEVER_MEET, PARTS, meeting

NO_OPTION = {"double_backward"}  # what is done with the outputs of a call, not what the call asks for: T24-double-backward-*
PAIRS = [pair for pair in combinations(PARTS, 2) if pair not in NEVER_MEET]


def test_every_feature_is_a_part() -> None:
    assert {*PARTS, *NO_OPTION} == {*FEATURES}


@pytest.mark.parametrize("dtypes", [{"float32"}, {"float16", "bfloat16"}], ids=["single", "half"])
def test_every_two_features_meet_with_gradients(dtypes: set[str]) -> None:
    met: set[tuple[str, ...]] = set()
    for case in CASES:
        problem = case.problem
        if case.check == "accuracy" and not case.device and problem.dtype in dtypes and {"q", "k", "v"} <= {*problem.grads}:
            met |= {pair for pair in combinations(PARTS, 2) if {*pair} <= {*problem.features}}
    assert [pair for pair in PAIRS if pair not in met] == []


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_pair_meets_alone(pair: tuple[str, str]) -> None:
    implied = {"bias"} if "bias_grad" in pair else set()
    assert {*meeting(*pair).features} == {*pair} | implied


@pytest.mark.parametrize("pair", NEVER_MEET, ids="-".join)
def test_pairs_that_are_said_never_to_meet_have_no_call(pair: tuple[str, str]) -> None:
    assert not any({*pair} <= {*case.problem.features} for case in CASES)
    assert NEVER_MEET[pair]
