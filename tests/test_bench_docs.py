"""The measured parts of docs/bench.md, io.md and end_to_end.md are what the committed results say; results with holes make tables."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attnzoo import AttentionSpec
from attnzoo.bench.results import Cell, Results
from attnzoo.bench.workload import Workload
from attnzoo.cli.io import PAPER_BLOCK, PAPER_SHAPE
from attnzoo.traffic import of_kernels, of_paper, of_standard

ROOT = Path(__file__).parents[1]
CEILINGS = {"float16": 500.0, "copy": 2000.0}
MACHINE = {"name": "card", "device": "cuda", "versions": {"torch": "2", "triton": "3", "other": "4"}, "commit": "abc", "ceilings": CEILINGS}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "end_to_end"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.mark.parametrize(
    ("page", "name", "results"),
    [("bench.md", "bench_tables", "bench.json"), ("io.md", "io_tables", "io.json"), ("end_to_end.md", "report", "end_to_end.json")],
)
def test_a_page_shows_the_committed_results(script, page, name, results):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    shown = text.partition("<!-- measured:begin -->")[2].partition("<!-- measured:end -->")[0].strip()
    file = ROOT / "benchmarks" / "results" / "h200" / results
    if not file.exists():
        assert shown.startswith("Known gap"), f"docs/{page} shows numbers of no committed results"
        return
    module = script(name)
    found = Results.read(file) if name == "bench_tables" else json.loads(file.read_text())
    if name == "io_tables":
        found = module.with_accounts(found)
    assert shown == module.measured(found), f"write docs/{page} anew: it says what its script says"


def test_the_curves_on_a_cpu_are_the_committed_ones(script):
    results = json.loads((ROOT / "benchmarks" / "results" / "end_to_end_cpu.json").read_text())
    table = script("report").losses(results["curves"])
    assert table in (ROOT / "docs" / "end_to_end.md").read_text(encoding="utf-8"), table


def test_readme_and_hopper_show_the_committed_speeds(script):
    tables = script("bench_tables")
    expected = tables.speed(Results.read(tables.FILE))
    begin, end = tables.SPEED
    for page in tables.SPEED_PAGES:
        shown = (ROOT / page).read_text(encoding="utf-8").partition(begin)[2].partition(end)[0].strip()
        assert shown == expected, f"run python benchmarks/bench_tables.py: {page} says something else"


def test_the_committed_page_is_that_of_the_committed_results(script):
    """All but its pictures, which another version of matplotlib draws otherwise."""
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    tables = script("bench_tables")

    def without_pictures(text: str) -> str:
        return re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)

    committed = tables.PAGE.read_text(encoding="utf-8")
    assert committed.count("<svg") == 4, "speed, memory, density, roofline"
    assert without_pictures(committed) == without_pictures(tables.page(Results.read(tables.FILE))), "run python benchmarks/bench_tables.py"


@pytest.mark.parametrize("page", ["bench.md", "io.md", "end_to_end.md"])
def test_the_pictures_of_a_page_are_committed(page):
    names = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    missing = [name for name in names if not (ROOT / "docs" / name).exists()]
    assert not missing, f"docs/{page} shows {missing}"


def cell(backend: str, workload: Workload, status: str = "time", ms: float = 1.0, detail: str = "") -> Cell:
    return Cell(backend, workload, status, detail, (ms,) * 3 if status == "time" else (), flops=10**12, hbm_bytes=10**9)


def test_a_matrix_with_holes(script):
    """The fastest is bold, a cell without a time says why, one that is missing is empty."""
    short, long = (Workload(length=n, kv_length=n, device="cuda", cache="cold") for n in (512, 1024))
    layout = Workload(device="cuda", cache="cold", layout="random:0.5")
    cells = [cell("flash", short), cell("fa4", short, ms=2.0), cell("flash", long, "wrong", detail="o is off | by 1"), cell("fa4", layout)]
    text = script("bench_tables").measured(Results(MACHINE, {"rounds": 3, "seconds": 0.1}, cells))
    assert "| 64 | no | 512 | **1000** | 500 |" in text, text
    assert "| 64 | no | 1024 | wrong |  |" in text, text
    assert "| forward | no | 1 | 2.00 | 2.00 at D = 64, S = 512 |" in text, text
    assert "| `fa4` | 2.000 (2.000; 1) |  |\n\nRandom" in text, "one peer needs no row for the fastest: " + text
    assert "| 1024 | 1 | 1.000 / - |" in text, text
    assert "4 cells: 3 time, 1 wrong." in text, text
    assert "wrong: o is off / by 1 |" in text, text
    assert script("bench_tables").measured(Results(MACHINE, {}, [cell("flash", long, "error")])), "nothing has a time"


def test_speed_against_each_peer_and_the_fastest_of_each_cell(script):
    works = [Workload(length=n, kv_length=n, device="cuda", cache="cold") for n in (512, 1024)]
    times = {"flash": (2.0, 2.0), "fa4": (1.0, 8.0), "fa3": (4.0, 4.0)}
    cells = [cell(name, w, ms=ms) for name, every in times.items() for w, ms in zip(works, every)]
    text = script("bench_tables").speed(Results(MACHINE, {}, cells))
    assert "512 to 1024 keys" in " ".join(text.split()), text
    assert "| `fa4` | 1.414 (0.500; 2) |  |" in text, text
    assert "| `fa3` | 2.000 (2.000; 2) |  |" in text, text
    assert "| the fastest of them, cell by cell | 1.000 (0.500; 2) |  |" in text, text


def test_bytes_with_holes(script):
    tables = script("io_tables")

    def case(ratio: float | None) -> dict[str, Any]:
        counted = None if ratio is None else ratio * 1e9
        kernels = [{"kernel": name, "dram_read": size, "dram_written": 0.0} for name, size in (("small", 1e8), ("large", 6e8))]
        found = {"predicted_l2": 1e9, "compulsory": 1e8, "measured_l2": counted, "measured_dram": None, "ratio": ratio}
        return found | (
            {"problem": "no permission"} if ratio is None else {"measured_dram": 7e8, "kernels": kernels} if ratio > 1.1 else {}
        )

    measure = {"dense-forward-8192": case(1.1), "dense-both-8192": case(1.2), "sparse-both-8192": case(None)}
    paper = {
        "flash": {"ms": 2.0, "gflop": 1.0, "l2_gb": 2.0},
        "eager, with mask and dropout": {"ms": 20.0, "l2_gb": 20.0},
        "sdpa_cudnn": {"error": "E"},
    }
    tiled = {"16 x 16": {"ms": 3.0, "l2_gb": 4.0}, "256 x 64": {"error": "too large", "l2_gb": 1.0}}
    text = tables.measured({"machine": MACHINE, "measure": measure, "paper": paper, "tiles": tiled})
    assert "| dense | forward | 8192 | 1 | 1.1 | 1.100 | 0.1 |  |" in text, text
    assert "must move: dense-both-8192: 7.0 times the least, 0.6 GB of it in `large`." in text, text
    assert "1 of 3 cases are within 15% of the account. Beyond it: dense-both-8192 (1.20). sparse-both-8192 was not counted" in text, text
    assert "| flash | 2.00 | 10.0 x | 1.0 | 2.0 | 7.3 / 5.7 x |" in text, text
    assert "Why the gain is 10.0 and not the paper's 5.7" in text, text
    assert "| 16 x 16 | 4.00 | 3.000 | 1.33 | 92 |" in text, text
    assert "| 256 x 64 | 1.00 | too large |  |  |" in text, text
    assert "As in the paper" not in text, "one tile with a time shows no trend"
    assert "behind it, which was not counted" in " ".join(text.split()), text
    bytes_ = {name: case(1.0) | {"measured_dram": memory} for name, memory in (("flash", 2e9), ("eager, with mask and dropout", 3e10))}
    text = tables.measured({"machine": MACHINE, "paper": paper, "paper_bytes": bytes_})
    assert "| flash | 1 | 1 | 0.1 | 2 | 4.4 |" in text, text
    assert "behind it, where this card's fall by 15.0." in " ".join(text.split()), text
    assert "| flash | no permission |" in tables.measured({"machine": MACHINE, "paper": paper, "paper_bytes": {"flash": case(None)}})
    pair = {"dense-forward-8": case(1.0), "dense-both-8": case(1.5) | {"predicted_l2": 1.5e9, "compulsory": 3e8, "ratio": 1.0}}
    text = tables.measured({"machine": MACHINE, "measure": pair})
    assert "| dense | backward | 8 | 0.5 | 0.5 | 1.000 | 0.2 |" in text, text
    assert "3 of 3 cases are within 15%" in text, text
    late = tables.measured({"machine": MACHINE, "paper": paper, "commits": {"measure": "abc", "paper": "def"}})
    assert "commit abc, paper at def (" in late, late
    assert "ms" not in tables.measured({"machine": MACHINE}), "parts that did not run are left out"


PREDICTED = {"predicted_l2", "compulsory", "ratio", "steps", "gflop", "l2_gb"}
"""What the code says; `io_gpu.py` wrote it once, and a file of that time still reads."""


def test_bytes_that_were_predicted_are_no_results(script):
    """The committed file holds what was measured; each case has today's account beside it, also where a file says otherwise."""
    tables = script("io_tables")
    committed = json.loads(tables.FILE.read_text())
    parts = ("measure", "paper", "paper_bytes", "tiles")
    stored = {(part, name): PREDICTED & each.keys() for part in parts for name, each in committed[part].items()}
    assert not any(stored.values()), {place: names for place, names in stored.items() if names}
    expected = tables.with_accounts(committed)
    stale = {
        part: {name: each | dict.fromkeys(PREDICTED, 1.0) for name, each in committed[part].items()} for part in ("measure", "paper_bytes")
    }
    again = tables.with_accounts(committed | stale)
    for part in stale:
        for name, each in expected[part].items():
            assert each == {key: value for key, value in again[part][name].items() if key in each}, (part, name)


