"""Reports: noise-aware changes, tables, pictures and the page, from results made by hand."""

from __future__ import annotations

import dataclasses
import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from attnzoo.bench.compare import compare
from attnzoo.bench.page import page
from attnzoo.bench.plots import figures
from attnzoo.bench.results import Cell, Results
from attnzoo.bench.tables import COLUMNS, family_tables, fitted, machine_line, reasons
from attnzoo.bench.workload import Workload
from attnzoo.tables import rich_table

MACHINE = {
    "name": "A <machine>",
    "device": "cpu",
    "versions": {"torch": "2.0"},
    "ceilings": {"float32": 0.5, "copy": 20.0},
    "commit": "abc",
}


def cell(backend, *rounds, length=1024, layout="", density=1.0, status="time", detail=""):
    workload = Workload(length=length, kv_length=length, layout=layout)
    return Cell(backend, workload, status, detail, tuple(rounds), 0.25, 2**20, 4 * 10**9, 10**7, density)


def results(*cells):
    return Results(MACHINE, {"relative_to": "a"}, list(cells))


FULL = results(
    cell("a", 1.0, 1.1, 1.2, length=512),
    cell("b", 2.0, 2.0, 2.0, length=512),
    cell("a", 4.0, 4.0, 4.0),
    cell("b", status="wrong", detail="o: off <by> much"),
    cell("c", status="unsupported", detail="it takes cuda"),
    cell("a", 1.0, 1.0, 1.0, layout="random:0.5", density=0.5),
    cell("a", 2.0, 2.0, 2.0, layout="random:1", density=1.0),
)


def test_numbers_of_a_cell():
    timed = cell("a", 3.0, 1.0, 2.0)
    assert timed.median == 2.0
    assert timed.spread == 0.5, "half of 3 - 1, as a share of 2"
    assert timed.tflops == 2.0, "4 GFLOP in 2 ms"
    assert timed.bandwidth == 5.0, "10 MB in 2 ms, in GB/s"
    assert Cell.from_dict(timed.to_dict({})) == timed


def test_the_command_of_a_cell_has_the_settings_of_its_run() -> None:
    timed = cell("naive", 1.0)
    assert timed.command({"rounds": 3, "seconds": 0.3, "relative_to": "naive"}).endswith(" --rounds 3 --seconds 0.3")
    assert "--rounds" not in timed.command({})


def test_relative_speed_pairs_the_rounds():
    drifting = results(cell("a", 1.0, 2.0, 4.0), cell("b", 2.0, 4.0, 8.0))
    assert drifting.relative(drifting.cells[1]) == 0.5, "both slow down, their ratio does not"
    assert drifting.relative(cell("b", 1.0, length=8)) is None, "there is nothing to compare with"


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ((1.0, 1.0, 1.0), (1.02, 1.02, 1.02), "same"),
        ((1.0, 1.0, 1.0), (1.05, 1.05, 1.05), "slower"),
        ((1.0, 1.0, 1.0), (0.9, 0.9, 0.9), "faster"),
        ((0.9, 1.0, 1.1), (1.05, 1.1, 1.15), "same"),
        ((0.9, 1.0, 1.1), (1.3, 1.3, 1.3), "slower"),
    ],
)
def test_a_change_within_the_noise_is_none(old, new, verdict):
    (change,) = compare(results(cell("a", *old)), results(cell("a", *new)))
    assert change.verdict == verdict, change


def test_a_cell_that_lost_its_time_is_broken():
    (change,) = compare(results(cell("a", 1.0)), results(cell("a", status="wrong")))
    assert change.verdict == "broken", change


@pytest.mark.parametrize("change", [{"name": "another"}, {"versions": {"torch": "2.1"}}, {"commit": "abc+"}])
def test_results_of_another_machine_are_not_continued(change):
    kept = results(cell("a", 1.0))
    kept.resume({**MACHINE, "started": "later", "clocks": {"clocks.sm": "1"}})
    with pytest.raises(ValueError, match=next(iter(change))):
        kept.resume({**MACHINE, **change})


def test_results_of_other_rounds_are_not_continued():
    kept = Results(MACHINE, {"rounds": 5, "seconds": 0.1})
    kept.require_same_settings(rounds=5, seconds=0.1)
    Results(MACHINE).require_same_settings(rounds=3)
    with pytest.raises(ValueError, match="rounds 5, here 3: --rounds 5 goes on with it"):
        kept.require_same_settings(rounds=3, seconds=0.1)


