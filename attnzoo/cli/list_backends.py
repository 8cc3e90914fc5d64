"""`attnzoo list`: the known backends, from metadata alone; imports neither torch nor a plugin."""

from __future__ import annotations

import typer

from attnzoo.cli.output import Format, FormatOption, Section, show, warnings_as_notes


def list_backends(form: FormatOption = Format.TABLE) -> None:
    """List every known backend and the distribution it comes from. Imports no plugin and no torch."""
    from attnzoo import __version__
    from attnzoo.registry import Registry

    with warnings_as_notes():
        registry = Registry.installed()
        registry.report()
    rows = []
    for name in registry.names():
        plugin = registry.plugin_of(name)
        if plugin is None:
            typer.echo(f"note: {registry.failures()[name]}", err=True)
            rows.append((name, "declared twice", ""))
        else:
            rows.append((name, plugin.distribution, plugin.version or __version__))
    columns = ("backend", "distribution", "version")
    show([dict(zip(columns, row)) for row in rows], [Section("", columns, rows)], form)
