"""The conformance kit: the contract, executed. Judges any backend, ours or a stranger's.

Names are resolved when first used: the pytest plugin reads this package at start-up, and must not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnzoo.testing.budget import assert_within_budget
    from attnzoo.testing.case import Case, run_case
    from attnzoo.testing.failure import ConformanceError
    from attnzoo.testing.inputs import Call, make_call
    from attnzoo.testing.outcome import Outcome
    from attnzoo.testing.problem import Blocks, Problem, Segments, Sinks, Table
    from attnzoo.testing.subject import Subject
    from attnzoo.testing.suite import BackendConformance

_HOMES = {
    "BackendConformance": "suite",
    "Blocks": "problem",
    "Call": "inputs",
    "Case": "case",
    "ConformanceError": "failure",
    "Outcome": "outcome",
    "Problem": "problem",
    "Segments": "problem",
    "Sinks": "problem",
    "Subject": "subject",
    "Table": "problem",
    "assert_within_budget": "budget",
    "make_call": "inputs",
    "run_case": "case",
}

__all__ = [
    "BackendConformance",
    "Blocks",
    "Call",
    "Case",
    "ConformanceError",
    "Outcome",
    "Problem",
    "Segments",
    "Sinks",
    "Subject",
    "Table",
    "assert_within_budget",
    "make_call",
    "run_case",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'attnzoo.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"attnzoo.testing.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