def test_flops_and_bytes_of_the_committed_matrix_are_todays(script):
    """A cell keeps the account by which its TFLOP/s and GB/s were told; an account that changed needs new tables."""
    found = Results.read(script("bench_tables").FILE).cells
    costs = {workload: workload.cost() for workload in {cell.workload for cell in found}}
    off = [cell.key for cell in found if (cell.flops, cell.hbm_bytes) != (costs[cell.workload].flops, costs[cell.workload].hbm_bytes)]
    assert not off, off


def test_counted_bytes_are_near_the_account(script):
    """Each of the 8 cases, and what each backward has beyond its forward; device memory is never below what must move."""
    tables = script("io_tables")
    cases = tables.with_accounts(json.loads(tables.FILE.read_text()))["measure"]
    assert cases.keys() == tables.CASES.keys()
    assert len(cases) == 8
    for name, case in tables.with_backward(cases).items():
        assert abs(case["ratio"] - 1) <= tables.ALLOWED, f"{name}: {case['ratio']}"
        assert case["compulsory"] <= case["measured_dram"] <= case["measured_l2"], name


def test_the_account_of_the_papers_shape_on_its_page_is_what_is_computed():
    """The rows of docs/io.md beside the paper's table."""
    q = torch.empty(PAPER_SHAPE, dtype=torch.float16, device="meta", requires_grad=True)
    spec = AttentionSpec.of(q, q, q)
    accounts = {
        "standard attention with mask and dropout, this account": of_standard(spec, has_mask_and_dropout=True),
        f"FlashAttention, the paper's algorithm with {PAPER_BLOCK} keys a block, this account": of_paper(spec, PAPER_BLOCK),
        "our kernels on Hopper, this account, to and from L2": of_kernels(spec, (9, 0)),
    }
    text = (ROOT / "docs" / "io.md").read_text(encoding="utf-8")
    for name, account in accounts.items():
        row = f"| {name} | {account.flops / 1e9:.1f} | {account.moved / 1e9:.1f} |"
        assert row in text, f"docs/io.md lacks {row}"


