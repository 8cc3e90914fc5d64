"""Results as tables of text: one a family of workloads, a row a cell. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from attnzoo.bench.compare import Change
from attnzoo.bench.results import Cell, Results

__all__ = ["CHANGES", "COLUMNS", "REASONS", "amount", "changes_table", "family_tables", "fitted", "machine_line", "reasons"]

COLUMNS = ("workload", "backend", "ms", "spread", "TFLOP/s", "GB/s", "of copy", "peak memory", "relative", "first call")
LEAST_NEEDED = ("of copy", "GB/s", "first call", "peak memory", "spread", "TFLOP/s")
"""Columns that a narrow terminal goes without, the first first."""
REASONS = ("workload", "backend", "why it has no time")
CHANGES = ("workload", "backend", "then", "now", "change", "noise", "verdict")


def family_tables(results: Results) -> list[tuple[str, list[tuple[str, ...]]]]:
    """`(family, rows)`; a row has the cells of COLUMNS, one without a time its status and reason."""
    return [(family, [_row(results, cell) for cell in cells]) for family, cells in results.families().items()]


def fitted(cells: Sequence[Cell], rows: Sequence[tuple[str, ...]], width: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of a family's table for a terminal so many columns wide: `reasons` has the reasons, and none folds a number."""
    short = [row if cell.status == "time" else (*row[:2], cell.status, *row[3:]) for cell, row in zip(cells, rows)]
    kept = list(COLUMNS)
    for column in LEAST_NEEDED:
        places = [COLUMNS.index(name) for name in kept]
        widest = [max(len(row[place]) for row in (COLUMNS, *short)) for place in places]
        if sum(widest) + 3 * len(widest) <= width:  # two between columns and at both ends, one for the rule
            break
        kept.remove(column)
    places = [COLUMNS.index(name) for name in kept]
    return tuple(kept), [tuple(row[place] for place in places) for row in short]


def reasons(cells: Sequence[Cell]) -> list[tuple[str, str, str]]:
    """Rows of REASONS, a backend's once for all workloads where it is the same."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.status != "time":
            found.setdefault((cell.backend, _why(cell)), []).append(cell.workload.title)
    return [("; ".join(dict.fromkeys(titles)), backend, why) for (backend, why), titles in found.items()]


def _why(cell: Cell) -> str:
    """What a cell without a time has instead."""
    return f"{cell.status}: {cell.detail}" if cell.detail else cell.status


def _row(results: Results, cell: Cell) -> tuple[str, ...]:
    title = cell.workload.title + (f" (run {cell.run + 1})" if cell.run else "")
    if cell.status != "time":
        return (title, cell.backend, _why(cell), *[""] * (len(COLUMNS) - 3))
    copy = results.machine.get("ceilings", {}).get("copy")
    relative, base = results.relative(cell), results.base(cell)
    about = "~" if base is not None and base.run != cell.run else ""  # of two runs no rounds were side by side
    return (
        title,
        cell.backend,
        f"{cell.median:.3f}" if cell.median < 100 else f"{cell.median:.1f}",
        f"± {cell.spread:.1%}",
        f"{cell.tflops:.3g}",
        f"{cell.bandwidth:.3g}" if cell.bandwidth < 1000 else f"{cell.bandwidth:.0f}",
        f"{cell.bandwidth / copy:.0%}" if copy else "",
        "" if cell.peak is None else amount(cell.peak),
        "" if relative is None else f"{about}{relative:.2f} x",
        "" if cell.first_call is None else f"{cell.first_call:.2g} s",
    )


def amount(count: float) -> str:
    """Bytes, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def machine_line(results: Results) -> str:
    """The machine, versions, commit, start and ceilings, and later runs that went on, in a sentence or two."""
    machine, settings = results.machine, results.settings
    versions = ", ".join(f"{name} {number}" for name, number in machine.get("versions", {}).items())
    ceilings = machine.get("ceilings", {})
    reached = ", ".join(f"{value:g} TFLOP/s in {name}" for name, value in ceilings.items() if name != "copy")
    parts = [f"{machine.get('name')} ({machine.get('device')}), {versions}"]
    if machine.get("commit"):
        parts.append(f"commit {machine['commit']}")
    if machine.get("started"):
        parts.append(f"started {machine['started']}")
    if ceilings:
        parts.append(f"a matrix product reaches {reached}, a copy {ceilings.get('copy', 0):g} GB/s")
    if settings.get("relative_to"):
        parts.append(f"relative: times as fast as {settings['relative_to']}")
    return "; ".join([*parts, *_later_runs(results)])


def _later_runs(results: Results) -> list[str]:
    """One file, several runs: which cells are of each that resumed it, and what it had of its own."""
    said = []
    for run, machine in enumerate(results.resumed, 1):
        count = sum(cell.run == run for cell in results.cells)
        copy = machine.get("ceilings", {}).get("copy")
        own = [f"started {machine['started']}"] if machine.get("started") else []
        own += [f"with a copy of {copy:g} GB/s"] if copy else []
        are = "cell is" if count == 1 else "cells are"
        said.append(", ".join([f"{count} of {len(results.cells)} {are} of a run that resumed it (run {run + 1})", *own]))
    return said


def changes_table(changes: Sequence[Change]) -> list[tuple[str, ...]]:
    """Rows of CHANGES, what changed first."""
    order = ("broken", "slower", "mended", "faster", "same")
    return [_changed(change) for change in sorted(changes, key=lambda change: order.index(change.verdict))]


def _changed(change: Change) -> tuple[str, ...]:
    old, new = (f"{cell.median:.4g} ms" if cell.status == "time" else cell.status for cell in (change.old, change.new))
    by = "" if change.ratio is None else f"{change.ratio - 1:+.1%}"
    noise = "" if change.threshold is None else f"{change.threshold:.1%}"
    return (change.new.workload.id, change.new.backend, old, new, by, noise, change.verdict)
