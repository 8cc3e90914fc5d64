"""Two runs of one benchmark: what became slower or faster by more than noise explains. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnzoo.bench.results import Cell, Results

__all__ = ["Change", "compare"]

SMALLEST = 0.03  # a smaller change is never reported: clocks differ by as much from run to run


@dataclass(frozen=True)
class Change:
    """One cell then and now.

    Attributes:
        verdict: "slower" or "faster" beyond the noise, "same", "broken" (a time then, none now) or "mended".
        ratio: new time over old; None without both.
        threshold: the relative change that noise explains: both spreads together, at least 3%.
    """

    old: Cell
    new: Cell
    verdict: str
    ratio: float | None
    threshold: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        times = {name: cell.median if cell.status == "time" else None for name, cell in (("old", self.old), ("new", self.new))}
        key = {"id": self.new.workload.id, "backend": self.new.backend}
        return key | times | {"ratio": self.ratio, "threshold": self.threshold, "verdict": self.verdict}


def compare(old: Results, new: Results) -> list[Change]:
    """The cells that both runs hold, in the order of the new one."""
    before = {cell.key: cell for cell in old.cells}
    return [_change(before[cell.key], cell) for cell in new.cells if cell.key in before]


def _change(old: Cell, new: Cell) -> Change:
    had, has = old.status == "time", new.status == "time"
    if not (had and has):
        verdict = "same" if had == has else "mended" if has else "broken"
        return Change(old, new, verdict, None, None)
    ratio, threshold = new.median / old.median, max(SMALLEST, old.spread + new.spread)
    verdict = "slower" if ratio > 1 + threshold else "faster" if ratio < 1 / (1 + threshold) else "same"
    return Change(old, new, verdict, ratio, threshold)
