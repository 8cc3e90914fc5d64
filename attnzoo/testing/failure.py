"""What a check raises. Plain `assert` says nothing in an installed package, so every failure carries its message."""

from __future__ import annotations

__all__ = ["ConformanceError", "ForwardError", "NotApplicable", "require"]


class ConformanceError(AssertionError):
    """A backend broke the contract."""


class ForwardError(ConformanceError):
    """It broke the contract in the forward of a call whose gradients it refuses."""


class NotApplicable(Exception):  # noqa: N818 (not an error: the case says nothing here)
    """The case needs what this machine lacks: a GPU, a second device, memory."""


def require(condition: bool, message: str) -> None:
    """Raise ConformanceError with `message` unless `condition` holds."""
    if not condition:
        raise ConformanceError(message)
