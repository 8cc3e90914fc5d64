"""benchmarks/hopper_gpu.py where there is no card: what is wrong or was not run is counted, and told by the exit status."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("hopper_gpu")
    monkeypatch.delitem(sys.modules, "hopper_gpu")  # other tests find nothing of it
    return module


def test_cases_that_were_not_run_are_counted(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def __init__(self, *_: object, **__: object) -> None:
            self._processes: dict[int, object] = {}

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...

        def shutdown(self, **_: object) -> None: ...

        def submit(self, function: object, case: object) -> Pool:
            return self

        def result(self, timeout: float) -> dict[str, object]:
            raise TimeoutError

    monkeypatch.setattr(bench, "ProcessPoolExecutor", Pool)
    rows = bench.run_checks(1, "dense")
    assert len(rows) == sum("dense" in case.name for case in bench.check_cases())
    assert all(row["bad"] for row in rows), "a case that was not run counts as right"


@pytest.mark.parametrize(("bad", "expected"), [([], 0), (["o 1.0 > 0.004"], 1)])
def test_the_exit_status_says_whether_all_is_right(
    bad: list[str], expected: int, bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "run_checks", lambda jobs, pattern: [{"case": "dense d64", "errors": {"o": 1e-3}, "bad": bad}])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(bench, "version", lambda name: "0")
    monkeypatch.setattr(sys, "argv", ["hopper_gpu.py", "check", "--json", str(tmp_path / "check.json")])
    assert bench.main() == expected
    assert json.loads((tmp_path / "check.json").read_text())["rows"][0]["bad"] == bad


def test_a_case_has_the_same_numbers_in_every_process() -> None:
    """Python's own hash of a string is another in each."""
    command = [sys.executable, "-c", "import hopper_gpu; print(hopper_gpu.seed_of(hopper_gpu.check_cases()[0]))"]
    seeds = {subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(seeds) == 1
