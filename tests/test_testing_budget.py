"""The accuracy rule itself: it passes an algorithm known to be right, and catches a gradient that is 1% off."""

from __future__ import annotations

from dataclasses import replace

import emulation
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

from attnzoo.testing import oracle, yardstick
from attnzoo.testing.budget import assert_lse_within_budget, assert_results_within_budget, assert_within_budget
from attnzoo.testing.failure import ConformanceError
from attnzoo.testing.inputs import make_call
from attnzoo.testing.oracle import Results, Truth
from attnzoo.testing.problem import DTYPES, Blocks, Problem, Segments, Sinks, Table
from attnzoo.testing.strategies import ALL_FEATURES, problems

CHUNKS, EXAMPLES = 4, 250  # 1,000 problems of each dtype


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_algorithm_passes(dtype: str, chunk: int) -> None:
    @seed(chunk)
    @settings(max_examples=EXAMPLES, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(problems(features=ALL_FEATURES, dtypes=(dtype,)))
    def check(problem: Problem) -> None:
        call = make_call(problem)
        results = emulation.run(call)
        results = results if problem.return_lse else Results(results.o, None, results.grads)
        try:
            assert_results_within_budget(results, oracle.solve(call), yardstick.solve(call), getattr(torch, dtype))
        except ConformanceError as error:
            raise ConformanceError(f"{error}: {problem!r}") from error

    check()


STORED_BELOW_NORMAL = Problem(
    batch=3,
    q_heads=3,
    q_len=80,
    head_dim=8,
    dtype="float16",
    scale=1.0,
    mask=Table("triangle", "bh11"),
    layout=Blocks("pairs", (64, 64)),
    sinks=Sinks("large"),
    grads=("q", "k", "v", "sinks"),
    grad_storage="sum",
    seed=3,
)


def test_o_that_is_stored_below_the_least_normal_number_is_forgiven() -> None:
    """A large sink leaves o next to nothing; the gradient of the sink is summed from what fp16 keeps of it."""
    judged(STORED_BELOW_NORMAL, emulation.run(make_call(STORED_BELOW_NORMAL)))


FEW_ROWS = Problem(
    batch=1,
    q_heads=6,
    kv_heads=2,
    q_len=8,
    kv_len=1030,
    head_dim=40,
    value_dim=1,
    dtype="float16",
    causal=True,
    align="top_left",
    scale=0.0,
    softcap=5.0,
    dropout_p=0.9,
    dropout_seed=2**31,
    mask=Table("padding"),
    bias=Table("random", "b111", storage="expand_batch", dtype="float32"),
    segments=Segments("negative"),
    layout=Blocks("all", (32, 16), "b1"),
    sinks=Sinks("zeros", "float32", "step_dim"),
    storage=("expand_length", "step", "slack"),
    offset=3,
    grads=("k", "v", "bias", "sinks"),
    grad_storage="expand_batch",
    seed=54,
)


def test_a_sink_in_fp32_may_take_its_gradient_from_an_o_in_fp16() -> None:
    """The yardstick rounds nothing on the way there; what 8 rows of o were rounded by does not average out."""
    judged(FEW_ROWS, emulation.run(make_call(FEW_ROWS)))


FEW_ROUNDINGS = {
    "found on a GPU": Problem(
        q_heads=9,
        kv_heads=3,
        q_len=7,
        kv_len=1,
        head_dim=16,
        value_dim=1,
        dtype="float16",
        causal=True,
        align="bottom_right",
        scale=1.0,
        dropout_p=0.9,
        dropout_seed=11400714819323198485,
        sinks=Sinks(),
        storage=("contiguous", "expand_heads", "contiguous"),
        grads=(),
        seed=8,
    ),
    "a pair": Problem(
        batch=1, kv_heads=1, q_len=1, kv_len=1, head_dim=4, value_dim=1, dtype="bfloat16", sinks=Sinks(), grads=("q", "k", "v", "sinks")
    ),
    "a sink in fp32": Problem(
        batch=1,
        kv_heads=1,
        q_len=1,
        kv_len=2,
        head_dim=4,
        value_dim=2,
        dtype="float16",
        sinks=Sinks("random", "float32"),
        grads=("q", "k", "v", "sinks"),
    ),
    "dropout leaves little": Problem(
        batch=1, q_heads=1, kv_heads=1, q_len=5, kv_len=3, head_dim=1, value_dim=4, dtype="float16", dropout_p=0.9, dropout_seed=3
    ),
    "one query": Problem(
        kv_heads=2, q_len=1, kv_len=4, head_dim=1, value_dim=1, dtype="bfloat16", bias=Table(), grads=("q", "k", "v", "bias")
    ),
}


@pytest.mark.parametrize("name", FEW_ROUNDINGS)
def test_a_few_roundings_are_not_judged_by_luck(name: str) -> None:
    """The yardstick of a pair or two can be right by chance, and nothing else be near enough: 1 in 100 such problems failed."""
    for number in range(150):
        problem = replace(FEW_ROUNDINGS[name], seed=FEW_ROUNDINGS[name].seed + number)
        judged(problem, emulation.run(make_call(problem)))


def test_a_whole_rounding_too_far_is_found_in_a_single_element() -> None:
    """Few roundings are allowed for whole, not more: twice of them is found."""
    problem = Problem(batch=1, q_heads=1, kv_heads=1, q_len=1, kv_len=1, head_dim=4, value_dim=1, dtype="float16", grads=())
    results = emulation.run(make_call(problem))
    off = results.o * (1 + 4 * torch.finfo(torch.float16).eps)
    with pytest.raises(ConformanceError, match="o: max"):
        judged(problem, Results(off, results.lse, {}))


EVERY_GRADIENT = Problem(
    q_heads=4,
    kv_heads=2,
    q_len=100,
    kv_len=130,
    head_dim=64,
    bias=Table("random", "1hqk"),
    sinks=Sinks(),
    grads=("q", "k", "v", "bias", "sinks"),
)
VARIATIONS = {
    "full": EVERY_GRADIENT,
    "causal": replace(EVERY_GRADIENT, causal=True, align="bottom_right"),
    "window": replace(EVERY_GRADIENT, window=(30, 10), align="top_left"),
    "dropout": replace(EVERY_GRADIENT, dropout_p=0.2, dropout_seed=3),
    "mask": replace(EVERY_GRADIENT, mask=Table("random")),
}


def judged(problem: Problem, results: Results) -> None:
    call = make_call(problem)
    assert_results_within_budget(results, oracle.solve(call), yardstick.solve(call), getattr(torch, problem.dtype))


@pytest.mark.parametrize("name", ["o", "q", "k", "v", "bias", "sinks"])
@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_one_percent_is_caught(dtype: str, variation: str, name: str) -> None:
    problem = replace(VARIATIONS[variation], dtype=dtype)
    if name == "sinks":  # through o, a sink's gradient is a sum over all rows in which nearly everything cancels
        problem = replace(problem, return_lse=True, loss="lse")
    call = make_call(problem)
    got = emulation.run(call)
    results = Results(got.o, None, got.grads)
    judged(problem, results)
    if name == "o":
        wrong = Results(results.o * 1.01, None, results.grads)
    else:
        wrong = Results(results.o, None, {**results.grads, name: results.grads[name] * 1.01})
    with pytest.raises(ConformanceError, match="^o: " if name == "o" else f"^d{name}: "):
        judged(problem, wrong)


def test_nan_in_the_oracle_is_a_failure() -> None:
    good = torch.ones(4, dtype=torch.float64)
    truth = torch.tensor([1.0, torch.nan, 1.0, 1.0], dtype=torch.float64)
    with pytest.raises(ConformanceError, match="oracle itself is not finite"):
        assert_within_budget(truth.float(), truth, truth.float(), (good, good), "o")


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_amounts_that_are_not_finite_are_a_failure(number: float, place: int) -> None:
    """Anything is within nan of the truth, or nothing is: such a case judges nobody."""
    ones = torch.ones(3)
    amounts = [ones.double(), ones.double()]
    amounts[place] = torch.tensor([1.0, number, 1.0], dtype=torch.float64)
    for result in (ones, ones * 2):
        with pytest.raises(ConformanceError, match="o: the amounts of the oracle are not finite, so this case judges nothing"):
            assert_within_budget(result, ones.double(), ones, (amounts[0], amounts[1]), "o")


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_yardstick_of_the_lse_that_is_not_finite_is_a_failure(number: float) -> None:
    lse = torch.zeros(1, 1, 2)
    truth = Truth(Results(torch.zeros(1, 1, 2, 1), lse.double(), {}), {}, torch.zeros(1, 1, 2, dtype=torch.bool))
    with pytest.raises(ConformanceError, match="lse: the yardstick is not finite, so this case judges nothing"):
        assert_lse_within_budget(lse, truth, torch.tensor([[[0.0, number]]]), torch.float32)


def test_nan_in_the_result_is_a_failure() -> None:
    truth = torch.ones(4, dtype=torch.float64)
    result = torch.tensor([1.0, 1.0, torch.nan, 1.0])
    with pytest.raises(ConformanceError, match=r"not finite in 1 of 4 elements, first at \(2,\)"):
        assert_within_budget(result, truth, truth.float(), (truth, truth), "o")


def test_shape_is_judged() -> None:
    truth = torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(ConformanceError, match=r"shape \(3, 2\), the truth \(2, 3\)"):
        assert_within_budget(torch.ones(3, 2), truth, truth.float(), (truth, truth), "dq")


def test_mean_is_judged_where_the_maximum_is_lenient() -> None:
    """Every element off by a little less than the maximum may be: the mean says so."""
    truth = torch.ones(1000, dtype=torch.float64)
    measured = truth.float()
    measured[0] += 1e-3
    with pytest.raises(ConformanceError, match=r"mean\|err\|"):
        assert_within_budget(truth.float() + 5e-4, truth, measured, (truth, truth), "o")


@pytest.mark.parametrize("wrong", [0.693147, 1.00003], ids=["base-2", "slightly-off"])
def test_lse_is_judged(wrong: float) -> None:
    problem = Problem(q_len=40, return_lse=True)
    got = emulation.run(make_call(problem))
    assert got.lse is not None
    judged(problem, got)
    with pytest.raises(ConformanceError, match=r"^lse"):
        judged(problem, Results(got.o, got.lse / wrong, got.grads))


def test_rows_without_a_key_are_exactly_zero() -> None:
    problem = Problem(q_len=40, mask=Table("empty_rows"), grads=())
    results = emulation.run(make_call(problem))
    judged(problem, Results(results.o, None, {}))
    truth = oracle.solve(make_call(problem))
    with pytest.raises(ConformanceError, match="not exactly 0"):
        judged(problem, Results(results.o + truth.empty_rows[..., None] * 1e-9, None, {}))
