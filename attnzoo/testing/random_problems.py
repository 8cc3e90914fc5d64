"""Random problems for one backend: drawn within its claims, the same ones every time, shrunk when one fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

from attnzoo.testing.case import Case, run_case
from attnzoo.testing.failure import ConformanceError
from attnzoo.testing.problem import DTYPES, Problem
from attnzoo.testing.strategies import ALL_FEATURES, problems, problems_of_variant
from attnzoo.testing.variants import VARIANTS

if TYPE_CHECKING:
    from attnzoo.testing.subject import Subject

__all__ = ["run_chunk", "run_variant"]

EXAMPLES = {"quick": 20, "deep": 100}  # problems a chunk


def run_chunk(subject: Subject, device: str, *, profile: str, chunk: int) -> None:
    """The problems of one chunk.

    Raises:
        ConformanceError: with the shrunk problem, and the line that repeats it.
    """
    strategy = claimed_problems(subject) if profile == "quick" else st.sampled_from(claimed_variants(subject)).flatmap(problems_of_variant)
    _judge_all(subject, device, strategy, examples=EXAMPLES[profile], number=chunk)


def run_variant(subject: Subject, device: str, place: int) -> None:
    """Two problems of one kernel variant: what compiles it."""
    _judge_all(subject, device, problems_of_variant(claimed_variants(subject)[place]), examples=2, number=place)


def _judge_all(subject: Subject, device: str, strategy: st.SearchStrategy[Problem], *, examples: int, number: int) -> None:
    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        print_blob=False,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def check(problem: Problem) -> None:
        try:
            run_case(subject, Case("T00", "random", problem), device)
        except Exception as error:
            line = problem.reproduction(subject.name, device=device)
            raise ConformanceError(f"{type(error).__name__}: {error}\nrepeat: {line}") from error

    check()


def claimed_dtypes(subject: Subject) -> tuple[str, ...]:
    return tuple(dtype for dtype in DTYPES if any(str(claimed) == f"torch.{dtype}" for claimed in subject.capabilities.dtypes))


def claimed_problems(subject: Subject) -> st.SearchStrategy[Problem]:
    """Problems within what a backend claims, forward and backward."""
    claims = subject.capabilities
    features = ALL_FEATURES & claims.forward & claims.backward
    dims = (claims.head_dims[0], min(128, claims.head_dims[1]))
    return problems(features=features, dtypes=claimed_dtypes(subject), head_dims=dims)


def claimed_variants(subject: Subject) -> list[dict[str, str]]:
    """The variants, each with what the backend doesn't claim left out: every two of its claims still meet."""
    claims = subject.capabilities
    features = claims.forward & claims.backward
    dtypes = claimed_dtypes(subject)
    made = []
    for place, variant in enumerate(VARIANTS):
        part = dict(variant)
        for factor in ("mask", "bias", "segments", "layout", "softcap", "sinks", "dropout", "lse", "deterministic"):
            part[factor] = variant[factor] if factor in features else "none"
        if part["bias"] in ("full", "heads") and "bias_grad" not in features:
            part["bias"] = "fixed"
        part["band"] = variant["band"] if set(_band_features(variant["band"])) <= features else "none"
        part["group"] = variant["group"] if "grouped_heads" in features else "1"
        part["value_dim"] = variant["value_dim"] if "value_dim" in features else "same"
        part["dtype"] = variant["dtype"] if variant["dtype"] in dtypes else dtypes[place % len(dtypes)]
        part["head_dim"] = str(min(max(int(variant["head_dim"]), claims.head_dims[0]), claims.head_dims[1]))
        made.append(part)
    return made


def _band_features(band: str) -> list[str]:
    return {"none": [], "causal_window": ["causal", "window"]}.get(band, [band])
