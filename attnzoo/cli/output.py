"""What a command prints: sections of rows, as a terminal table, Markdown or JSON."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TextIO

import typer

PIPED_WIDTH = 160  # rich assumes 80 columns where it sees no terminal, and folds names


class Format(StrEnum):
    """How data is printed."""

    TABLE = "table"
    MD = "md"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="How to print the data.")]


@dataclass(frozen=True)
class Section:
    """A titled table; a cell may hold several lines."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def show(data: Any, sections: Sequence[Section], form: Format) -> None:
    """Print `data` as JSON, or `sections` as tables."""
    if form is Format.JSON:
        typer.echo(json.dumps(data, indent=2))
    elif form is Format.MD:
        typer.echo("\n\n".join(map(markdown, sections)))
    else:
        _print_tables(sections)


def markdown(section: Section) -> str:
    """The title and the table, without a newline at the end."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells) + " |"

    table = [section.columns, ["---"] * len(section.columns), *section.rows]
    return "\n\n".join([*section.title.splitlines(), "\n".join(map(line, table))])


def terminal_width() -> int:
    """Columns that a table may take."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH


def _print_tables(sections: Sequence[Section]) -> None:
    from rich.console import Console

    from attnzoo.tables import rich_table

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    for number, section in enumerate(sections):
        if number:
            console.print()
        if section.title:
            console.print(section.title, style="bold", markup=False)
        console.print(rich_table(section.columns, section.rows))


def prints_to_stderr() -> contextlib.redirect_stdout[TextIO]:
    """While plugins run: what they print is no data."""
    return contextlib.redirect_stdout(sys.stderr)


@contextlib.contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print the warnings raised within as plain lines on stderr, without source lines."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        typer.echo(f"note: {message}", err=True)
