"""Verdicts: what a run found, per backend and feature. Imports no torch: the pytest plugin reads it at start-up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Entry", "Tally", "Verdicts"]

PLAIN = "plain"  # a call that needs no feature


@dataclass(frozen=True)
class Entry:
    """One judged case of one backend.

    Attributes:
        kind: "passed", "refused", "not applicable", "failed" or "known failure".
        features: what the case needs; empty for a plain call.
        has_backward: gradients were asked for.
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

    def add(self, entry: Entry) -> None:
        self.kinds[entry.kind] += 1
        self.reasons.update(entry.reasons if entry.kind == "refused" else ())
        if entry.kind == "failed":
            self.failed.append(entry.case)

    def verdict(self, feature: str) -> str:
        """`pass`, `refused (reason)`, `known failure`, `FAILED`, or `not tested`."""
        if self.kinds["failed"]:
            return "FAILED"
        if self.kinds["known failure"]:
            return "known failure"
        if self.kinds["passed"]:
            return "pass"
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
                for feature in entry.features or (PLAIN,):
                    tallies[feature + (" backward" if entry.has_backward else "")].add(entry)
        return dict(sorted(tallies.items()))

    def by_family(self, backend: str) -> dict[str, Tally]:
        """`T01` to `T36` -> tally."""
        tallies: dict[str, Tally] = defaultdict(Tally)
        for entry in sorted(self.entries, key=lambda entry: entry.case):
            if entry.backend == backend:
                tallies[entry.family].add(entry)
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
