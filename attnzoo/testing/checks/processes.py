"""Fresh interpreters: what importing a backend needs, and caches that several processes share."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import torch

from attnzoo.testing.failure import NotApplicable, require
from attnzoo.testing.inputs import make_call
from attnzoo.testing.problem import Problem
from attnzoo.testing.subject import Refused, Subject

__all__ = ["cold_caches", "named_without_gpu", "without_triton"]

PROCESSES = 3
TIMEOUT_S = 300

NAMED = """
import sys, attnzoo
assert "torch" not in sys.modules, "import attnzoo imported torch"
assert NAME in attnzoo.names(), "not among attnzoo.names()"
backend = attnzoo.get(NAME)
assert backend.name == NAME
"""

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # import triton now raises ImportError
import torch, attnzoo
q = torch.randn(1, 1, 4, 32)
try:
    attnzoo.attention(q, q, q, backend=NAME)
except attnzoo.UnsupportedError as error:
    assert error.rejected[NAME], "refused without a reason"
"""


def named_without_gpu(subject: Subject, problem: Problem, device: torch.device) -> None:
    """With no GPU in sight attnzoo imports, without torch, and getting the backend succeeds."""
    _run(subject, NAMED, {"CUDA_VISIBLE_DEVICES": ""})


def without_triton(subject: Subject, problem: Problem, device: torch.device) -> None:
    """With Triton missing, the backend serves, or refuses with a reason; it doesn't raise ImportError."""
    _run(subject, WITHOUT_TRITON, {})


def cold_caches(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Several processes compile and tune into one empty cache folder at once: all of them right."""
    reasons = subject.reasons(make_call(problem, device))
    if reasons:
        raise Refused(subject.name, reasons)
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "TRITON_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        command = [sys.executable, "-m", "attnzoo.testing", "--backend", _installed(subject), "--device", str(device), repr(problem)]
        running = [
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(PROCESSES)
        ]
        try:
            outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in running]
        finally:
            for process in running:
                process.kill()
    for process, output in zip(running, outputs):
        require(process.returncode == 0, f"one of {PROCESSES} processes that share a cache failed: {output[-2000:]}")


def _installed(subject: Subject) -> str:
    if not subject.is_registered:
        raise NotApplicable("another process finds a backend by its name, and this one is not installed")
    return subject.name


def _run(subject: Subject, script: str, environ: dict[str, str]) -> None:
    command = [sys.executable, "-c", f"NAME = {_installed(subject)!r}\n{script}"]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    require(done.returncode == 0, f"a fresh interpreter failed: {done.stderr[-2000:]}")