def test_steps_of_two_runs_are_one_table(script, tmp_path):
    report = script("report")
    row = {"model": "m", "length": 8, "status": "time", "tokens_s": 10.0, "ms": 1.0, "peak_gib": 2.0}
    files = []
    for attention, more in (("stock", {}), ("flash", {"tokens_s": 20.0}), ("eager", {"status": "out of memory", "detail": "a | b"})):
        files.append(tmp_path / f"{attention}.json")
        files[-1].write_text(json.dumps({"machine": MACHINE, "steps": [{**row, "attention": attention, **more}], "curves": []}))
    text = report.measured(report.merged(files))
    assert "| model | length | attention | run | tokens/s |" in text, text
    assert "| m | 8 | flash | 2 | 20 |  | ~2.00 x | 1.0 | 2.0 |" in text, f"two runs were not side by side: {text}"
    assert "| m | 8 | eager | 3 | out of memory: a / b | | | | |" in text, text
    assert "the paper's" not in text, "it has no model of the paper's"
    curves = [{"attention": "eager", "losses": [1.0, 0.5], "held_out": 0.5, "width": 8}]
    assert f"({report.CARD_CURVES})" in report.measured({"machine": MACHINE, "steps": [], "curves": curves})
    steps = [
        {**row, "model": "BERT-large", "length": 512, "attention": name, "tokens_s": speed} for name, speed in (("eager", 2), ("flash", 3))
    ]
    assert "| BERT-large | 512 | 1.50 x | 1.15 x |" in report.measured({"machine": MACHINE, "steps": steps, "curves": []})
    again = tmp_path / "again.json"
    later = {**MACHINE, "commit": "def", "started": "2026-01-02T03:04:05+00:00"}
    rows = [{**row, "attention": name, "tokens_s": speed} for name, speed in (("eager", 5.0), ("tiled", 10.0))]
    again.write_text(json.dumps({"machine": later, "steps": rows, "curves": []}))
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps(report.merged(files)))
    for parts in ([*files, again], [whole, again]):  # of a file that is merged already each row keeps its run
        text = report.measured(report.merged(parts))
        assert "| m | 8 | eager | 4 | 5 | 1.00 x | ~0.50 x |" in text, text
        assert "| m | 8 | tiled | 4 | 10 | 2.00 x | ~1.00 x |" in text, text
        assert "out of memory" not in text, "a row that ran again takes the place of the old one"
        assert "Runs: 1 at commit abc; 2 at commit abc; 4 at commit def, 2026-01-02T03:04:05+00:00." in text, text
    alone = report.measured(report.merged([again]))
    assert "| model | length | attention | tokens/s |" in alone, "one run needs no column"
    assert "commit def" in alone, alone
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"machine": {**MACHINE, "name": "another"}, "steps": [], "curves": []}))
    with pytest.raises(SystemExit, match="several machines"):
        report.merged([*files, other])
