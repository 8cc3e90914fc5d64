"""`attnzoo doctor`: which backends work on this machine, and what to do about those that don't."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from attnzoo.cli.output import Format, FormatOption, Section, show, warnings_as_notes


def doctor(
    backends: Annotated[list[str] | None, typer.Argument(help="Names; all by default.", show_default=False)] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that each backend may take.", min=0.1)] = 120.0,
    form: FormatOption = Format.TABLE,
) -> None:
    """Run a tiny forward and backward on every backend, each in its own process.

    Exit code 1 if one is broken; a backend that refuses this machine is not.
    """
    from attnzoo.doctor import Finding, examine
    from attnzoo.registry import Registry

    with warnings_as_notes():
        registry = Registry.installed()
        registry.report()
    registry.require_known(backends or ())
    names = tuple(backends or registry.names())
    findings: list[Finding] = []
    for number, name in enumerate(names, 1):
        typer.echo(f"{name} ({number} of {len(names)}) ...", err=True)
        plugin = registry.plugin_of(name)
        finding = examine(name, distribution=plugin.distribution if plugin else "one of them", timeout=timeout)
        if finding.log:
            typer.echo(finding.log, err=True)
        findings.append(finding)
    columns = ("backend", "verdict", "seconds", "found", "what to do")
    rows = [(f.backend, f.verdict, f"{f.seconds:.1f}", f.detail, f.advice) for f in findings]
    show([asdict(f) for f in findings], [Section("", columns, rows)], form)
    if any(finding.verdict == "broken" for finding in findings):
        raise typer.Exit(1)
