"""Measured parts of pages under docs/: what stands between two markers is made of committed results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["BEGIN", "END", "RESULTS", "ROOT", "between", "table", "write"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"


def write(page: str, text: str) -> None:
    """Put the text between the markers of docs/PAGE."""
    between(ROOT / "docs" / page, (BEGIN, END), text)


def between(path: Path, markers: tuple[str, str], text: str) -> None:
    """Put the text between two markers of a file."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not begin or not end:
        raise SystemExit(f"{path} has no {markers[0]} with an {markers[1]} behind it")
    path.write_text(f"{before}{markers[0]}\n\n{text}\n\n{markers[1]}{after}", encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)])
