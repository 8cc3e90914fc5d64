"""doctor: tries every backend in a process of its own, so that one that crashes or hangs costs only its line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Finding", "examine"]

LOG_LINES = 15


@dataclass(frozen=True)
class Finding:
    """How one backend did.

    Attributes:
        verdict: "ok", "refuses" (it says that it can't run on this machine: nothing is wrong) or "broken".
        detail: what ran and what was found.
        advice: what to do about it; empty unless broken.
        seconds: start of its process included.
        log: the last lines it printed; empty unless broken.
    """

    backend: str
    verdict: str
    detail: str
    advice: str
    seconds: float
    log: str


def examine(name: str, *, distribution: str, timeout: float) -> Finding:
    """Run `attnzoo.trial` on a backend and judge what it left behind.

    Args:
        distribution: that the backend comes from, for the advice.
        timeout: in seconds, after which its process is killed.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder, "report"), Path(folder, "log")
        code = _run([sys.executable, "-X", "faulthandler", "-m", "attnzoo.trial", name, str(report)], log, timeout)
        lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    verdict, detail, cause = _judge(lines, code, timeout)
    is_broken = verdict == "broken"
    advice = ADVICE[cause].format(name=name, distribution=distribution) if is_broken else ""
    return Finding(name, verdict, detail, advice, round(time.monotonic() - started, 1), tail if is_broken else "")


ADVICE = {
    "raised": "update or uninstall {distribution}, or leave it out (ATTNZOO_PLUGINS lists the distributions that may load)",
    "died": "report it to {distribution} with the log and `attnzoo info`; leave it out until then (ATTNZOO_PLUGINS)",
    "late": "give it longer with --timeout (a first run may compile kernels); if it hangs, report it to {distribution}",
    "wrong": "do not use it here; `pytest --pyargs attnzoo.conformance --attn-backend {name}` finds every case to report",
}


def _run(command: list[str], log: Path, timeout: float) -> int | None:
    """The exit code, negative for a signal; None where the time ran out. Its children end with it."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _judge(lines: list[dict[str, Any]], code: int | None, timeout: float) -> tuple[str, str, str]:
    """Verdict, detail and, if broken, the key of the advice."""
    steps = [line["step"] for line in lines if "step" in line]
    last_step = steps[-1] if steps else "starting"
    verdict = next((line for line in lines if "verdict" in line), None)
    if code is None:
        return "broken", f"no end within {timeout:g} s, {last_step}", "late"
    if code != 0:
        place = last_step if verdict is None else "after it had finished"
        return "broken", f"its process {_ending(code)}, {place}", "died"
    if verdict is None:
        return "broken", f"its process exited early with code 0, {last_step}", "died"
    if verdict["verdict"] != "broken":
        return verdict["verdict"], verdict["detail"], ""
    return "broken", f"{verdict['detail']}, {last_step}", verdict["cause"]


def _ending(code: int) -> str:
    if code > 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
