"""benchmarks/hopper_profile.py without a GPU: a process a backend, the longest kernel of each call, and why a call has none."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from ncu_stand_in import install

FOLDER = Path(__file__).parents[1] / "benchmarks"
CYCLES = "sm__cycles_elapsed.max"
CASES = ["ours: backward table d128 16/16 full s8192", "fa4: backward table d128 16/16 full s8192"]


@pytest.fixture
def hopper_profile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import hopper_profile as module

    return module


def test_the_longest_kernel_is_kept(hopper_profile, tmp_path, monkeypatch):
    rows = [[0, 1, "at::cuda::spin_kernel(long)", 9], [1, 1, "pre", "1,000"], [2, 1, "main", "90,000"], [3, 1, "post", 2000]]
    record = install(tmp_path, monkeypatch, [CYCLES], rows)
    found = dict(hopper_profile.measure(CASES, 60))
    assert found == {name: {"kernel": "main", "cycles": 90000.0} for name in CASES}
    calls = [json.loads(line) for line in record.read_text().splitlines()]
    assert [call[-2:] for call in calls] == [["run", name] for name in CASES], "a backend that can't run takes no other with it"
    assert calls[0][calls[0].index("--metrics") + 1] == CYCLES, "what this ncu does not know is not asked for"


def test_a_call_that_was_not_reached_says_why(hopper_profile, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, [CYCLES], [])
    assert "what a backend prints" in dict(hopper_profile.measure(CASES[:1], 60))[CASES[0]]["problem"]
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert "FileNotFoundError" in dict(hopper_profile.measure(CASES[:1], 60))[CASES[0]]["problem"]


def test_cases_may_stand_behind_the_options(hopper_profile, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, [CYCLES], [[0, 1, "spin_kernel", 9], [1, 1, "main", 7]])
    monkeypatch.setattr(hopper_profile, "describe", lambda device: {"name": "card"})
    output = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["hopper_profile.py", "measure", "--output", str(output), CASES[0]])
    hopper_profile.main()
    assert json.loads(output.read_text()) == {"machine": {"name": "card"}, "kernels": {CASES[0]: {"kernel": "main", "cycles": 7.0}}}
    monkeypatch.setattr("sys.argv", ["hopper_profile.py", "measure", "--output", str(output), "--only", "fa3"])
    hopper_profile.main()
    assert all(name.startswith("fa3: ") for name in json.loads(output.read_text())["kernels"])
    monkeypatch.setattr("sys.argv", ["hopper_profile.py", "measure", "ours: forward d64"])
    with pytest.raises(SystemExit):
        hopper_profile.main()
