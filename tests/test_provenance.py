"""benchmarks/provenance.py: what a result file says of its run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def provenance(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("provenance")


def test_the_command_names_no_folder(provenance: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/a/folder/benchmarks/hopper_gpu.py", "check", "-j", "15", "--json", "/tmp/out/check.json"])
    assert provenance.command(Path("/tmp/out/check.json")) == "python benchmarks/hopper_gpu.py check -j 15"
    monkeypatch.setattr(sys, "argv", ["hopper_gpu.py", "repeat"])
    assert provenance.command(None) == "python benchmarks/hopper_gpu.py repeat"


def test_a_package_that_is_not_there_is_missing(provenance: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNZOO_COMMIT", "0123456789ab")
    found = provenance.machine(["torch", "no-such-package"], None)
    assert found["versions"]["no-such-package"] == "missing"
    assert found["versions"]["torch"] != "missing"
    assert found["commit"] == "0123456789ab"
