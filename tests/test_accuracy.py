"""naive and tiled against the tests' own float64 truth, at the accuracy of the contract; and gradcheck."""

from __future__ import annotations

from dataclasses import replace

import problems
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problems import Drawn

import attnzoo
from attnzoo.backends.tiled import Tiled
from attnzoo.backends.tiles import TileSizes
from attnzoo.testing import oracle as kit
from attnzoo.testing import yardstick
from attnzoo.testing.budget import assert_results_within_budget
from attnzoo.testing.failure import ConformanceError
from attnzoo.testing.oracle import Results, Truth
from attnzoo.testing.subject import Subject

BACKENDS = ("naive", "tiled")
DTYPES = ("float16", "bfloat16", "float32", "float64")
SMALL_TILES = TileSizes(rows=8, columns=8, heads=2)


def judge(problem, *subjects):
    """Forward and gradients of each subject within the budget of the contract."""
    call, solution = problems.make(problem)
    amounts = kit.solve(call)
    measured = yardstick.solve(call)
    grads = {name: torch.from_numpy(solution.grads[name]) for name in call.grads}
    results = Results(torch.from_numpy(solution.o), torch.from_numpy(solution.lse), grads)
    for name, mine in results.named().items():
        torch.testing.assert_close(mine, amounts.results.named()[name], rtol=1e-9, atol=1e-9, msg=f"the two oracles differ in {name}")
    truth = Truth(results, amounts.amounts, amounts.empty_rows)
    for subject in subjects:
        try:
            assert_results_within_budget(subject.run(call), truth, measured, call.q.dtype)
        except ConformanceError as error:
            raise AssertionError(f"{subject.name}: {error}") from error


ALONE = {
    "plain": {},
    "cross": {"q_len": 7, "kv_len": 30},
    "causal": {"causal": True},
    "causal-top-left": {"causal": True, "q_len": 30, "align": "top_left"},
    "causal-bottom-right": {"causal": True, "kv_len": 30, "align": "bottom_right"},
    "causal-bottom-right-empty-rows": {"causal": True, "q_len": 30, "align": "bottom_right"},
    "window": {"window": (3, 5)},
    "window-left": {"window": (4, None)},
    "window-zero": {"window": (0, 0)},
    "window-rectangle": {"window": (6, 0), "kv_len": 31, "align": "bottom_right"},
    "mask": {"mask": "bhqk"},
    "mask-broadcast": {"mask": "b1q1"},
    "bias": {"bias": "bhqk"},
    "bias-broadcast": {"bias": "1h1k"},
    "bias-2-dims": {"bias": "qk"},
    "bias-other-dtype": {"bias": "11qk", "bias_dtype": "float64"},
    "segments": {"segments": True},
    "layout-bits": {"layout": "bits"},
    "layout-blocks": {"layout": "blocks", "block": (5, 3)},
    "layout-band": {"layout": "band"},
    "layout-segments": {"layout": "segments"},
    "scale-zero": {"scale": 0.0},
    "scale-negative": {"scale": -0.7},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.4},
    "lse": {"loss": "lse"},
    "o-and-lse": {"loss": "o+lse"},
    "one-head": {"kv_heads": 1, "group": 1},
    "many-heads-to-one": {"kv_heads": 1, "group": 6},
    "narrow-values": {"value_dim": 3},
    "wide-values": {"value_dim": 40},
    "heads-inside": {"heads_inside": True},
    "large-scores": {"size": 6.0},
    "no-gradient": {"grads": ()},
    "only-bias": {"bias": "11qk", "grads": ("bias",)},
    "only-sinks": {"sinks": True, "grads": ("sinks",)},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALONE)
def test_one_argument_alone(name, dtype):
    subjects = [*map(Subject, BACKENDS), Subject(Tiled(SMALL_TILES))]
    judge(Drawn(**ALONE[name], dtype=dtype, seed=len(name)), *subjects)


tiles = st.builds(TileSizes, rows=st.sampled_from([5, 16]), columns=st.sampled_from([8, 11]), heads=st.sampled_from([1, 4]))


