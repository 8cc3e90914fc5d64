"""Where there is no GPU, Triton kernels run in Triton's interpreter; that is decided before triton is imported."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import types

import pytest

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    import interpreter

    interpreter.install()


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card of 132 multiprocessors, without triton."""
    launchers = types.ModuleType("launchers")
    launchers.processors_of = lambda device: 132  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "attnzoo.backends.triton.launchers", launchers)
