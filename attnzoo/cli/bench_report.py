"""What `attnzoo bench` shows and writes of its results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from attnzoo.cli.output import Format, Section, show, terminal_width

if TYPE_CHECKING:
    from attnzoo.bench.compare import Change
    from attnzoo.bench.results import Results


def report(results: Results, old: Results | None, page: Path | None, plots: Path | None, form: Format) -> None:
    """Show the tables, write page and plots.

    Args:
        old: earlier results, which these are compared with.

    Raises:
        typer.Exit: 1 if a cell is wrong or an error, or slower than in `old`; 2 if no cell is in both.
    """
    from attnzoo.bench.compare import compare

    changes = compare(old, results) if old is not None else []
    for note in _differences(old, results, changes) if old is not None else ():
        typer.echo(f"note: {note}", err=True)
    show(results.to_dict() | {"changes": [change.to_dict() for change in changes]}, _sections(results, changes, form), form)
    if page is not None:
        from attnzoo.bench.page import page as html

        page.write_text(html(results, changes), encoding="utf-8")
    if plots is not None:
        _draw(results, plots)
    if old is not None and not changes:
        typer.echo(f"error: {old.path} and these results have no cell in common, so nothing was compared", err=True)
        raise typer.Exit(2)
    bad = [cell for cell in results.cells if cell.status in ("wrong", "error")]
    if bad or any(change.verdict in ("slower", "broken") for change in changes):
        raise typer.Exit(1)


def _differences(old: Results, new: Results, changes: Sequence[Change]) -> list[str]:
    """What a reader of the changes must know: another machine, other versions, cells that are gone."""
    found = [f"{old.path} is of {difference}" for difference in old.differences(new.machine, ("name", "device", "versions"))]
    gone = len(old.cells) - len(changes)
    if gone:
        found.append(f"{gone} cell{'s' * (gone > 1)} of {len(old.cells)} there {'are' if gone > 1 else 'is'} not here")
    return found


def _sections(results: Results, changes: Sequence[Change], form: Format) -> list[Section]:
    from attnzoo.bench.tables import CHANGES, COLUMNS, changes_table, family_tables, machine_line

    if form is Format.TABLE:
        made = _terminal_sections(results, terminal_width())
    else:
        made = [Section(family, COLUMNS, rows) for family, rows in family_tables(results)]
    if changes:
        made.append(Section("Changes", CHANGES, changes_table(changes)))
    made.append(Section("Machine", ("described",), [(machine_line(results),)]))
    return made


def _terminal_sections(results: Results, width: int) -> list[Section]:
    """Tables no wider than the terminal, and the reasons of the cells without a time below them."""
    from attnzoo.bench.tables import COLUMNS, REASONS, family_tables, fitted, reasons

    made, left_out, families = [], set(), results.families()
    for family, rows in family_tables(results):
        cells = families[family]
        columns, shown = fitted(cells, rows, width)
        left_out |= set(COLUMNS) - set(columns)
        made.append(Section(family, columns, shown))
        if why := reasons(cells):
            made.append(Section("", REASONS, why))
    if left_out:
        named = ", ".join(name for name in COLUMNS if name in left_out)
        typer.echo(f"note: {named} left out, the terminal is {width} columns wide; --format md shows all", err=True)
    return made


def _draw(results: Results, folder: Path) -> None:
    from attnzoo.bench.plots import figures, svg

    folder.mkdir(parents=True, exist_ok=True)
    for title, figure in figures(results).items():
        name = title.lower().replace(" ", "_")
        (folder / f"{name}.svg").write_text(svg(figure), encoding="utf-8")
        figure.savefig(folder / f"{name}.png", dpi=130)
