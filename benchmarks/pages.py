"""Measured parts of pages under docs/: what stands between two markers is made of committed results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["BEGIN", "END", "RESULTS", "table", "write"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"


def write(page: str, text: str) -> None:
    """Put the text between the markers of docs/PAGE."""
    path = ROOT / "docs" / page
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path} has no {BEGIN} with an {END} behind it")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)])
