"""What a process was about to judge, on disk: all that is left of a random problem that kills it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["FOLDER", "THE_END", "last_of", "note"]

THE_END = {"test": "the end"}  # the last line of a record; a run whose process a backend ended has none

FOLDER = "ATTNZOO_JOURNAL"  # environment variable, which the workers of pytest-xdist inherit; without it nothing is written


def note(line: str) -> None:
    """Remember the line, in place of the one before it."""
    if FOLDER in os.environ:
        Path(os.environ[FOLDER], os.environ.get("PYTEST_XDIST_WORKER", "main")).write_text(line, encoding="utf-8")


def last_of(worker: str) -> str:
    """The last line of a worker, such as "gw0"; "" if it left none."""
    path = Path(os.environ.get(FOLDER, ""), worker)
    return path.read_text(encoding="utf-8") if FOLDER in os.environ and path.is_file() else ""
