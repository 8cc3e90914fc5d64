"""The kit under compute-sanitizer: how it is started, and what becomes of an error. A stand-in plays the tool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnzoo.testing.certificate import Run
from attnzoo.testing.judge import SANITIZER_FOUND, SuiteError, environment, judge, limit, sanitized

RUN = Run("cpu", "x86_64", "quick", "0:1", ("float32",), 3)


def stand_in(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$@" > {folder}/arguments\n{script}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_an_error_that_the_tool_finds_is_no_certificate(tmp_path, monkeypatch):
    stand_in(tmp_path, f"exit {SANITIZER_FOUND}", monkeypatch)
    with pytest.raises(SuiteError, match="racecheck found errors"):
        judge("naive", RUN, workers="0", known_failures=(), distribution={}, sanitizer="racecheck")
    given = (tmp_path / "arguments").read_text().split()
    assert given[:6] == ["--tool", "racecheck", "--target-processes", "all", "--error-exitcode", str(SANITIZER_FOUND)]
    assert given[7:9] == ["-m", "pytest"]
    assert given[given.index("--timeout") + 1] == "0", "it takes its time"


def test_a_clean_run_is_certified(tmp_path, monkeypatch):
    stand_in(tmp_path, 'shift 6; exec "$@"', monkeypatch)
    certificate = judge("naive", RUN, workers="0", known_failures=(), distribution={}, sanitizer="memcheck")
    assert certificate.verdict == "pass"


@pytest.mark.parametrize(
    ("timeout", "tool", "expected"),
    [(None, None, []), (None, "memcheck", ["0"]), (0.0, None, ["0.0"]), (7.5, None, ["7.5"]), (9.0, "memcheck", ["9.0"])],
)
def test_a_sanitizer_has_all_the_time_unless_told(timeout, tool, expected):
    assert limit(timeout, tool)[1:] == expected


def test_each_tensor_is_an_allocation_of_its_own():
    assert environment("0", "folder", "memcheck")["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in environment("0", "folder")


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SuiteError, match="compute-sanitizer is not on the PATH"):
        sanitized("memcheck")


def test_a_cpu_has_no_cuda_kernels():
    command = [sys.executable, "-m", "attnzoo", "check", "naive", "--sanitizer", "memcheck"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--sanitizer" in ended.stderr
