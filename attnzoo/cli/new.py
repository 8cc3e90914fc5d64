"""`attnzoo new`: a plugin distribution of your own, rendered from the template that ships in this package."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
EXIT_INTERRUPTED = 1


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Of the backend: lowercase letters, digits and underscores.", show_default=False)
    ],
    directory: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new or empty folder; attnzoo-NAME by default.", show_default=False)
    ] = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Ask nothing.")] = False,
) -> None:
    """Write a plugin: pyproject.toml, a backend that works, its test, a README.

    Prints the files to stdout, and what to run next to stderr.
    """
    from attnzoo.registry import RESERVED

    if not NAME.fullmatch(name):
        raise typer.BadParameter(f"{name!r} takes lowercase letters, digits and single underscores, a letter first", param_hint="NAME")
    if name in RESERVED:
        raise typer.BadParameter(f"{name!r} is reserved: {', '.join(sorted(RESERVED))} are attnzoo's own", param_hint="NAME")
    folder = directory or Path(f"attnzoo-{name.replace('_', '-')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise typer.BadParameter(f"{folder} exists and is not an empty folder: nothing is overwritten", param_hint="'--directory'")
    if importlib.util.find_spec("copier") is None:
        _stop("copier is not installed: pip install 'attnzoo[test]'")
    if not defaults and not sys.stdin.isatty():
        _stop("there is no terminal to ask on: give --defaults")
    render(name, folder, defaults=defaults)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        typer.echo(path)
    typer.echo(f"next: pip install -e {folder} && attnzoo check {name}", err=True)


def _stop(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def render(name: str, folder: Path, *, defaults: bool) -> None:
    """Write the template's files; asks what it doesn't know unless `defaults`."""
    import copier
    from copier.errors import CopierAnswersInterrupt

    with as_file(files("attnzoo") / "template") as template:
        try:
            copier.run_copy(str(template), folder, data={"name": name}, defaults=defaults, quiet=True)
        except CopierAnswersInterrupt:
            typer.echo("interrupted: nothing is written", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None
