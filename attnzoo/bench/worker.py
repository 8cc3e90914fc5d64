"""worker: one backend in a process of its own. `python -m attnzoo.bench.worker NAME` answers JSON lines on stdin.

    {"do": "devices"}                                         the device types that the backend claims; none means any
    {"do": "prepare", "workload": {...}, "side_by_side": 8}   the first call, whether it is right, peak memory
    {"do": "burst", "seconds": 0.1}                           times of calls of the prepared workload, in ms
    {"do": "release"}                                         whether the last timed call was right too; forget it

What a plugin prints goes to stderr; stdout carries the answers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from attnzoo.bench.prepared import Prepared
from attnzoo.bench.workload import Workload
from attnzoo.errors import in_words
from attnzoo.registry import default, reasons_against
from attnzoo.testing.failure import ConformanceError

__all__ = ["Worker"]

OUT_OF_MEMORY = ("can't allocate memory", "out of memory")
SHARE_OF_MEMORY = 0.8  # of what is free, on the CPU: the machine's other work goes on


class Worker:
    """Answers requests about one backend; holds at most one workload."""

    def __init__(self, name: str) -> None:
        self.backend = default().get(name)
        self.prepared: Prepared | None = None
        self.judged: dict[str, Tensor] = {}
        self.timed: dict[str, Tensor] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Whatever is raised becomes a status: "unsupported", "out of memory", "wrong" or "error"."""
        answer = self._answered(request)
        if answer["status"] in ("out of memory", "wrong"):  # after an error the parent ends this process
            gc.collect()  # what was raised may hold the tensors that it is about
            self._forget()
        return answer

    def _answered(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._do(request)
        except ConformanceError as error:
            return {"status": "wrong", "detail": str(error)}
        except (MemoryError, torch.OutOfMemoryError) as error:
            return {"status": "out of memory", "detail": _first_line(error)}
        except BaseException as error:  # SystemExit too: a plugin's doing
            if any(words in str(error) for words in OUT_OF_MEMORY):
                return {"status": "out of memory", "detail": _first_line(error)}
            traceback.print_exc()
            return {"status": "error", "detail": _first_line(error)}

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "burst":
            assert self.prepared is not None
            times, self.timed = self.prepared.times(request["seconds"])
            self._free()
            return {"status": "ok", "times": times}
        if request["do"] == "devices":
            return {"status": "ok", "devices": sorted(self.backend.capabilities.devices)}
        if request["do"] == "release":
            self._confirm()
        self._forget()
        if request["do"] == "prepare":
            return self._prepare(Workload(**request["workload"]), request["side_by_side"])
        return {"status": "ok"}

    def _confirm(self) -> None:
        """What was timed is what was judged, bit for bit, or is judged again: a graph's replay, or a call that others preceded."""
        assert self.prepared is not None
        changed = {name: tensor for name, tensor in self.timed.items() if not torch.equal(tensor, self.judged[name])}
        try:
            self.prepared.assert_inputs_unwritten()
            if changed:
                self.prepared.assert_right(changed)
        except ConformanceError as error:
            raise ConformanceError(f"when timed, unlike the first call: {error}") from None

    def _prepare(self, workload: Workload, side_by_side: int) -> dict[str, Any]:
        reasons = reasons_against(self.backend, workload.spec())
        if not reasons:
            prepared = Prepared.of(self.backend, workload)
            reasons = reasons_against(self.backend, prepared.spec)
        if reasons:
            return {"status": "unsupported", "detail": "; ".join(reasons)}
        first, judged = prepared.first_call(side_by_side=side_by_side)
        self._free()
        peak = prepared.peak()
        self.prepared, self.judged = prepared, judged
        return {"status": "ok", "first_call": first, "peak": peak}

    def _forget(self) -> None:
        self.prepared, self.judged, self.timed = None, {}, {}
        self._free()

    def _free(self) -> None:
        """Hand cached memory back: the other backends' processes share the device."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _first_line(error: BaseException) -> str:
    lines = [line for line in in_words(error).splitlines() if line.strip()]
    first = lines[0][:300] if lines else type(error).__name__
    return "".join(letter if letter.isprintable() else "?" for letter in first)


def limit_memory() -> None:
    """Let an allocation beyond most of what is free fail here, rather than the machine."""
    try:
        import resource

        free = int(free_bytes() * SHARE_OF_MEMORY)
        resource.setrlimit(resource.RLIMIT_DATA, (free, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    except (ImportError, OSError, KeyError, ValueError):  # not Linux
        return


def free_bytes(root: Path = Path("/")) -> int:
    """What this machine has available, and no more than its container may use: beyond that it would be killed, not refused."""
    lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups, second and first version
        with contextlib.suppress(OSError, ValueError):  # the other version; "max"
            free = min(free, int((root / "sys/fs/cgroup" / name).read_text()))
    return free


def main(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what a plugin reads is no request
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_follow, args=(requests, lines), daemon=True).start()

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    if not torch.cuda.is_available():
        limit_memory()
    try:
        worker = Worker(name)
    except BaseException as error:  # SystemExit too
        traceback.print_exc()
        send({"status": "error", "detail": _first_line(error)})
        sys.stderr.flush()
        os._exit(1)  # an interpreter that ends in order may not while a thread reads
    send({"status": "ok"})
    while True:
        send(worker.answer(json.loads(lines.get())))


def _follow(requests: IO[str], lines: queue.SimpleQueue[str]) -> None:
    """Pass requests on. At their end the parent is gone, killed perhaps: so is this process then, whatever it hangs in."""
    for line in requests:
        lines.put(line)
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # its children too
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