SATURATED = Drawn(batch=1, kv_heads=1, group=1, q_len=1, kv_len=23, head_dim=16, value_dim=1, scale=1.0, softcap=0.5, size=4.0)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=90, deadline=None)
@given(problem=problems.drawn, sizes=tiles)
@example(problem=SATURATED, sizes=SMALL_TILES)
def test_random_combinations(dtype, problem, sizes):
    judge(replace(problem, dtype=dtype), *map(Subject, BACKENDS), Subject(Tiled(sizes)))


LONG = {
    "causal": {"causal": True, "align": "bottom_right"},
    "window": {"window": (40, 25), "align": "top_left"},
    "tables": {"mask": "11qk", "bias": "1h1k", "softcap": 3.0},
    "segments": {"segments": True, "sinks": True},
    "layout-blocks": {"layout": "blocks", "block": (64, 32)},
    "layout-bits": {"layout": "bits", "block": (40, 48), "causal": True, "align": "top_left"},
    "layout-band": {"layout": "band", "block": (512, 128), "dtype": "bfloat16"},
    "half": {"dtype": "float16", "loss": "o+lse"},
}


@pytest.mark.parametrize("name", LONG)
def test_more_than_one_tile_of_the_default_size(name):
    judge(Drawn(**{"batch": 1, "kv_heads": 1, "q_len": 530, "kv_len": 1050} | LONG[name], seed=5), Subject("tiled"))


def test_the_judge_can_fail():
    call, _ = problems.make(Drawn(dtype="float32"))

    class Off(Subject):
        def run(self, call):
            good = super().run(call)
            return replace(good, o=good.o * (1 + 1e-4))

    with pytest.raises(AssertionError, match=r"o: (max|mean)\|err\|"):
        judge(Drawn(dtype="float32"), Off("naive"))
    assert call.grads == ("q", "k", "v"), f"the problem asks for {call.grads}"


DIFFERENTIATED = {
    "plain": {},
    "causal-window": {"causal": True, "window": (2, None), "kv_len": 6, "align": "bottom_right"},
    "bias-softcap": {"bias": "1h1k", "softcap": 1.0},
    "mask-sinks": {"mask": "11qk", "sinks": True},
    "dropout-segments": {"dropout_p": 0.3, "segments": True},
    "layout": {"layout": "bits", "block": (2, 3)},
    "everything": {
        "causal": True,
        "align": "top_left",
        "kv_len": 5,
        "mask": "bhqk",
        "bias": "bhqk",
        "segments": True,
        "layout": "band",
        "softcap": 2.0,
        "sinks": True,
        "dropout_p": 0.2,
        "scale": -0.6,
    },
}


@pytest.mark.parametrize("backend", [*BACKENDS, "tiled in small tiles"])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradcheck_and_gradgradcheck(name, backend):
    sizes = {"batch": 1, "kv_heads": 1, "q_len": 4, "kv_len": 4, "head_dim": 2, "value_dim": 1}
    call, _ = problems.make(Drawn(**sizes | DIFFERENTIATED[name], dtype="float64", bias_dtype="float64", seed=3))
    others = [name for name in call.grads if name not in ("q", "k", "v")]
    empty = kit.solve(call).empty_rows
    tiled = Subject(Tiled(TileSizes(rows=3, columns=3, heads=1)))

    def outputs(q, k, v, *tensors):
        options = call.options | dict(zip(others, tensors))
        serve = tiled if backend == "tiled in small tiles" else attnzoo.get(backend)
        o, lse = serve(q, k, v, **options)
        return o, lse.masked_fill(empty & (lse == -torch.inf), 0.0)

    leaves = [call.leaf(name) for name in call.grads]
    finite = [leaf.detach().clamp(min=-3).requires_grad_() for leaf in leaves]  # numeric differences of -inf are nan
    assert torch.autograd.gradcheck(outputs, finite), f"{backend}: first derivatives are wrong"
    assert torch.autograd.gradgradcheck(outputs, finite, fast_mode=backend != "naive"), f"{backend}: second derivatives are wrong"
