"""benchmarks/end_to_end runs small on a CPU: every status, the loss curves on real text over each other, the report."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "end_to_end"


def python(*arguments: str) -> str:
    environment = {**os.environ, "ATTNZOO_PLUGINS": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_small_models_train_and_are_reported(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    python(str(FOLDER / "run.py"), "--device", "cpu", "--small", "--output", str(out))
    results = json.loads(out.read_text())
    status = {(row["model"], row["attention"]): row["status"] for row in results["steps"]}
    assert status["tiny decoder", "tiled"] == status["tiny encoder", "tiled+butterfly"] == "time", status
    assert status["tiny decoder", "fa4"] == "error", "a backend that is not installed has no time"
    curves = {curve["attention"]: curve["losses"] for curve in results["curves"]}
    for name, losses in curves.items():
        assert losses[-1] < losses[0] - 0.5, f"{name} learns nothing: {losses}"
        apart = max(abs(one - other) for one, other in zip(losses, curves["eager"]))
        assert apart < 0.05, f"{name} is {apart} off the textbook's curve"
    shown = python(str(FOLDER / "report.py"), str(out))
    assert "| tiny encoder | 256 | tiled+butterfly |" in shown, shown
    assert "| eager |" in shown.split("held-out loss")[1], shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--attention", "flesh"), "--attention has flesh; it takes stock, "),
        (("--parts", "stepz"), "--parts has stepz; it takes curves, steps"),
        (("--output", "/nowhere/out.json"), "/nowhere is no folder"),
    ],
    ids=("attention", "parts", "output"),
)
def test_a_name_that_there_is_not_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments, said) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["run.py", "--device", "cpu", "--small", "--output", "out.json", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / "run.py"))["arguments"]()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
