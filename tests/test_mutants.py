"""The conformance kit can fail: each mutant is caught, by the case that is meant for it, and the original is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mutants import MUTANTS, Mutant, Reference
from mutants.mutant import cases_of
from mutants.table import REGENERATE, caught, cells, committed

from attnzoo.testing.budget import assert_lse_within_budget
from attnzoo.testing.case import Case, Outcome, run_case
from attnzoo.testing.cases import CASES as ALL_CASES
from attnzoo.testing.failure import ConformanceError
from attnzoo.testing.oracle import Results, Truth
from attnzoo.testing.problem import Problem, Table
from attnzoo.testing.refusals import unexplained_refusals
from attnzoo.testing.subject import Subject
from attnzoo.testing.suite import BackendConformance

HERE = [mutant for mutant in MUTANTS if not mutant.needs]
GLOBS = {glob: None for mutant in HERE for glob in (*mutant.caught_by, mutant.passes) if glob}
CASES = {case.id: case for glob in GLOBS for case in cases_of(glob)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_original_passes_every_case_that_catches_a_mutant(case):
    assert run_case(Subject(Reference()), case, "cpu") == Outcome("passed")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught_as_the_table_says(mutant):
    if mutant.needs:
        pytest.skip(f"needs {mutant.needs}")
    found = cells(mutant, caught(mutant))
    row = [found[0], *committed().get(found[0], [])]
    assert found == row, f"docs/mutants.md is out of date; write it anew: {REGENERATE}"


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.passes], ids=lambda mutant: mutant.__name__)
def test_a_mutant_passes_what_its_fault_does_not_touch(mutant):
    for case in cases_of(mutant.passes):
        assert run_case(Subject(mutant()), case, "cpu") == Outcome("passed")


UNSEEN = {
    "compiled": "takes an installed backend",
    "compiled_for_other_memory": "takes an installed backend",
    "compiled_for_other_sizes": "takes an installed backend",
    "named_without_gpu": "takes an installed backend",
    "without_triton": "takes an installed backend",
    "unclaimed_device": "the original claims them all; a test below has one that does not",
}
"""Check -> why no mutant can show that it fails."""


def test_every_check_catches_a_mutant():
    """One that could not fail would prove nothing; what is malformed is refused before a backend sees it."""
    caught = {case.check for mutant in MUTANTS for glob in mutant.caught_by for case in cases_of(glob)}
    here = {case.check for case in ALL_CASES if case.device == "" and not case.check.startswith("reject ")}
    assert here - caught == UNSEEN.keys()


def test_tensors_on_a_device_that_is_not_claimed_must_be_refused():
    class OnCPU(Mutant, abstract=True):
        capabilities = replace(Reference.capabilities, devices={"cpu"})

    class Anywhere(OnCPU, abstract=True):
        def unsupported_reasons(self, spec):
            return []

    (case,) = cases_of("T28-unclaimed-device")
    assert run_case(Subject(OnCPU()), case, "cpu") == Outcome("passed")
    with pytest.raises(ConformanceError, match="doesn't claim tensors on meta, but served it"):
        run_case(Subject(Anywhere()), case, "cpu")


def test_the_table_names_every_mutant_and_no_other():
    names = [mutant.__name__ for mutant in MUTANTS]
    assert len(names) == len(set(names)), "two mutants have one name"
    assert [name for name in committed() if name in names] == names, f"docs/mutants.md is out of date; write it anew: {REGENERATE}"
    silent = [mutant.__name__ for mutant in MUTANTS if not mutant.wrong().endswith(".") or mutant.__doc__ == Mutant.__doc__]
    assert not silent, f"no docstring says what is wrong in {silent}"


@pytest.mark.parametrize("number", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("grads", [(), ("q", "k", "v")], ids=["forward", "backward"])
def test_a_truth_that_is_not_finite_is_a_failure(number, grads):
    """Also of a backend that returns NaN for NaN, and of one that returns numbers."""

    class Zero(Mutant, abstract=True):
        def forward(self, spec, inputs):
            return tuple(torch.zeros_like(result) for result in super().forward(spec, inputs))

    problem = Problem(q_len=8, bias=Table("constant", "qk", size=number), grads=grads)
    for backend in (Reference(), Zero()):
        with pytest.raises(ConformanceError, match="the oracle itself is not finite, so this case judges nothing"):
            run_case(Subject(backend), Case("T35", "nan", problem), "cpu")


def test_an_lse_whose_truth_is_nan_is_a_failure():
    truth = Truth(Results(torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), torch.nan), {}), {}, torch.zeros(1, 1, 1, dtype=torch.bool))
    with pytest.raises(ConformanceError, match="lse: the oracle itself is nan"):
        assert_lse_within_budget(torch.full((1, 1, 1), torch.nan), truth, torch.zeros(1, 1, 1), torch.float32)


def test_refusals_that_no_capability_explains_are_counted():
    class RefusesOddLengths(Mutant, abstract=True):
        def unsupported_reasons(self, spec):
            return ["an odd length is slow here"] if spec.q_len % 2 else []

    share, examples = unexplained_refusals(Subject(RefusesOddLengths()), "cpu")
    assert share > BackendConformance.most_unexplained_refusals
    assert "an odd length is slow here" in examples


def test_refusals_are_counted_among_the_cases_that_are_claimed():
    """Else a backend that claims little may refuse most of it."""

    class ClaimsLittle(Mutant, abstract=True):
        capabilities = replace(Reference.capabilities, forward={"causal"}, backward={"causal"}, dtypes={torch.float32})

        def unsupported_reasons(self, spec):
            return super().unsupported_reasons(spec) or (["not a multiple of 16"] if spec.q_len % 16 else [])

    share, _ = unexplained_refusals(Subject(ClaimsLittle()), "cpu")
    assert share > BackendConformance.most_unexplained_refusals
