"""The measured part of docs/flash.md is what the committed results say."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_page_shows_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("flash_tables")
    for name in ("flash_tables", "pages"):  # other tests find nothing of it
        monkeypatch.delitem(sys.modules, name)
    expected = tables.measured(json.loads(tables.MEASURED.read_text()))
    assert expected in (ROOT / "docs" / "flash.md").read_text(), "run python benchmarks/flash_tables.py"
