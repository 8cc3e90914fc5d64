"""The accuracy rule: how far a result may be from the truth.

    max|err| <= 2 max|err_Y| + F(max)      mean|err| <= 1.25 mean|err_Y| + F(mean)
    F(r) = eps(dtype)/4 * r(A) + 2 * eps(fp32) * r(A')

err is the distance from the float64 truth, err_Y that of the yardstick, A and A' the amounts of the oracle. The
yardstick says what the dtype can do on this very problem; F is the rounding that another order of the same sums
may add. The log-sum-exp: `|err| <= tol * max(1, |lse|) + max|err_Y|`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnzoo.testing.failure import ConformanceError, require
from attnzoo.testing.oracle import Results, Truth

__all__ = ["LSE_TOLERANCE", "assert_lse_within_budget", "assert_results_within_budget", "assert_within_budget"]

MAX_RATIO, MEAN_RATIO = 2.0, 1.25
LSE_TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1e-3, torch.float32: 1e-5, torch.float64: 1e-12}


def assert_within_budget(
    result: Tensor,
    truth: Tensor,
    yardstick: Tensor,
    amounts: tuple[Tensor, Tensor],
    name: str,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Judge one tensor.

    Args:
        result, yardstick: what the backend and the yardstick gave.
        truth: float64.
        amounts: A and A', of the shape of the truth.
        name: for the message.
        dtype: of q, k and v; by default that of the result. The coarser of the two counts.

    Raises:
        ConformanceError: beyond the budget, of the wrong shape, or not finite; also where the truth itself or its
            amounts are not finite: a case that can't be judged has failed.
    """
    require(result.shape == truth.shape, f"{name} has shape {tuple(result.shape)}, the truth {tuple(truth.shape)}")
    require(bool(truth.isfinite().all()), f"{name}: the oracle itself is not finite, so this case judges nothing")
    require(bool(yardstick.isfinite().all()), f"{name}: the yardstick is not finite, so this case judges nothing")
    bad = ~result.isfinite()
    if bool(bad.any()):
        raise ConformanceError(f"{name} is not finite in {int(bad.sum())} of {bad.numel()} elements, first at {_first(bad)}")
    if not result.numel():
        return
    error, allowed_error = (result.double() - truth).abs(), (yardstick.double() - truth).abs()
    epsilon, fine = _epsilons(result.dtype, dtype or result.dtype)
    for kind, ratio in (("max", MAX_RATIO), ("mean", MEAN_RATIO)):
        reduce = torch.amax if kind == "max" else torch.mean
        found = float(reduce(error))
        floor = epsilon / 4 * float(reduce(amounts[0])) + 2 * fine * float(reduce(amounts[1]))
        require(math.isfinite(floor), f"{name}: the amounts of the oracle are not finite, so this case judges nothing")
        allowed = ratio * float(reduce(allowed_error)) + floor
        if not found <= allowed:
            worst = error == error.amax()
            raise ConformanceError(
                f"{name}: {kind}|err| is {found:.3e}, allowed {allowed:.3e} = {ratio} * {float(reduce(allowed_error)):.3e} (yardstick) "
                f"+ {floor:.3e} (rounding); worst at {_first(worst)}: got {_at(result, worst):.6g}, truth {_at(truth, worst):.6g}"
            )


def _epsilons(result: torch.dtype, dtype: torch.dtype) -> tuple[float, float]:
    """eps(dtype), and the eps of the accumulation: fp32's, or fp64's for fp64."""
    epsilon = max(torch.finfo(result).eps, torch.finfo(dtype).eps)
    return epsilon, torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(where.nonzero()[0].tolist())


def _at(tensor: Tensor, where: Tensor) -> float:
    return float(tensor[_first(where)])


def assert_lse_within_budget(lse: Tensor, truth: Truth, yardstick: Tensor, dtype: torch.dtype) -> None:
    """Judge the log-sum-exp: natural log, fp32 (fp64 for fp64), -inf exactly where the truth is -inf."""
    expected = truth.results.lse
    assert expected is not None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    require(lse.dtype == wide, f"lse has dtype {lse.dtype}; it is {wide} for {dtype} inputs")
    require(lse.shape == expected.shape, f"lse has shape {tuple(lse.shape)}; it is (B, Hq, Sq) = {tuple(expected.shape)}")
    require(not bool(expected.isnan().any()), "lse: the oracle itself is nan, so this case judges nothing")
    empty = expected == -torch.inf
    wrong = (lse == -torch.inf) != empty
    if bool(wrong.any()):
        place = _first(wrong)
        raise ConformanceError(f"lse at {place} is {float(lse[place])}, the truth is {float(expected[place])}")
    lse, expected, yardstick = lse[~empty].double(), expected[~empty], yardstick[~empty].double()
    if not lse.numel():
        return
    require(bool(yardstick.isfinite().all()), "lse: the yardstick is not finite, so this case judges nothing")
    error = (lse - expected).abs()
    allowed = LSE_TOLERANCE[dtype] * expected.abs().clamp(min=1.0) + (yardstick - expected).abs().amax()
    wrong = ~(error <= allowed)
    if bool(wrong.any()):
        place = _first(wrong)
        raise ConformanceError(
            f"lse: |err| is {float(error[place]):.3e}, allowed {float(allowed[place]):.3e}: "
            f"got {float(lse[place]):.8g}, truth {float(expected[place]):.8g}; {int(wrong.sum())} of {wrong.numel()} rows are off"
        )


def assert_results_within_budget(results: Results, truth: Truth, yardstick: Results, dtype: torch.dtype) -> None:
    """Judge every tensor of a call; rows that see no key are exactly 0."""
    require(results.o.dtype == dtype, f"o has dtype {results.o.dtype}; q has {dtype}")
    expected, measured = truth.results.named(), yardstick.named()
    for name, result in results.named().items():
        assert_within_budget(result, expected[name], measured[name], truth.amounts[name], name, dtype=dtype)
    empty = truth.empty_rows
    require(not bool(results.o[empty].any()), "o is not exactly 0 in a row that sees no key")
    if "q" in results.grads:
        require(not bool(results.grads["q"][empty].any()), "dq is not exactly 0 in a row that sees no key")
    if results.lse is not None:
        assert yardstick.lse is not None
        assert_lse_within_budget(results.lse, truth, yardstick.lse, dtype)
