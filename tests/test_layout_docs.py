"""docs/layouts.md: its examples run, in order, and its pictures are drawn."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from attnzoo import layouts

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


def test_examples_run() -> None:
    assert len(EXAMPLES) >= 5, "the page has lost its examples"
    namespace: dict[str, object] = {}
    for example in EXAMPLES:
        exec(compile(example, "docs/layouts.md", "exec"), namespace)


def test_the_table_names_every_preset() -> None:
    table = PAGE.partition("| preset |")[2].partition("\n\n")[0]
    missing = [name for name in layouts.__all__ if name not in ("from_mask_mod", "stack_heads") and f"`{name}" not in table]
    assert not missing, f"docs/layouts.md has no row for {missing}"


def test_the_numbers_are_those_of_the_benchmark() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "layouts_cpu.json").read_text())["layouts"]
    for name, row in found.items():
        assert f"| {name} | {row['blocks']} | {row['ms']:.1f} | {row['MB']:.1f} MB |" in PAGE, f"docs/layouts.md is out of date for {name}"


def test_the_pictures_can_be_drawn_anew(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra bench)")
    spec = importlib.util.spec_from_file_location("draw_layouts", ROOT / "docs" / "draw_layouts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.draw(tmp_path / "layouts.png")
    assert (tmp_path / "layouts.png").read_bytes().startswith(b"\x89PNG")
    assert (ROOT / "docs" / "layouts.png").exists()
