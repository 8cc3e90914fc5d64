"""The typer application. Its commands import torch inside their bodies, so that help and `list` answer at once."""

from __future__ import annotations

from typing import Annotated

import typer

from attnzoo import __version__
from attnzoo.cli.bench import bench
from attnzoo.cli.check import check
from attnzoo.cli.doctor import doctor
from attnzoo.cli.explain import explain
from attnzoo.cli.info import info
from attnzoo.cli.io import io
from attnzoo.cli.layout import layout
from attnzoo.cli.list_backends import list_backends
from attnzoo.cli.new import new
from attnzoo.cli.support import support
from attnzoo.cli.trace import trace
from attnzoo.errors import PluginError, UnknownBackendError

app = typer.Typer(name="attnzoo", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def attnzoo(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Where attention kernels live: one interface, many backends."""


app.command("list")(list_backends)
app.command("info")(info)
app.command("doctor")(doctor)
app.command("explain")(explain)
app.command("layout")(layout)
app.command("check")(check)
app.command("bench")(bench)
app.command("io")(io)
app.command("support")(support)
app.command("trace")(trace)
app.command("new")(new)


def main() -> None:
    """Run the command line on `sys.argv`."""
    try:
        app()
    except PluginError as error:  # ATTNZOO_STRICT asked for it
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
    except UnknownBackendError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None
