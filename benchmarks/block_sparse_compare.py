"""`block_sparse_gpu.py compare`: block_sparse beside FlexAttention and FlashAttention 4 on one GPU.

Every job (a head dim, a length and patterns that share their compiled kernels) is a process. All of them compile and check at
once; when all are ready they are timed one after the other while the rest wait, so that the GPU is the timed one's alone. A
process that is late, or that a contender has crashed, is ended and starts again at the end without that contender.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from block_sparse_cells import JOBS, Cells, DeviceLostError, Job, require_device
from block_sparse_summary import OURS, Row, line_of, summary

CONTEXT = get_context("spawn")
PREPARING_SHARE = 0.6  # of all seconds, after which jobs that are not ready are late
JOB_SECONDS = 60.0


def own_caches(job: Job) -> None:
    """FlashAttention 4's compile cache, one a job: it gives up on a lock that another process holds for 15 s."""
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(Path(tempfile.gettempdir(), "block_sparse_compare", job.name.replace(" ", "-")))


def work(job: Job, excluded: dict[str, str], done: set[str], link: Connection) -> None:
    """A job's process. Sends ("trying", contender), ("ready", ""), ("row", row), ("lost", reason), ("done", "")."""
    torch.set_num_threads(1)
    own_caches(job)
    try:
        cells = Cells(job, excluded, lambda name: link.send(("trying", name)))
        cells.prepare_dense()
        prepared = [cells.prepare(name) for name in job.patterns if name not in done]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        link.send(("ready", ""))
        link.recv()
        for cell in prepared:
            try:
                link.send(("row", cells.time(cell)))
            except Exception as problem:
                require_device(problem)
                print(f"{job.name} {cell.name}: {type(problem).__name__}: {problem}"[:400], flush=True)
        link.send(("done", ""))
    except DeviceLostError as lost:
        link.send(("lost", str(lost)))
    except Exception:
        traceback.print_exc()
    finally:
        link.close()
        os._exit(0)  # what a contender has left behind may not hold the process


class Worker:
    """A job's process seen from the one that gives the turns."""

    def __init__(self, job: Job, excluded: dict[str, str], done: set[str], keep: Callable[[Row], None]) -> None:
        self.job, self.excluded, self.done, self.keep = job, dict(excluded), set(done), keep
        self.trying, self.reason, self.is_ready = "", "ended without a word", False
        self.link, there = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=work, args=(job, self.excluded, self.done, there))
        self.process.start()
        there.close()

    def listen(self, wanted: str, until: float) -> bool:
        """Take messages until the wanted kind comes; False if the process ends before, or the time is up."""
        try:
            while self.link.poll(max(0.0, until - time.perf_counter())):
                kind, what = self.link.recv()
                if kind == "trying":
                    self.trying = what
                elif kind == "row":
                    self.done.add(what["layout"])
                    self.keep(what)
                elif kind == "lost":
                    self.reason = what
                if kind == wanted:
                    return True
            self.reason = "took too long"
        except EOFError:
            pass
        return False

    def stop(self) -> None:
        self.process.kill()
        self.process.join()

    def again(self) -> Worker:
        """A new process for what is left, without the contender that this one was busy with."""
        self.stop()
        excluded = {**self.excluded, self.trying: self.reason} if self.trying not in ("", OURS) else self.excluded
        return Worker(self.job, excluded, self.done, self.keep)


def compare(save: Callable[[str, Any], None], *, seconds: float, jobs: list[Job] | None = None) -> list[Row]:
    """Run the jobs, save rows and their summary as they come."""
    began = time.perf_counter()
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        save("compare", rows)
        save("summary", summary(rows))
        print(f"{time.perf_counter() - began:4.0f}s", line_of(row), flush=True)

    workers = [Worker(job, {}, set(), keep) for job in (JOBS if jobs is None else jobs)]
    late = []
    try:
        for worker in workers:
            worker.is_ready = worker.listen("ready", began + PREPARING_SHARE * seconds)
            state = "is ready" if worker.is_ready else f"isn't ready ({worker.trying}: {worker.reason})"
            print(f"{time.perf_counter() - began:4.0f}s {worker.job.name} {state}", flush=True)
            if not worker.is_ready:
                worker.stop()
        for worker in workers:
            if not (worker.is_ready and take_turn(worker, began + seconds)):
                late.append(worker)
        for worker in late:
            if time.perf_counter() - began < seconds - 10.0:
                workers.append(second := worker.again())
                if not (second.listen("ready", began + seconds) and take_turn(second, began + seconds)):
                    print(f"{worker.job.name} gave {len(second.done)} cells of {len(worker.job.patterns)}: {second.reason}", flush=True)
    finally:
        for worker in workers:
            worker.stop()
    return rows


def take_turn(worker: Worker, until: float) -> bool:
    try:
        worker.link.send("go")
    except OSError:  # it has ended since
        return False
    is_done = worker.listen("done", min(until, time.perf_counter() + JOB_SECONDS))
    worker.stop()
    return is_done
