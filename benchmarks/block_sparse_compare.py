"""`block_sparse_gpu.py compare`: block_sparse beside FlexAttention and FlashAttention 4 on one GPU.

Every job (a head dim, a length and patterns that share their compiled kernels) is a process. All of them compile and check at
once; when all are ready they are timed one after the other while the rest wait, so that the GPU is the timed one's alone. A
process that is late, or that a contender has crashed, is ended and starts again at the end without that contender.
"""

from __future__ import annotations

import os
import statistics
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from block_sparse_cells import JOBS, OURS, Cells, DeviceLostError, Job, require_device

CONTEXT = get_context("spawn")
PREPARING_SHARE = 0.55  # of all seconds, after which jobs that are not ready are late
JOB_SECONDS = 60.0

Row = dict[str, Any]


def work(job: Job, excluded: dict[str, str], done: set[str], link: Connection) -> None:
    """A job's process. Sends ("trying", contender), ("ready", ""), ("row", row), ("lost", reason), ("done", "")."""
    torch.set_num_threads(1)
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


def over_ideal(row: Row) -> float | None:
    """Our forward's time over the density times the fastest dense forward of the same rounds."""
    dense = [ms for name, ms in row["ms"]["forward"].items() if name.startswith("dense")]
    ms = row["ms"]["forward"].get(OURS)
    return None if ms is None or not dense else ms / row["density"] / min(dense)


def summary(rows: list[Row]) -> dict[str, Any]:
    """Of each peer and direction: its time over ours, geometric mean, worst cell and number of cells; and the largest
    `over_ideal` at the longest length."""
    found: dict[str, Any] = {}
    for peer in ("fa4", "flex", "fa4 native"):
        for way in ("forward", "backward"):
            ratios = {}
            for row in rows:
                ms = row["ms"][way]
                if peer in ms and OURS in ms:
                    ratios[f"D={row['dim']} S={row['length']} {row['layout']}"] = ms[peer] / ms[OURS]
            if ratios:
                worst = min(ratios, key=lambda name: ratios[name])
                found[f"{peer} {way}"] = {
                    "geometric mean": statistics.geometric_mean(ratios.values()),
                    "worst": ratios[worst],
                    "worst cell": worst,
                    "cells": len(ratios),
                }
    longest = max((row["length"] for row in rows), default=0)
    over = {f"D={row['dim']} {row['layout']}": over_ideal(row) for row in rows if row["length"] == longest}
    known = {name: value for name, value in over.items() if value is not None}
    if known:
        worst = max(known, key=lambda name: known[name])
        found["over density x dense"] = {"length": longest, "worst": known[worst], "worst cell": worst, "cells": len(known)}
    return found


def line_of(row: Row) -> str:
    useful = 4e-9 * row["heads"] * row["length"] ** 2 * row["dim"] * row["density"]
    parts = [f"D={row['dim']:3d} S={row['length']:5d} {row['layout']:14s} density {row['density']:.4f}"]
    for way, factor in (("forward", 1.0), ("backward", 2.5)):
        ms = row["ms"][way]
        if OURS in ms:
            rates = f"{ms[OURS]:.3f} ms {factor * useful / ms[OURS]:.0f} TFLOP/s"
            parts.append(
                f"{way} {rates} " + " ".join(f"{name} x{ms[name] / ms[OURS]:.2f}" for name in ("fa4", "flex", "fa4 native") if name in ms)
            )
    over = over_ideal(row)
    parts += [] if over is None else [f"over density x dense {over:.2f}"]
    parts += [f"{key}: {reason[:150]}" for key, reason in row["reasons"].items() if "no option of its own" not in reason]
    return "  ".join(parts)