def test_a_resumed_run_says_which_cells_are_its_own(tmp_path):
    """Its start, clocks and ceilings are its own too; one that added no cell leaves nothing."""
    kept = Results({**MACHINE, "started": "first"}, {"relative_to": "a"}, path=tmp_path / "out.json")
    kept.add([cell("a", 1.0, 2.0, 2.0, length=8)])
    assert machine_line(kept).endswith("; relative: times as fast as a"), machine_line(kept)
    assert "commit abc; started first; " in machine_line(kept)
    for started in ("in vain", "later"):
        kept = Results.read(kept.path)
        kept.resume({**MACHINE, "started": started, "ceilings": {"copy": 15.0}})
        kept.claim()
    kept.add([cell("a", 4.0, 4.0, 4.0), cell("b", 2.0, 2.0, 2.0), cell("b", 2.0, 2.0, 4.0, length=8)])
    again = Results.read(kept.path)
    assert [each["started"] for each in again.resumed] == ["later"]
    assert again.machine["started"] == "first"
    assert [each.run for each in again.cells] == [0, 1, 1, 1]
    assert "3 of 4 cells are of a run that resumed it (run 2), started later, with a copy of 15 GB/s" in machine_line(again)
    ((_, rows),) = family_tables(again)
    assert [(row[0], row[8]) for row in rows] == [
        ("S 8 B 1 H 8", "1.00 x"),
        ("S 1024 B 1 H 8 (run 2)", "1.00 x"),
        ("S 1024 B 1 H 8 (run 2)", "2.00 x"),
        ("S 8 B 1 H 8 (run 2)", "~1.00 x"),
    ], "of two runs no rounds were side by side: the ratio is that of the medians"
    with pytest.raises(ValueError, match="another commit"):
        again.resume({**MACHINE, "commit": "abc+"})


def test_tables_say_what_each_cell_is():
    ((family, rows), (_, layout_rows)) = family_tables(FULL)
    assert "forward, fp32" in family, family
    assert len(rows) == 5, rows
    by_key = {(row[0].split()[1], row[1]): row for row in rows}
    assert by_key["512", "b"][8] == "0.55 x", by_key["512", "b"]
    assert by_key["1024", "b"][2] == "wrong: o: off <by> much"
    assert by_key["1024", "c"][2] == "unsupported: it takes cuda"
    assert len(layout_rows) == 2
    assert "commit abc" in machine_line(FULL)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_table_on_a_terminal_folds_no_number(width):
    for family, rows in family_tables(FULL):
        cells = FULL.families()[family]
        columns, shown = fitted(cells, rows, width)
        out = io.StringIO()
        Console(file=out, width=width).print(rich_table(columns, shown))
        assert len(out.getvalue().splitlines()) == len(rows) + 2, out.getvalue()
        assert {"workload", "backend", "ms", "relative"} <= set(columns)
        assert (columns == COLUMNS) == (width == 160), columns
        assert [row[2] for cell, row in zip(cells, shown) if cell.status != "time"] == [c.status for c in cells if c.status != "time"]


def test_the_reason_of_every_cell_without_a_time_is_said_once():
    cells = [cell("c", status="unsupported", detail="it takes cuda", length=n) for n in (8, 16)] + [
        cell("b", status="wrong"),
        cell("a", 1.0),
    ]
    assert reasons(cells) == [("S 8 B 1 H 8; S 16 B 1 H 8", "c", "unsupported: it takes cuda"), ("S 1024 B 1 H 8", "b", "wrong")]


def test_pictures_hold_every_time():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra bench)")
    made = figures(FULL)
    assert set(made) == {"Speed against length", "Memory against length", "Time against density", "Roofline"}, set(made)
    (axes,) = made["Speed against length"].axes
    lines = {line.get_marker(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    expected = (4e9 / 1.1 / 1e9, 4e9 / 4.0 / 1e9)
    assert lines["o"][0] == [512, 1024], lines
    assert lines["o"][1] == pytest.approx(expected), lines
    assert figures(results(cell("a", status="wrong"))) == {}, "nothing to draw is no picture"


def test_a_curve_over_density_is_of_one_length():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra bench)")
    layouts = {"random:1": 1.0, "random:0.5": 0.5}
    cells = [cell("a", n * density, length=n, layout=layout, density=density) for n in (64, 128) for layout, density in layouts.items()]
    figure = figures(results(*cells))["Time against density"]
    axes = figure.axes
    assert "random layout" in figure.get_suptitle(), "what all share is said once, above them"
    assert [each.get_title() for each in axes] == ["S 64", "S 128"]
    for length, each in zip((64, 128), axes):
        assert list(each.lines[0].get_ydata()) == [length * 0.5, length * 1.0]


def test_bars_end_at_the_fastest_and_the_slowest_round():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra bench)")
    cells = [cell("a", 1.0, 2.0, 9.0, layout=f"random:{density}", density=density) for density in (0.5, 1.0)]
    (axes,) = figures(results(*cells))["Time against density"].axes
    (bars,) = axes.collections
    for segment in bars.get_segments():
        assert sorted(segment[:, 1]) == [1.0, 9.0], segment


