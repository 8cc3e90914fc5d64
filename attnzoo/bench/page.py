"""Results as one HTML page that opens from disk: tables and pictures inside, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from attnzoo.bench.compare import Change
from attnzoo.bench.plots import figures, svg
from attnzoo.bench.results import Cell, Results
from attnzoo.bench.tables import CHANGES, COLUMNS, changes_table, family_tables, machine_line

__all__ = ["page"]

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem; color: #1b1b1b; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } p.machine { color: #555; }
figure { margin: 0; overflow-x: auto; } figure svg { max-width: 100%; height: auto; }
div.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.2rem 0.8rem 0.2rem 0; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
th { border-bottom: 1px solid #999; } tr.first td { border-top: 2px solid #bbb; }
tr.best td { font-weight: 600; } tr.wrong td, tr.error td { color: #b00020; }
tr.unsupported td, tr.out-of-memory td { color: #777; } code { font-size: 0.8rem; }
details { margin: 0.4rem 0 1rem; } summary { cursor: pointer; color: #555; }
"""


def page(results: Results, changes: Sequence[Change] = ()) -> str:
    """The whole page."""
    pictures = "".join(f"<h2>{escape(title)}</h2>\n<figure>{svg(figure)}</figure>\n" for title, figure in figures(results).items())
    tables = "".join(_family(results, family, rows) for family, rows in family_tables(results))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>attnzoo bench: {escape(str(results.machine.get('name')))}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1>attnzoo bench</h1>\n<p class="machine">{escape(machine_line(results))}</p>\n'
        f"{_counts(results)}{_changes(changes)}{pictures}{tables}</body>\n</html>\n"
    )


def _counts(results: Results) -> str:
    counts: dict[str, int] = {}
    for cell in results.cells:
        counts[cell.status] = counts.get(cell.status, 0) + 1
    words = ", ".join(f"{count} {status}" for status, count in counts.items())
    checked = "Each was checked against float64 before it was timed; the fastest of a workload is bold."
    return f"<p>{len(results.cells)} cells: {escape(words)}. {checked}</p>\n"


def _changes(changes: Sequence[Change]) -> str:
    if not changes:
        return ""
    rows = "".join(f"<tr>{_cells(row)}</tr>\n" for row in changes_table(changes) if row[-1] != "same")
    same = sum(change.verdict == "same" for change in changes)
    table = f'<div class="wide"><table><tr>{_cells(CHANGES, "th")}</tr>\n{rows}</table></div>' if rows else ""
    return f"<h2>Changes</h2>\n<p>{same} of {len(changes)} cells are the same within the noise.</p>\n{table}\n"


def _family(results: Results, family: str, rows: Sequence[tuple[str, ...]]) -> str:
    cells = results.families()[family]
    best = {min(group, key=lambda cell: cell.median).key for group in _by_workload(cells) if group}
    lines, last = [], ""
    for cell, row in zip(cells, rows):
        classes = [cell.status.replace(" ", "-")] + ["best"] * (cell.key in best) + ["first"] * (bool(last) and cell.workload.id != last)
        last = cell.workload.id
        lines.append(f'<tr class="{" ".join(classes)}">{_row(cell, row)}</tr>')
    commands = "\n".join(escape(cell.command(results.settings)) for cell in cells)
    return (
        f'<h2>{escape(family)}</h2>\n<div class="wide"><table><tr>{_cells(COLUMNS, "th")}</tr>\n' + "\n".join(lines) + "\n</table></div>\n"
        f"<details><summary>Commands that repeat these cells</summary><pre><code>{commands}</code></pre></details>\n"
    )


def _row(cell: Cell, row: Sequence[str]) -> str:
    if cell.status == "time":
        return _cells(row)
    return _cells(row[:2]) + f'<td colspan="{len(COLUMNS) - 2}">{escape(row[2])}</td>'


def _cells(texts: Sequence[str], tag: str = "td") -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


def _by_workload(cells: Sequence[Cell]) -> list[list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.status == "time":
            groups.setdefault(cell.workload.id, []).append(cell)
    return list(groups.values())
