"""Outcome: what became of a case that did not fail."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """What became of a case that did not fail.

    Attributes:
        kind: "passed", "forward only" (the gradients were refused, the same call without them passed), "refused" or
            "not applicable".
        reasons: the backend's own, or what the machine lacks.
        without_lse: the call was refused; what passed is the same one without its lse.
    """

    kind: str
    reasons: tuple[str, ...] = ()
    without_lse: bool = False
