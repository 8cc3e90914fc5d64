"""A backend of few shapes, as kernels often are: it passes the kit by what it claims, and no claim goes unasked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnzoo.backend import Capabilities
from attnzoo.backends.naive import Naive
from attnzoo.testing import BackendConformance
from attnzoo.testing.case import Case, judged_problem, run_case
from attnzoo.testing.cases import CASES
from attnzoo.testing.failure import ConformanceError
from attnzoo.testing.problem import Problem
from attnzoo.testing.random_problems import run_chunk
from attnzoo.testing.refusals import unexplained_refusals
from attnzoo.testing.subject import Subject

REQUIRED = [case for case in CASES if case.required]


class Narrow(Naive):
    """Head dims of 64, 96 and 128, layouts of whole blocks of 128 tokens, and nothing else that is special."""

    name = "narrow"
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32}),
        head_dims=(64, 128),
        head_dim_multiple=32,
        block_multiple=128,
        forward=frozenset({"causal", "layout", "value_dim"}),
        backward=frozenset({"causal", "layout", "value_dim"}),
    )

    def unsupported_reasons(self, spec):
        reasons = super().unsupported_reasons(spec)
        if spec.layout is not None and (spec.q_len % 128 or spec.kv_len % 128):
            reasons.append("with a layout it takes lengths in multiples of 128")
        return reasons


class ForwardOnly(Narrow):
    """As an inference engine's."""

    name = "forward_only"
    capabilities = replace(Narrow.capabilities, backward=frozenset(), gradients=False)


@pytest.mark.parametrize("backend", [Narrow(), ForwardOnly()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("case", REQUIRED, ids=lambda case: case.id)
def test_it_passes_what_is_required(backend, case):
    assert run_case(Subject(backend), case, "cpu").kind in ("passed", "refused", "forward only")


def test_its_refusals_are_explained():
    share, examples = unexplained_refusals(Subject(Narrow()), "cpu")
    assert share <= BackendConformance.most_unexplained_refusals, examples


def test_random_problems_are_within_its_claims():
    assert run_chunk(Subject(Narrow()), "cpu", profile="quick", chunk=0).kind == "passed"


class Liar(Narrow):
    name = "liar"

    def unsupported_reasons(self, spec):
        return [*super().unsupported_reasons(spec), *(["no layouts today"] if spec.layout is not None else [])]


def test_a_claim_that_whole_tiles_are_refused_too_is_a_lie():
    (case,) = [case for case in CASES if case.id == "T32-claim-layout-forward"]
    with pytest.raises(ConformanceError, match=r"but refuses: .*no layouts today"):
        run_case(Subject(Liar()), case, "cpu")


class Wide(Narrow):
    """It serves head dims between the multiples that it claims."""

    name = "wide"

    def unsupported_reasons(self, spec):
        return [reason for reason in super().unsupported_reasons(spec) if "multiples of 32" not in reason]


def test_a_head_dim_between_the_multiples_must_be_refused():
    (case,) = [case for case in CASES if case.check == "claimed_head_dims"]
    with pytest.raises(ConformanceError, match="doesn't claim head dim 65, but served it"):
        run_case(Subject(Wide()), case, "cpu")


class HalfPrecision(Naive):
    """Every feature, in the dtypes and head dims of a kernel for tensor cores."""

    name = "half_precision"
    capabilities = replace(Naive.capabilities, dtypes=frozenset({torch.bfloat16, torch.float16}), head_dims=(64, 128), head_dim_multiple=32)


ASKED_IN_ITS_DIMS = [
    case
    for case in CASES
    if not (case.required or case.is_about_dtype or case.is_about_head_dims) and case.judges_result and case.device == ""
]
ONE_A_CHECK = list({case.check: case for case in ASKED_IN_ITS_DIMS}.values())


@pytest.mark.parametrize("case", ONE_A_CHECK, ids=lambda case: case.check)
def test_a_case_about_neither_dtype_nor_head_dim_is_asked_in_claimed_ones(case):
    problem = judged_problem(Subject(HalfPrecision()), case, "cpu")
    assert (problem.dtype, problem.head_dim) == ("bfloat16", 64)
    assert run_case(Subject(HalfPrecision()), case, "cpu").kind in ("passed", "not applicable")


def test_most_cases_reach_a_kernel_for_tensor_cores():
    subject = Subject(HalfPrecision())
    asked = [judged_problem(subject, case, "cpu") for case in CASES]
    reached = [problem for problem in asked if problem.dtype in ("bfloat16", "float16") and problem.head_dim in (64, 96, 128)]
    assert len(reached) > 0.5 * len(CASES)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("padding-fp32", Problem()), ("d32", Problem(dtype="bfloat16")), ("d48", Problem(dtype="bfloat16", head_dim=48))],
)
def test_a_case_about_one_is_asked_as_it_stands(name, problem):
    judged = judged_problem(Subject(HalfPrecision()), Case("T01", name, problem), "cpu")
    assert (judged.dtype, judged.head_dim) == (problem.dtype, 64 if name == "padding-fp32" else problem.head_dim)
