"""What docs/bench.md, io.md and end_to_end.md say in words of the committed results is so; a change of those needs other words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attnzoo import AttentionSpec
from attnzoo.bench.results import Results
from attnzoo.bench.workload import Workload
from attnzoo.cli.io import PAPER, PAPER_SHAPE
from attnzoo.traffic import of_kernels, of_standard

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "results" / "h200"


def prose(page: str) -> str:
    """What a page says outside its measured part, in one line."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    before, _, rest = text.partition("<!-- measured:begin -->")
    return " ".join((before + rest.partition("<!-- measured:end -->")[2]).split())


def read(name: str) -> Any:
    return json.loads((MEASURED / name).read_text())


@pytest.fixture
def matrix() -> Results:
    return Results.read(MEASURED / "bench.json")


def test_what_is_said_of_the_speeds_is_so(matrix):
    """docs/bench.md, who leads from which length on."""
    assert "forward `flash` leads at S = 512 and draws with fa3 at 2048, fa3 leads from 8192 on; backward fa4 leads or" in prose("bench.md")
    for workload in {c.workload for c in matrix.cells if not c.workload.layout and c.workload.cache == "cold"}:
        speed = {c.backend: c.tflops for c in matrix.cells if c.workload == workload and c.status == "time"}
        best, length = max(speed.values()), workload.length
        if workload.direction == "forward":
            assert length != 512 or speed["flash"] == best, workload.id
            assert length != 2048 or abs(speed["flash"] / speed["fa3"] - 1) < 0.05, workload.id
            assert length < 8192 or speed["fa3"] == best, workload.id
        else:
            assert length < 2048 or speed["fa4"] > 0.97 * best, workload.id


def test_what_is_said_of_the_shortest_sparse_call_is_so(matrix):
    """docs/bench.md, where Python outlasts the kernels: this matrix's eager calls beside the kernels alone."""
    rows = read("block_sparse.json")["compare"]
    (alone,) = (row["ms"]["backward"] for row in rows if (row["dim"], row["length"], row["layout"]) == (128, 8192, "random 1/32"))
    cells = [c for c in matrix.cells if (c.workload.length, c.workload.layout) == (8192, "random:0.03125")]
    eager = {c.backend: c for c in cells if c.workload.direction == "backward"}
    names = ("block_sparse", "fa4")
    calls, kernels = (" and ".join(f"{ms:.2f}" for ms in each) for each in ([eager[n].median for n in names], [alone[n] for n in names]))
    rates = " and ".join(f"{eager[name].flops / alone[name] / 1e9:.0f}" for name in names)
    assert f"the backward's {calls} ms would be {kernels} at the [{rates} TFLOP/s]" in prose("bench.md"), (calls, kernels, rates)
    rounds = eager["block_sparse"].rounds
    assert f"from round to round `block_sparse`'s took {min(rounds):.2f} to {max(rounds):.2f} ms" in prose("bench.md"), rounds


def test_what_is_said_of_the_roof_is_so(matrix):
    copy, product = matrix.machine["ceilings"]["copy"] / 1e3, matrix.machine["ceilings"]["bfloat16"]
    shares: dict[Workload, float] = {}
    for c in (c for c in matrix.cells if c.status == "time" and copy * c.flops / c.hbm_bytes < product):
        shares[c.workload] = max(shares.get(c.workload, 0.0), c.tflops / (copy * c.flops / c.hbm_bytes))
    kinds = {(w.length, w.causal, w.layout) for w in shares}
    assert kinds == {(512, True, ""), (8192, False, "random:0.03125")}, kinds
    low, high = min(shares.values()), max(shares.values())
    assert f"the fastest of each at {100 * low:.0f} to {high:.0%} of it" in prose("bench.md"), (low, high)
    assert all(not cell.run and cell.status != "wrong" for cell in matrix.cells), "all of one run, which the page no longer has to explain"


def test_what_is_said_of_the_loss_curves_is_so():
    results = read("end_to_end.json")
    curves = {curve["attention"]: curve for curve in results["curves"]}
    held_out = [curve["held_out"] for curve in curves.values()]
    apart = {n: max(abs(a - b) for a, b in zip(curves[n]["losses"], curves["eager"]["losses"])) for n in ("stock", "flash")}
    text = prose("end_to_end.md")
    assert "flash's curve parts from eager's by as much as stock's does, and the three end within 0.003 held out" in text
    assert apart["flash"] < 1.1 * apart["stock"], apart
    assert max(held_out) - min(held_out) <= 0.003, held_out
    assert "The rows are of three runs" in text
    assert {row["run"] for row in results["steps"]} == {1, 2, 3}


def test_what_is_said_of_the_bytes_is_so():
    """docs/io.md: the account of the paper's shape, and a long dense forward's device memory."""
    q = torch.empty(PAPER_SHAPE, dtype=torch.float16, device="meta", requires_grad=True)
    spec = AttentionSpec.of(q, q, q)
    ours, standard = of_kernels(spec, (9, 0)), of_standard(spec, has_mask_and_dropout=True)
    theirs = {name: float(numbers[0]) for name, numbers in PAPER.items()}
    shares = (standard.flops / 1e9 / theirs["standard attention"], ours.flops / 1e9 / theirs["FlashAttention"])
    text = prose("io.md")
    assert f"GFLOP are 1/{shares[0]:.1f} and 1/{shares[1]:.1f} of what" in text, shares
    ratios = (theirs["FlashAttention"] / theirs["standard attention"], ours.flops / standard.flops)
    assert f"their ratio, {ratios[0]:.2f}, is that of 7 products to 6, {ratios[1]:.2f}" in text, ratios
    assert f"Of these {ours.moved / 1e9:.1f} GB at least {ours.compulsory / 1e9:.1f} must come from device memory" in text
    case = read("io.json")["measure"]["dense-forward-32768"]
    assert "Device memory sees a hundredth of a long dense forward's bytes" in text
    assert 0.009 < case["measured_dram"] / case["measured_l2"] < 0.012, case["measured_dram"]
