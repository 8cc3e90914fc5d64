"""benchmarks/io_gpu.py without a GPU: what ncu is told, how its output is read, and what stands in the file when it fails."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType

import pytest
from ncu_stand_in import install

FOLDER = Path(__file__).parents[1] / "benchmarks"
METRICS = [
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "l1tex__m_l1tex2xbar_write_bytes.sum",
    "l1tex__m_xbar2l1tex_read_bytes.sum",
]


@pytest.fixture
def io_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import io_gpu as module

    return module


@pytest.fixture
def io_cases(io_gpu: ModuleType) -> ModuleType:
    import io_cases as module

    return module


def test_each_case_has_its_kernels(io_gpu, tmp_path, monkeypatch):
    """Kernels come between marks; the clocks are left alone, and metrics that this ncu lacks are not asked for."""
    mark = [0, 1, "at::cuda::spin_kernel(long)", 1, 1, 1, 1]
    rows = [mark, [1, 1, "forward", "1,000", 500, 10, 90], mark, [3, 1, "forward", 1, 2, 3, 4], [4, 1, "backward", 10, 20, 30, 40]]
    record = install(tmp_path, monkeypatch, METRICS, rows)
    found = dict(io_gpu.measure(["dense-forward-8192", "dense-both-8192"]))
    assert [kernel["kernel"] for kernel in found["dense-both-8192"]["kernels"]] == ["forward", "backward"]
    assert (found["dense-forward-8192"]["measured_l2"], found["dense-forward-8192"]["measured_dram"]) == (100, 1500)
    assert (found["dense-both-8192"]["measured_l2"], found["dense-both-8192"]["measured_dram"]) == (77, 33)
    (call,) = map(json.loads, record.read_text().splitlines())
    assert call[call.index("--clock-control") + 1] == "none"
    assert call[call.index("--metrics") + 1] == ",".join(sorted(METRICS))
    assert call[-3:] == ["run", "dense-forward-8192", "dense-both-8192"]


def test_a_case_that_was_not_reached_says_why(io_gpu, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, METRICS, [[0, 1, "spin_kernel", 1, 1, 1, 1], [1, 1, "forward", 1, 1, 1, "n/a"]])
    found = dict(io_gpu.measure(["dense-forward-8192", "sparse-forward-8192"]))
    assert found["dense-forward-8192"]["measured_l2"] is None, "no number of a metric that ncu could not count"
    assert "what a backend prints" in found["sparse-forward-8192"]["problem"]
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    (each,) = dict(io_gpu.measure(["dense-both-32768"])).values()
    assert "FileNotFoundError" in each["problem"]


def test_the_papers_shape_is_counted_too(io_gpu, io_cases, tmp_path, monkeypatch):
    mark = [0, 1, "spin_kernel", 1, 1, 1, 1]
    rows = [mark, [1, 1, "forward", 3, 1, 10, 90], mark, [2, 1, "softmax", 20, 10, 300, 400], [3, 1, "dropout", 5, 5, 100, 200]]
    record = install(tmp_path, monkeypatch, METRICS, rows)
    found = dict(io_gpu.paper_bytes())
    assert {name: (each["measured_l2"], each["measured_dram"]) for name, each in found.items()} == {
        "flash": (100, 4),
        io_gpu.EAGER: (1000, 40),
    }
    accounts = io_cases.accounts_of_paper()
    assert accounts.keys() == found.keys()
    assert accounts["flash"].compulsory == accounts[io_gpu.EAGER].compulsory, "q, k, v, o and the gradients are the same"
    (call,) = map(json.loads, record.read_text().splitlines())
    assert call[-3:] == ["run", "paper-flash", "paper-eager"]


@pytest.mark.parametrize("name", ["paper-flash", "paper-eager"])
def test_what_runs_of_the_papers_shape(io_gpu, monkeypatch, name):
    """At a tiny size on the CPU: both give three gradients."""
    monkeypatch.setattr(io_gpu, "GPT2", dataclasses.replace(io_gpu.GPT2, batch=1, length=32, kv_length=32, device="cpu"))
    monkeypatch.setitem(io_gpu.PAPER, "paper-flash", "tiled")
    found = io_gpu.call_of(name)()
    assert [gradient.shape for gradient in found] == [(1, 16, 32, 64)] * 3


def test_bytes_are_counted_on_either_side_of_the_crossbar(io_gpu):
    assert io_gpu.moved({"from_l2": 90, "to_l2": 10, "l2_sectors": 1}) == 100
    assert io_gpu.moved({"to_l2": 10, "l2_sectors": 3}) == 96
    assert io_gpu.moved({"to_l2": 10}) is None


def test_results_are_kept_as_they_come(io_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(io_gpu, "describe", lambda device: {"name": "card", "commit": "first"})
    output = tmp_path / "out.json"

    def fails_half_way():
        yield "first", {"ms": 1}
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        io_gpu.keep(output, "paper", fails_half_way())
    monkeypatch.setattr(io_gpu, "describe", lambda device: {"name": "card", "commit": "later"})
    io_gpu.keep(output, "tiles", iter([("16 x 16", {"ms": 2})]))
    kept = json.loads(output.read_text())
    assert kept["paper"] == {"first": {"ms": 1}}
    assert kept["tiles"] == {"16 x 16": {"ms": 2}}
    assert (kept["machine"]["commit"], kept["commits"]) == ("first", {"paper": "first", "tiles": "later"})


def test_the_account_follows_the_tile(io_cases):
    moved = {tile.block_m: io_cases.account_of_tile(tile).moved for tile in io_cases.TILES}
    assert moved[16] > 7 * moved[128] > 7 * moved[256]


def test_a_tile_that_is_launched_is_the_one_accounted_for(io_gpu):
    pytest.importorskip("triton", reason="needs triton")
    from attnzoo.backends.triton import problem, table

    for tile in io_gpu.TILES[:2]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(io_gpu, "TILED", dataclasses.replace(io_gpu.TILED, device="cpu"))
            with io_gpu.portable(tile):
                assert problem.tile_for("forward") == tile
    assert table.tile_for is problem.tile_for, "put back"
