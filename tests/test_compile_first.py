"""benchmarks/compile_first.py: every call is tried once, the first of each family first, also when a backend takes its process down."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnzoo.bench.matrix import Matrix

FOLDER = Path(__file__).parents[1] / "benchmarks"
MATRIX = """
backends = ["naive", "tiled"]
[[workloads]]
length = [16, 32]
causal = [false, true]
[[workloads]]
backends = ["tiled"]
length = 48
"""


def test_the_first_of_each_family_come_first(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    (tmp_path / "m.toml").write_text(MATRIX)
    jobs = importlib.import_module("compile_first").jobs_of(Matrix.from_toml(tmp_path / "m.toml"), [])
    order = [(name, workload.length, workload.causal) for name, workload in jobs]
    assert len(order) == 9, order
    assert {length for _, length, _ in order[:4]} == {16}, order
    assert order[-1] == ("tiled", 48, False), order


def test_a_crash_costs_one_call(tmp_path):
    (tmp_path / "m.toml").write_text(MATRIX)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'spawn_main' in ' '.join(sys.orig_argv):\n"
        "    from attnzoo.backends.naive import Naive\n"
        "    Naive.attend = lambda *arguments, **options: os._exit(3)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / "compile_first.py"), str(tmp_path / "m.toml"), "--processes", "1", "--seconds", "100"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "tiled: 5 compiled" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("a process died; naive") == 4, done.stdout
    assert "0 calls not done" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("[[workloads]]\nlength = 16\n", (), "names no backends: give some by --backend"),
        ("[[workloads]]\nlength = 16\n", ("--backend", "naif"), "no backend is named 'naif'; did you mean 'naive'"),
        ("[[workloads]]\nlenght = 16\n", (), "a workload has lenght"),
    ],
    ids=("none", "unknown", "malformed"),
)
def test_what_would_compile_nothing_is_said(tmp_path, monkeypatch, capsys, text, arguments, said):
    monkeypatch.syspath_prepend(str(FOLDER))
    (tmp_path / "m.toml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["compile_first.py", str(tmp_path / "m.toml"), *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("compile_first").asked_for()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
