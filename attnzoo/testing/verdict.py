"""Verdicts: what a run found, per backend and feature. Imports no torch: the pytest plugin reads it at start-up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FORWARD_ONLY", "PLAIN", "Entry", "Tally", "Verdicts"]

PLAIN = "plain"  # a call that needs no feature
GRADIENT_ALONE = "bias_grad"  # a feature that no forward has
FORWARD_ONLY = "forward only"


@dataclass(frozen=True)
class Entry:
    """One judged case of one backend.

    Attributes:
        kind: "passed", "forward only", "refused", "not applicable", "failed" or "known failure".
        features: what the case needs; empty for a plain call.
        has_backward: a gradient was judged, or refused.
        judges_result: as of the case; only then does the entry count for its features.
    """

    backend: str
    case: str
    family: str
    dtype: str
    features: tuple[str, ...]
    has_backward: bool
    kind: str
    reasons: tuple[str, ...] = ()
    judges_result: bool = True

    @property
    def credits(self) -> list[tuple[str, str, str]]:
        """All that it says of features: (feature, "forward" or "backward", kind)."""
        said = [("backward" if self.has_backward else "forward", self.kind)]
        if self.kind == FORWARD_ONLY:
            said = [("forward", "passed"), ("backward", "refused")]
        features = self.features or (PLAIN,)
        return [(name, where, kind) for where, kind in said for name in features if where == "backward" or name != GRADIENT_ALONE]

    @classmethod
    def of(cls, record: dict[str, Any], kind: str) -> Entry:
        """From the `attnzoo` property of a test report."""
        lists = {name: tuple(record[name]) for name in ("features", "reasons")}
        return cls(**{**record, **lists, "kind": kind})


@dataclass
class Tally:
    """Counts of one backend and feature, and why it was refused."""

    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def add(self, entry: Entry, kind: str) -> None:
        self.kinds[kind] += 1
        self.reasons.update(entry.reasons if kind == "refused" else ())
        if kind == "failed":
            self.failed.append(entry.case)

    def verdict(self, feature: str) -> str:
        """`pass`, `forward only`, `refused (reason)`, `known failure`, `FAILED`, or `not tested`."""
        if self.kinds["failed"]:
            return "FAILED"
        if self.kinds["known failure"]:
            return "known failure"
        if self.kinds["passed"]:
            return "pass"
        if self.kinds[FORWARD_ONLY]:
            return FORWARD_ONLY
        if self.kinds["refused"]:
            return f"refused ({self._reason(feature)})"
        return "not tested"

    def _reason(self, feature: str) -> str:
        """The commonest reason that names the feature, else the commonest."""
        named = [reason for reason, _ in self.reasons.most_common() if reason.startswith(feature)]
        return (named or [reason for reason, _ in self.reasons.most_common()] or ["no reason given"])[0]


class Verdicts:
    """Everything a run found, in the order of the entries' ids, whatever the order in which they came in."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries: list[Entry] = list(entries)

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)

    def backends(self) -> list[str]:
        return sorted({entry.backend for entry in self.entries})

    def by_feature(self, backend: str) -> dict[str, Tally]:
        """`feature` (forward alone) and `feature backward` -> tally, sorted by name."""
        tallies: dict[str, Tally] = defaultdict(Tally)
        for entry in sorted(self.entries, key=lambda entry: entry.case):
            if entry.backend == backend and entry.judges_result:
                for feature, direction, kind in entry.credits:
                    tallies[feature + (" backward" if direction == "backward" else "")].add(entry, kind)
        return dict(sorted(tallies.items()))

    def by_family(self, backend: str) -> dict[str, Tally]:
        """`T01` to `T36` -> tally."""
        tallies: dict[str, Tally] = defaultdict(Tally)
        for entry in sorted(self.entries, key=lambda entry: entry.case):
            if entry.backend == backend:
                tallies[entry.family].add(entry, entry.kind)
        return dict(sorted(tallies.items()))

    def counts(self, backend: str) -> Counter[str]:
        """Kind -> number of cases."""
        return Counter(entry.kind for entry in self.entries if entry.backend == backend)

    def lines(self) -> list[str]:
        """The verdict as text: for each backend its counts, a line a feature, and what failed."""
        text = []
        for backend in self.backends():
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts(backend).items()))
            text.append(f"{backend}: {counts}")
            for feature, tally in self.by_feature(backend).items():
                cases = f"{tally.kinds['passed']} passed, {tally.kinds['refused']} refused, {tally.kinds['failed']} failed"
                text.append(f"  {feature:24} {tally.verdict(feature.removesuffix(' backward'))}  [{cases}]")
            failed = [f"{family} ({len(tally.failed)})" for family, tally in self.by_family(backend).items() if tally.failed]
            if failed:
                text.append(f"  families that failed: {', '.join(failed)}")
        return text
