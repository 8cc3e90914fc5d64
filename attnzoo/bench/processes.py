"""Contestant: the parent's end of a worker: a process that can crash or hang without taking the benchmark with it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

__all__ = ["Contestant"]

LOG_BYTES = 2000


class Contestant:
    """One backend; its process starts with the first request, or with `start`, and anew after an error.

    Args:
        name: of the backend.
        timeout: seconds that it may take to start, and to answer.
    """

    def __init__(self, name: str, *, timeout: float) -> None:
        self.name = name
        self.timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.Queue[bytes] = queue.Queue()
        self._log: IO[bytes] | None = None
        self._is_ready = False
        self._asked = ""

    def start(self) -> None:
        """Start the process, and don't wait for it."""
        if self._process is not None:
            return
        command = [sys.executable, "-X", "faulthandler", "-m", "attnzoo.bench.worker", self.name]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True)
        self._answers, self._is_ready = queue.Queue(), False
        threading.Thread(target=_read, args=(self._process, self._answers), daemon=True).start()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer, a dict with a status; "error" too if the process died or took too long. After an error it is ended."""
        self.send(**request)
        return self.answer()

    def send(self, **request: Any) -> None:
        """Ask, and don't wait; `answer` does."""
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._asked = request["do"]
        with contextlib.suppress(BrokenPipeError):  # `answer` says that it has ended
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """To what was sent last."""
        if not self._is_ready:
            hello = self._receive("starting")
            self._is_ready = hello["status"] == "ok"
            if not self._is_ready:
                self.close()
                return hello
        return self._receive(self._asked)

    def _receive(self, step: str) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=self.timeout)
        except queue.Empty:
            failure = self._failure(f"no answer within {self.timeout:g} s ({step})")
            self.close()
            return failure
        if line:
            answer: dict[str, Any] = json.loads(line)
            if answer["status"] != "error":
                return answer
            failure = self._failure(answer["detail"])
        else:
            assert self._process is not None
            failure = self._failure(f"its process {_ending(self._process.wait())} ({step})")
        self.close()  # after an error too: a CUDA context that a kernel broke fails every later call
        return failure

    def _failure(self, detail: str) -> dict[str, Any]:
        """The status, and on stderr the end of what the process printed."""
        log = self._log
        if log is not None:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES))
            print(f"{self.name}: {detail}\n{log.read().decode(errors='replace')}", file=sys.stderr)
        return {"status": "error", "detail": detail}

    def close(self) -> None:
        """End the process and its children, such as those of a compiler."""
        process, self._process = self._process, None
        log, self._log = self._log, None
        if process is None or log is None:
            return
        log.close()
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _read(process: subprocess.Popen[bytes], answers: queue.Queue[bytes]) -> None:
    """Pass lines on; an empty one at the end."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            answers.put(line)
    answers.put(b"")


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
