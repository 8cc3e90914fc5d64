"""A few cheap cases that together touch everything the suite asks: for backends that are slow where they are tested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil

from attnzoo.testing.case import Case

__all__ = ["covering_cases"]


def covering_cases(cases: Iterable[Case], *, features: frozenset[str], most_tiles: int = 300) -> list[Case]:
    """The cheapest cases that hold every family, check and dtype, and every pair of a family and a feature.

    Made for Triton kernels in Triton's interpreter, where a tile takes milliseconds.

    Args:
        cases: to choose among, such as `attnzoo.testing.cases.CASES`.
        features: a case that needs another one is left out, for it would only be refused.
        most_tiles: a case of more tiles of 32 x 16 scores is left out.

    Returns:
        The chosen ones in the order of `cases`, every one of which touches something that no other one does.
    """
    candidates = [case for case in cases if case.device == "" and features.issuperset(case.problem.features) and _tiles(case) <= most_tiles]
    touching: Counter[tuple[str, str]] = Counter()
    chosen: list[Case] = []
    for case in sorted(candidates, key=_tiles):
        touched = _touches(case)
        if not touched <= touching.keys():
            touching.update(touched)
            chosen.append(case)
    needed = set()
    for case in chosen:
        touched = _touches(case)
        if all(touching[each] > 1 for each in touched):  # others touch all that it does
            touching.subtract(touched)
        else:
            needed.add(case.id)
    return [case for case in candidates if case.id in needed]


def _touches(case: Case) -> set[tuple[str, str]]:
    problem = case.problem
    gradients = "with gradients" if problem.grads else "without gradients"
    pairs = {(case.family, feature) for feature in (*problem.features, gradients)}
    return {*pairs, ("check", case.check), (problem.dtype, gradients)}


def _tiles(case: Case) -> int:
    """About how many tiles are computed."""
    problem = case.problem
    kv_len = problem.q_len if problem.kv_len is None else problem.kv_len
    return problem.batch * problem.q_heads * ceil(problem.q_len / 32) * ceil(kv_len / 16) * (4 if problem.grads else 1)
