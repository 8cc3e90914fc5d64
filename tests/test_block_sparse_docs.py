"""docs/block_sparse.md: its numbers are those that were measured, and its figure is drawn from them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "block_sparse.md").read_text(encoding="utf-8")
ROWS = json.loads((ROOT / "benchmarks" / "results" / "h200" / "block_sparse_quick.json").read_text())["quick"]
HEADS = 16


@pytest.mark.parametrize("row", ROWS, ids=[f"d{row['dim']}-s{row['length']}-{row['density']:.4f}" for row in ROWS])
def test_the_table_holds_what_was_measured(row: dict) -> None:
    useful = 4e-9 * HEADS * row["length"] ** 2 * row["dim"] * row["density"]
    rates = [f"{useful / row[kernel][0]:.0f} / {2.5 * useful / row[kernel][1]:.0f}" for kernel in ("hopper", "portable")]
    over = row["hopper"][0] / row["density"] / row["dense"][0]
    expected = f"| {row['dim']} | {row['length']} | {row['density']:.4f} | {rates[0]} | {rates[1]} | {over:.2f} |"
    assert expected in PAGE, f"docs/block_sparse.md lacks {expected}"


@pytest.fixture
def figure() -> ModuleType:
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra bench)")
    spec = importlib.util.spec_from_file_location("block_sparse_figure", ROOT / "benchmarks" / "block_sparse_figure.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figure_is_drawn_and_its_points_lie_on_lines(figure: ModuleType, tmp_path: Path) -> None:
    said = figure.draw(ROWS, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert (ROOT / "docs" / "block_sparse.png").exists()
    off = [int(line.rpartition("within ")[2].rstrip("%")) for line in said if "hopper" in line]
    assert len(off) == 4
    assert max(off) <= 4, f"the page says within 4%: {said}"


def test_a_line_is_found(figure: ModuleType) -> None:
    import numpy as np

    density = np.array([0.1, 0.5, 1.0])
    assert figure.line_through(density, 3.0 * density + 0.5) == pytest.approx((3.0, 0.5, 0.0))
