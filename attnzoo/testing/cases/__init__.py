"""CASES: everything that the kit asks of a backend, in order."""

from __future__ import annotations

from attnzoo.testing.case import Case
from attnzoo.testing.cases import (
    around,
    causal,
    claims,
    dropout,
    gradients,
    heads,
    layouts,
    long,
    lse,
    masks,
    memory,
    pairs,
    rejects,
    repeats,
    rows,
    scores,
    sizes,
    storage,
    surroundings,
    windows,
)

__all__ = ["CASES", "case_named"]

MODULES = (
    claims,
    rejects,
    rows,
    scores,
    memory,
    causal,
    sizes,
    storage,
    gradients,
    masks,
    heads,
    windows,
    lse,
    dropout,
    layouts,
    pairs,
    around,
    long,
    surroundings,
    repeats,
)

CASES: tuple[Case, ...] = tuple(case for module in MODULES for case in module.CASES)


def case_named(case_id: str) -> Case:
    """The case of that id; LookupError if there is none."""
    for case in CASES:
        if case.id == case_id:
            return case
    raise LookupError(f"no case is named {case_id!r}")
