"""The measured part of docs/flash.md is what the committed results say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

TABLES = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "flash_tables.py"))


def test_the_page_shows_the_committed_results() -> None:
    expected = TABLES["measured"](json.loads(TABLES["RESULTS"].read_text()))
    assert expected in TABLES["PAGE"].read_text(), "run python benchmarks/flash_tables.py"
