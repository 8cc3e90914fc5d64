"""`attnzoo bench` on the command line: what is malformed is said before anything is measured."""

from __future__ import annotations

import json
import sys

import pytest

from attnzoo.bench.results import Cell, Results
from attnzoo.bench.workload import Workload
from attnzoo.cli import main

WORKLOAD = Workload(length=8, kv_length=8, heads=1, kv_heads=1)
MACHINE = {"name": "a machine", "device": "cpu", "versions": {"torch": "2"}, "commit": "abc", "ceilings": {"copy": 20.0}}


BAD_MACHINES = [{"machine": {**MACHINE, **change}} for change in ({"versions": [1]}, {"ceilings": 3}, {"ceilings": {"copy": "fast"}})]


@pytest.fixture
def bench(capsys, monkeypatch):
    """The command in this process: its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["attnzoo", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def saved(tmp_path):
    """Results on disk, with a cell a backend."""

    def write(name, machine=MACHINE, **times):
        path = tmp_path / name
        cells = [Cell(backend, WORKLOAD, "time", "", (ms,) * 3, flops=10**9, hbm_bytes=10**6) for backend, ms in times.items()]
        Results(machine, {"relative_to": "naive"}, path=path).add(cells)
        return path

    return write


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--load", "{old}", "--length", 64), "takes no --length"),
        (("--load", "{old}", "--kv-length", 64, "--quick"), "takes no --quick, --kv-length"),
        (("--load", "{old}", "{toml}"), "takes no MATRIX.toml"),
        (("--load", "{old}", "--backend", "naive"), "takes no --backend"),
        (("--length", 64, "--resume"), "--resume goes on with an --output file"),
        (("--length", 64, "--output", "{folder}"), "is a folder; it takes a file"),
        (("--length", 64, "--page", "{folder}"), "is a folder; it takes a file"),
        (("--length", 64, "--plots", "{old}"), "is a file; --plots takes a folder"),
        (("--length", 64, "--device", "tpu"), "device 'tpu' can't be used here"),
        (("--length", 64, "--device", "cpu", "--relative-to", "naif"), "no backend is named 'naif'; did you mean 'naive'"),
        (("{toml}",), "no backend is named 'naif'"),
        (("--length", 64, "--device", "cpu", "--backend", "auto"), "auto is a choice among backends, and each is timed by its own name"),
        (("--load", "{nowhere}"), "FileNotFoundError"),
    ],
)
def test_what_does_not_fit_is_said_at_once(bench, saved, tmp_path, arguments, part):
    (tmp_path / "typo.toml").write_text("[[workloads]]\nbackends = ['naif']\nlength = 8\n")
    places = {"old": saved("old.json", naive=1.0), "toml": tmp_path / "typo.toml", "folder": tmp_path, "nowhere": tmp_path / "no.json"}
    code, out, err = bench(*(str(each).format(**places) for each in arguments))
    assert (code, out) == (2, ""), err
    assert part in err, err


@pytest.mark.parametrize("option", ["--output", "--page", "--plots"])
def test_what_can_not_be_written_is_said_before_anything_is_measured(bench, monkeypatch, option, tmp_path):
    def refused(**where):
        raise PermissionError(13, "Permission denied", str(where["dir"]))

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    code, out, err = bench("--length", 64, option, tmp_path / "new")
    assert (code, out) == (2, ""), err
    assert err.startswith("error: nothing can be written in "), err
    assert err.endswith(": Permission denied\n"), err


def test_a_page_that_can_not_be_written_ends_in_a_line(bench, saved, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs matplotlib")

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device", str(self))

    old = saved("old.json", naive=1.0)
    monkeypatch.setattr("pathlib.Path.write_text", full)
    code, out, err = bench("--load", old, "--page", tmp_path / "page.html")
    assert code == 2, err
    assert "naive" in out, "what was measured is shown all the same"
    assert err.startswith("error: [Errno 28] No space left on device"), err


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": []},
        {"rounds": [0.0]},
        {"rounds": ["1"]},
        {"status": "tiem"},
        {"workload": {"length": "8"}},
        {"rounds": None},
        {"run": 1},
        {"run": "0"},
    ],
    ids=str,
)
def test_a_file_that_was_changed_by_hand_is_no_result(bench, saved, change):
    path = saved("old.json", naive=1.0)
    data = json.loads(path.read_text())
    data["cells"][0] |= change
    path.write_text(json.dumps(data))
    code, _, err = bench("--load", path)
    assert code == 2, err
    assert "holds no results of attnzoo bench" in err, err


@pytest.mark.parametrize(
    "change", [{"machine": []}, {"settings": 3}, {"resumed": {}}, {"resumed": [3]}, {"cells": {}}, {"cells": [3]}, *BAD_MACHINES], ids=str
)
def test_a_file_of_another_form_is_no_result(bench, saved, change):
    path = saved("old.json", naive=1.0)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    code, _, err = bench("--load", path)
    assert code == 2, err
    assert "holds no results of attnzoo bench" in err, err


def test_results_to_compare_with_that_share_no_cell_are_refused(bench, saved):
    code, _, err = bench("--load", saved("new.json", naive=1.0), "--compare", saved("old.json", tiled=1.0))
    assert code == 2, err
    assert "no cell in common" in err, err


def test_what_a_comparison_leaves_out_is_said(bench, saved):
    old = saved("old.json", {**MACHINE, "name": "another", "versions": {"attnzoo": "0", "torch": "1"}}, naive=1.0, gone=1.0)
    machine = {**MACHINE, "versions": {"attnzoo": "0", "torch": "2", "triton": "4"}}
    code, _, err = bench("--load", saved("new.json", machine, naive=1.0, fresh=1.0), "--compare", old)
    assert code == 0, err
    assert "1 cell of 2 there is not here" in err, err
    assert "another name: another, here a machine" in err, err
    assert "is of other versions: torch 1, here 2; triton none, here 4\n" in err, f"what is the same needs no word: {err}"


def test_an_interrupted_run_says_what_it_leaves(bench, monkeypatch, tmp_path):
    def cut_off(matrix, contestants, results, progress):
        results.add([Cell("naive", WORKLOAD, "time", "", (1.0,))])
        raise KeyboardInterrupt

    monkeypatch.setattr("attnzoo.bench.machine.look", lambda device: MACHINE)
    monkeypatch.setattr("attnzoo.bench.run.run", cut_off)
    out = tmp_path / "out.json"
    code, _, err = bench("--length", 8, "--length", 16, "--backend", "naive", "--device", "cpu", "--output", out)
    assert code == 130, err
    assert f"1 of 2 cells is in {out}: --resume runs the rest" in " ".join(err.split()), err
    assert len(Results.read(out).cells) == 1
