"""docs/block_sparse.md: its numbers are those that were measured, its figure is drawn from them, and both come from the generator."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("block_sparse_report")
    for name in ("block_sparse_report", "block_sparse_summary", "pages"):  # other tests find nothing of it
        monkeypatch.delitem(sys.modules, name)
    return module


def row_of(dim: int, share: int, **changed: dict) -> dict:
    """One row of the comparison in which fa4 takes twice and flex three times as long as ours."""
    ours = {"forward": 8.0 / share + 0.1, "backward": 24.0 / share + 0.5}
    ms = {way: {"block_sparse": t, "fa4": 2 * t, "flex": 3 * t} for way, t in ours.items()}
    ms["forward"] |= {"dense cudnn": 10.0, "dense fa3": 8.0}
    row = {"dim": dim, "length": 32768, "heads": 16, "layout": f"random 1/{share}", "density": 1 / share, "ms": ms}
    return {**row, "late": [], "errors": {}, "reasons": {}, **changed}


def results_of(rows: list[dict]) -> dict:
    versions = {"torch": "1", "triton": "2", "flash-attn-4": "3"}
    costs = {"blocks": 524800, "ms": 1.25, "schedule ms": 0.5, "peak MB": 12.0}
    build = [{"layout": name, **costs} for name in ("causal, S = 131072", "topk, S = 32768")]
    return {"machine": {"device": "a card", "versions": versions, "commit": "abc"}, "compare": rows, "build": build}


def test_the_page_shows_the_committed_results(report: ModuleType) -> None:
    assert report.measured(*report.load()) in (ROOT / "docs" / report.PAGE).read_text(encoding="utf-8"), (
        "run python benchmarks/block_sparse_report.py"
    )
    assert report.FIGURE.exists()


def test_the_table_of_a_comparison(report: ModuleType) -> None:
    text = report.measured(results_of([row_of(128, share) for share in (1, 4, 32)]), report.load()[1])
    assert "| 128 | 32768 | random 1/4 | 0.2500 | 1047 / 846 | 524 / 423 | 349 / 282 | - / - | 1.05 |" in text
    assert "| fa4, forward | 3 | 2.00 | 2.00 (D=128 S=32768 random 1/1) |" in text
    assert "| flex, backward | 3 | 3.00 | 3.00 (D=128 S=32768 random 1/1) |" in text
    assert "at most 1.40 times density x dense (D=128 random 1/32), in 3 cells" in " ".join(text.split())
    assert "| causal, S = 131072 | 524800 | 1.25 | 0.50 | 12 |" in text
    assert "Left out" not in text
    assert "topk takes" not in text  # there is no forward at 1/8 beside it
    text = report.measured(results_of([row_of(128, share) for share in (1, 4, 8)]), report.load()[1])
    assert "topk takes 1.25 ms there, one forward over random blocks of that density 1.10 ms at D = 128." in " ".join(text.split())


def test_a_run_of_forwards_alone_has_no_column_and_no_figure_of_backwards(report: ModuleType) -> None:
    rows = [row_of(128, share) for share in (1, 4, 32)]
    for row in rows:
        row["ms"]["backward"] = {}
    text = report.measured(results_of(rows), report.load()[1])
    assert "| 128 | 32768 | random 1/4 | 0.2500 | 1047 | 524 | 349 | - | 1.05 |" in text
    assert "TFLOP/s forward over the blocks" in " ".join(text.split())
    assert report.points(results_of(rows), report.load()[1]) == report.points(None, report.load()[1])


def test_what_was_wrong_is_said_and_has_no_rate(report: ModuleType) -> None:
    rows = [row_of(64, share) for share in (1, 2, 4)]
    wrong = "ArithmeticError: relative error of dq is 1.5e+02, at most 1e-02 is right"
    del rows[1]["ms"]["backward"]["fa4"]
    rows[1]["reasons"] = {"fa4 backward": wrong, "fa4 native": "NotImplementedError: no option"}
    text = report.measured(results_of(rows), report.load()[1])
    assert "- fa4 backward, 1 cells, the first D = 64, S = 32768, random 1/2: relative error of dq is 1.5e+02" in text
    assert "no option" not in text
    assert "| fa4, backward | 2 |" in text


def test_the_figure_is_drawn_and_our_points_lie_on_lines(report: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra bench)")
    for points in (report.points(*report.load()), [row_of(dim, share) for dim in (128, 64) for share in (1, 4, 32)]):
        report.draw(points, tmp_path / "figure.png")
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
        ours = [fit for (_, _, name), fit in report.lines(points).items() if name in ("hopper", "block_sparse")]
        assert len(ours) == 4
        assert max(off for _, _, off in ours) < 0.1


def test_a_line_is_split_into_what_blocks_and_what_rows_cost(report: ModuleType) -> None:
    """8 ms a density and 0.1 ms without a block, beside 8 ms dense: 0.1 is 0.4 of a 32nd of that."""
    text = report.measured(results_of([row_of(dim, share) for dim in (128, 64) for share in (1, 4, 32)]), report.load()[1])
    assert "| 128 | block_sparse | 1.00 | 0.40 | 1.40 |" in text
    assert "| 128 | fa4 | 2.00 | 0.80 | 2.80 |" in text
    assert "| flex |" not in text.partition("Split")[2].partition("Hopper kernels")[0]


def test_a_line_is_found(report: ModuleType) -> None:
    assert report.line_through([0.1, 0.5, 1.0], [0.8, 2.0, 3.5]) == pytest.approx((3.0, 0.5, 0.0))
