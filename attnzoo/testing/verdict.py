"""Verdicts: what the cases of a run say of a feature, a family or a dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["FORWARD_ONLY", "KINDS", "PLAIN", "Credit", "Entry", "Tally", "overall"]

PLAIN = "plain"  # a call that needs no feature
GRADIENT_ALONE = "bias_grad"  # a feature that no forward has
FORWARD_ONLY = "forward only"
KINDS = ("passed", FORWARD_ONLY, "refused", "not applicable", "failed", "known failure")


@dataclass(frozen=True)
class Credit:
    """What one case says of one feature, "forward" (without a gradient) or "backward"."""

    feature: str
    direction: str
    kind: str


@dataclass(frozen=True)
class Entry:
    """One judged case of one backend.

    Attributes:
        kind: one of `KINDS`.
        features: what the case needs; empty for a plain call.
        has_backward: a gradient was judged, or refused.
        reasons: of a refusal, in part or whole; of what is not applicable; of a known failure.
        judges_result: as of the case; only then does the entry count for its features.
        without_lse: judged without its lse, which is refused.
        claimed: those of the features, and "plain", that the backend claims for such a call.
    """

    case: str
    family: str
    dtype: str
    features: tuple[str, ...]
    has_backward: bool
    kind: str
    reasons: tuple[str, ...] = ()
    judges_result: bool = True
    without_lse: bool = False
    claimed: tuple[str, ...] = ()

    @property
    def credits(self) -> list[Credit]:
        """All that it says of features."""
        said = [("backward" if self.has_backward else "forward", self.kind)]
        if self.kind == FORWARD_ONLY:
            said = [("forward", "passed"), ("backward", "refused")]
        return [
            Credit(name, direction, "refused" if self.without_lse and name == "lse" else kind)
            for direction, kind in said
            for name in self.features or (PLAIN,)
            if direction == "backward" or name != GRADIENT_ALONE
        ]


@dataclass
class Tally:
    """Counts of the cases that speak of one thing, and why they were refused or known to fail.

    Attributes:
        unclaimed: whether one of the refused asked for what is not claimed.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    unclaimed: bool = False

    def add(self, entry: Entry, credit: Credit) -> None:
        self.kinds[credit.kind] += 1
        self.reasons.update((credit.kind, reason) for reason in entry.reasons)
        self.unclaimed = self.unclaimed or (credit.kind == "refused" and credit.feature not in entry.claimed)

    @property
    def verdict(self) -> str:
        """`pass`, `refused`, `known failure`, `FAILED`, or `not tested`, as where all that refused it is something else."""
        return overall(self.kinds if self.unclaimed else {**self.kinds, "refused": 0})

    def reason(self, feature: str) -> str:
        """Why it is refused, or known to fail: the commonest that names the feature, else the commonest; "" if it is neither."""
        kind = self.verdict
        found = [reason for (said, reason), _ in sorted(self.reasons.items(), key=_commonest) if said == kind]
        named = [reason for reason in found if reason.startswith(feature)]
        return (named or found or [""])[0]


def _commonest(counted: tuple[tuple[str, str], int]) -> tuple[int, tuple[str, str]]:
    return -counted[1], counted[0]


def overall(counts: Mapping[str, int]) -> str:
    """A word or two for counts by kind: `pass`, `forward only`, `refused`, `known failure`, `FAILED`, or `not tested`."""
    words = {"failed": "FAILED", "known failure": "known failure", "passed": "pass", FORWARD_ONLY: FORWARD_ONLY, "refused": "refused"}
    return next((word for kind, word in words.items() if counts.get(kind)), "not tested")
