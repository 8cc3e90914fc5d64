"""What a check raises. Plain `assert` says nothing in an installed package, so every failure carries its message."""

from __future__ import annotations

__all__ = ["ConformanceError", "NotApplicable", "ReducedError", "require"]


class ConformanceError(AssertionError):
    """A backend broke the contract."""


class ReducedError(ConformanceError):
    """It broke the contract in a part of a call that it refuses as a whole: without the gradients, the lse, or both."""

    def __init__(self, message: str, *, without_grads: bool = False, without_lse: bool = False) -> None:
        super().__init__(message)
        self.without_grads, self.without_lse = without_grads, without_lse


class NotApplicable(Exception):  # noqa: N818 (not an error: the case says nothing here)
    """The case needs what this machine lacks: a GPU, a second device, memory."""


def require(condition: bool, message: str) -> None:
    """Raise ConformanceError with `message` unless `condition` holds."""
    if not condition:
        raise ConformanceError(message)
