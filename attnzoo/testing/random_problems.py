"""Random problems for one backend: drawn within its claims, the same ones every time, shrunk when one fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

from attnzoo.pytest_plugin import is_sticky
from attnzoo.testing.case import Case, claimed_dtypes, run_case
from attnzoo.testing.failure import ConformanceError
from attnzoo.testing.journal import note
from attnzoo.testing.outcome import Outcome
from attnzoo.testing.problem import DTYPES, Problem
from attnzoo.testing.strategies import ALL_FEATURES, problems, problems_of_variant
from attnzoo.testing.variants import VARIANTS
from attnzoo.testing.verdict import FORWARD_ONLY

if TYPE_CHECKING:
    from attnzoo.backend import Capabilities
    from attnzoo.testing.subject import Subject

__all__ = ["run_chunk", "run_variant"]


class LastProblem(BaseException):
    """Hypothesis must not go on to a simpler problem: a sticky CUDA error fails them all, and a hang has used up the time.

    So it is no Exception."""


Repeat = Callable[[Problem], str]
EXAMPLES = {"quick": 20, "deep": 100}  # problems a chunk


def run_chunk(
    subject: Subject, device: str, *, profile: str, chunk: int, dtypes: Sequence[str] = (), repeat: Repeat | None = None
) -> Outcome:
    """The problems of one chunk, of these dtypes alone if any are given.

    Args:
        repeat: a problem -> the command that repeats it; by default as for an installed backend.

    Returns:
        "passed", or "refused" if every problem was, or "not applicable" if none of the dtypes is claimed.

    Raises:
        ConformanceError: with the shrunk problem, and the line that repeats it.
    """
    claims, chosen = subject.claims_on(device), chosen_dtypes(subject.claims_on(device), dtypes)
    if not chosen:
        return _no_dtype(dtypes)
    if profile == "quick":
        strategy = claimed_problems(claims, chosen)
    else:
        parts = [part for variant in VARIANTS for part in claimed_parts(claims, chosen, variant)]
        strategy = st.sampled_from(parts).flatmap(problems_of_variant)
    return _judge_all(subject, device, strategy, examples=EXAMPLES[profile], number=chunk, repeat=repeat)


def run_variant(subject: Subject, device: str, place: int, *, dtypes: Sequence[str] = (), repeat: Repeat | None = None) -> Outcome:
    """Two problems of one kernel variant, or of each of its two parts: what compiles it."""
    claims, chosen = subject.claims_on(device), chosen_dtypes(subject.claims_on(device), dtypes)
    if not chosen:
        return _no_dtype(dtypes)
    parts = claimed_parts(claims, chosen, VARIANTS[place])
    outcomes = [_judge_all(subject, device, problems_of_variant(part), examples=2, number=place, repeat=repeat) for part in parts]
    return next((outcome for outcome in outcomes if outcome.kind == "passed"), outcomes[0])


def _no_dtype(dtypes: Sequence[str]) -> Outcome:
    return Outcome("not applicable", (f"claims none of {', '.join(dtypes)}",))


def _judge_all(
    subject: Subject, device: str, strategy: st.SearchStrategy[Problem], *, examples: int, number: int, repeat: Repeat | None
) -> Outcome:
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def check(problem: Problem) -> None:
        line = repeat(problem) if repeat else problem.reproduction(subject.name, device=device)
        note(line)
        try:
            outcome = run_case(subject, Case("T00", "random", problem), device)
        except (Exception, pytest.fail.Exception) as error:
            said = str(error) if isinstance(error, ConformanceError) else f"{type(error).__name__}: {error}"
            text = f"{said}\nproblem: {problem!r}\nrepeat: {line}"
            if is_sticky(str(error)) or isinstance(error, pytest.fail.Exception):
                raise LastProblem(text) from error
            raise ConformanceError(text) from error
        kinds[outcome.kind] += 1
        reasons.update(outcome.reasons)

    try:
        check()
    except LastProblem as error:
        raise ConformanceError(str(error)) from error
    if kinds["passed"] or kinds[FORWARD_ONLY]:
        return Outcome("passed")
    return Outcome("refused", tuple(reason for reason, _ in reasons.most_common(3)))


def chosen_dtypes(claims: Capabilities, dtypes: Sequence[str]) -> tuple[str, ...]:
    """Those that are claimed, of the given ones if any are."""
    return tuple(dtype for dtype in claimed_dtypes(claims, DTYPES) if not dtypes or dtype in dtypes)


def claimed_problems(claims: Capabilities, dtypes: tuple[str, ...]) -> st.SearchStrategy[Problem]:
    """Problems within what is claimed; where more is claimed without gradients than with them, half have none."""
    forward, backward = ALL_FEATURES & claims.forward, ALL_FEATURES & claims.forward & claims.backward
    drawn = partial(
        problems,
        dtypes=dtypes,
        head_dims=(claims.head_dims[0], min(128, claims.head_dims[1])),
        head_dim_multiple=claims.head_dim_multiple,
        block_multiple=claims.block_multiple,
    )
    trained = drawn(features=backward | (ALL_FEATURES & claims.backward & {"bias_grad"}))
    if forward == backward and claims.gradients:
        return trained
    alone = drawn(features=forward, has_grads=False)
    return st.one_of(trained, alone) if claims.gradients else alone


def claimed_parts(claims: Capabilities, dtypes: tuple[str, ...], variant: Mapping[str, str]) -> list[dict[str, str]]:
    """A variant with what is not claimed left out: every two claims still meet.

    Two of them, one without gradients, where more is claimed without gradients than with them.
    """
    trained = _claimed_part(claims, dtypes, variant, claims.backward)
    alone = {**_claimed_part(claims, dtypes, variant, claims.forward), "grads": "none"}
    if not claims.gradients:
        return [alone]
    return [trained] if {**trained, "grads": "none"} == alone else [trained, alone]


def _claimed_part(claims: Capabilities, dtypes: tuple[str, ...], variant: Mapping[str, str], features: Set[str]) -> dict[str, str]:
    part = dict(variant)
    for factor in ("mask", "bias", "segments", "layout", "softcap", "sinks", "dropout", "lse", "deterministic"):
        part[factor] = variant[factor] if factor in features else "none"
    if part["bias"] in ("full", "heads") and "bias_grad" not in claims.backward:
        part["bias"] = "fixed"
    part["band"] = variant["band"] if set(_band_features(variant["band"])) <= features else "none"
    part["group"] = variant["group"] if "grouped_heads" in features else "1"
    part["value_dim"] = variant["value_dim"] if "value_dim" in features else "same"
    part["dtype"] = variant["dtype"] if variant["dtype"] in dtypes else dtypes[VARIANTS.index(dict(variant)) % len(dtypes)]
    part["head_dim"] = str(claims.nearest_head_dim(int(variant["head_dim"])))
    return part


def _band_features(band: str) -> list[str]:
    return {"none": [], "causal_window": ["causal", "window"]}.get(band, [band])
