"""The progress of `attnzoo bench` on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from attnzoo.bench.run import Progress

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Progress]:
    """A bar with the time left on a terminal, else a line a workload; both on stderr."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def line(workload: str, step: str, finished: int) -> None:
            if workload not in seen:
                seen.add(workload)
                typer.echo(workload, err=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # a narrow terminal cuts this, not the time left
    step = TextColumn("{task.description}", table_column=rest)
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("cells,"), TimeRemainingColumn(), TextColumn("left"), step)
    with Bar(*columns, console=Console(stderr=True), expand=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda workload, step, finished: bar.update(task, description=f"{step} {workload}", advance=finished)