@pytest.mark.parametrize(
    ("sizes", "titles"),
    [
        ([{"batch": b} for b in (1, 4)], ["B 1", "B 4"]),
        ([{"heads": h, "kv_heads": 8} for h in (8, 16)], ["H 8", "16 heads over 8, H 16"]),
        ([{"length": n} for n in (32, 64)], ["S 32", "S 64"]),
    ],
    ids=("batch", "heads", "length"),
)
def test_a_curve_has_one_point_a_place(sizes, titles):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra bench)")
    cells = []
    for n in (256, 512):
        for each in sizes:
            workload = dataclasses.replace(Workload(length=n, kv_length=n), **each)
            cells.append(dataclasses.replace(cell("a", 1.0), workload=workload))
    axes = figures(results(*cells))["Speed against length"].axes
    assert all(list(line.get_xdata()) == [256, 512] for each in axes for line in each.lines)
    assert len(axes) == len(titles)
    if sizes[0].keys() != {"heads", "kv_heads"}:
        assert [each.get_title() for each in axes] == titles


def test_many_kinds_of_call_make_rows_of_roofs_with_no_text_among_the_points():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra bench)")
    works = [Workload(dtype=dtype, direction=d) for dtype in ("float16", "bfloat16", "float32") for d in ("forward", "backward", "both")]
    figure = figures(results(*[dataclasses.replace(cell("a", 1.0), workload=work) for work in works]))["Roofline"]
    assert len({axes.get_subplotspec().rowspan.start for axes in figure.axes}) > 1, "nine in a row are too small to read"
    assert figure.get_size_inches()[0] < 20
    assert all(not axes.texts for axes in figure.axes)
    assert "copy 0.02 TB/s" in figure.axes[0].get_title()


def test_a_long_title_is_no_wider_than_its_axes():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra bench)")
    cells = [cell("a", 64 * density, layout=f"random:{density}", density=density) for density in (1.0, 0.5)]
    (axes,) = figures(results(*cells))["Time against density"].axes
    assert len(axes.get_title().splitlines()) > 1
    assert max(map(len, axes.get_title().splitlines())) < 60, axes.get_title()


def test_the_roof_has_its_corner_where_memory_and_arithmetic_take_as_long():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra bench)")
    cells = [dataclasses.replace(cell("a", 1.0), flops=intensity * 10**6, hbm_bytes=10**6) for intensity in (10, 10000)]
    machine = {"ceilings": {"copy": 2000.0, "float32": 500.0, "bfloat16": 500.0}}
    (axes,) = figures(Results(machine, {}, cells))["Roofline"].axes
    roof = axes.lines[-1]
    assert (250.0, 500.0) in list(zip(roof.get_xdata(), roof.get_ydata()))


class Fetches(HTMLParser):
    """Collects what a browser would fetch, and the text."""

    def __init__(self):
        super().__init__()
        self.links, self.text, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href") and not (value or "").startswith("#")]

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_holds_all_and_fetches_nothing():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra bench)")
    html = page(FULL, compare(FULL, dataclasses.replace(FULL)))
    seen = Fetches()
    seen.feed(html)
    assert seen.links == [], f"the page fetches {seen.links}"
    assert not re.search(r"url\((?!#)|@import", html), "a style fetches something"
    text = " ".join(seen.text)
    assert seen.tags.count("svg") == 4, "one picture is missing"
    assert "A <machine>" in text, "text is escaped, and shown as it is"
    assert "o: off <by> much" in text
    assert "7 of 7 cells are the same within the noise" in text
    assert text.count("attnzoo bench --backend") == len(FULL.cells), "each cell has the command that repeats it"
