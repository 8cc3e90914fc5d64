"""What torch.compile is told about a function, without importing Dynamo: that takes a second, and imports triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["constant_when_traced"]

F = TypeVar("F", bound=Callable[..., object])


def constant_when_traced(function: F) -> F:
    """As `torch.compiler.assume_constant_result`: called while torch.compile traces, its result taken as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
