"""The measured parts of pages are what the committed results say."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("script", "page"), [("flash_tables", "flash.md"), ("hopper_tables", "hopper.md")])
def test_the_page_shows_the_committed_results(script: str, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module(script)
    for name in (script, "pages"):  # other tests find nothing of it
        monkeypatch.delitem(sys.modules, name)
    expected = tables.measured(json.loads(tables.MEASURED.read_text()))
    assert expected in (ROOT / "docs" / page).read_text(), f"run python benchmarks/{script}.py"
