"""The look of attnzoo's terminal tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["STYLES", "rich_table"]

STYLES = {
    "chosen": "green",
    "ok": "green",
    "loaded": "green",
    "pass": "green",
    "refuses": "yellow",
    "refused": "yellow",
    "known failure": "yellow",
    "rejected": "yellow",
    "broken": "bold red",
    "FAILED": "bold red",
}
"""Word -> how a cell that consists of it is coloured."""


def rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without a frame; cells are text, never markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=box.SIMPLE_HEAD, header_style="bold", show_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*[Text(cell, STYLES.get(cell, "")) for cell in row])
    return table
