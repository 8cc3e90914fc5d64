"""Fill the compilers' caches for a matrix, many processes side by side, before anything is timed.

    python benchmarks/compile_first.py benchmarks/h200.toml --processes 14 --seconds 60

`attnzoo bench` would compile one kind of call after the other; with `TRITON_CACHE_DIR` and `TORCHINDUCTOR_CACHE_DIR` set alike, it
then finds all of them. What is computed is not judged here: the benchmark does that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from attnzoo.bench.matrix import Matrix
from attnzoo.bench.workload import Workload
from attnzoo.errors import UnknownBackendError
from attnzoo.registry import Registry


def attempt(backend: str, workload: dict[str, Any]) -> tuple[str, str, str, float]:
    """Backend, workload, what became of its first call, and seconds."""
    import torch

    from attnzoo.bench.prepared import Prepared
    from attnzoo.bench.timing import synchronize
    from attnzoo.errors import in_words
    from attnzoo.registry import default, reasons_against

    torch.set_num_threads(1)
    started = time.perf_counter()
    asked = Workload(**workload)
    try:
        prepared = Prepared.of(default().get(backend), asked)
        reasons = reasons_against(prepared.backend, prepared.spec)
        verdict = f"refused: {'; '.join(reasons)}" if reasons else "compiled"
        if not reasons:
            prepared.call()()
            synchronize(prepared.spec.device)
            del prepared
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    except BaseException as error:  # SystemExit too: a plugin's doing
        verdict = " ".join(in_words(error).split())[:300]
    return backend, asked.id, verdict, time.perf_counter() - started


def jobs_of(matrix: Matrix, backends: list[str]) -> list[tuple[str, Workload]]:
    """The first of each family for every backend, then the second, and so on: lengths often share a kernel, which is then there."""
    ranks: Counter[tuple[str, str]] = Counter()
    ranked = []
    for workload in matrix.workloads:
        for name in filter(lambda name: matrix.runs(workload, name), backends or matrix.backends):
            ranked.append((ranks[name, workload.family], name, workload))
            ranks[name, workload.family] += 1
    return [(name, workload) for _, name, workload in sorted(ranked, key=lambda each: each[0])]


def asked_for() -> tuple[argparse.Namespace, list[tuple[str, Workload]]]:
    """The options and the jobs; what would compile nothing is an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("matrix", type=Path)
    parser.add_argument("--backend", action="append", default=[], help="these alone; may be repeated")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after so many, whatever is under way")
    asked = parser.parse_args()
    try:
        matrix = Matrix.from_toml(asked.matrix)
        Registry.installed().require_known((*matrix.named, *asked.backend))
    except (ValueError, UnknownBackendError) as error:
        parser.error(str(error))
    if not asked.backend and not matrix.backends:
        parser.error(f"{asked.matrix} names no backends: give some by --backend")
    return asked, jobs_of(matrix, asked.backend)


def main() -> None:
    asked, left = asked_for()
    verdicts: Counter[tuple[str, str]] = Counter()
    started = time.perf_counter()
    while left and time.perf_counter() - started < asked.seconds:
        pool = ProcessPoolExecutor(asked.processes, mp_context=multiprocessing.get_context("spawn"))
        calls = {pool.submit(attempt, name, workload.to_dict()): (name, workload) for name, workload in left}
        try:
            for call in as_completed(calls, timeout=max(asked.seconds - (time.perf_counter() - started), 0.1)):
                backend, workload, verdict, seconds = call.result()
                left.remove(calls[call])
                verdicts[backend, verdict.partition(":")[0]] += 1
                print(f"{time.perf_counter() - started:5.1f} s {backend} {workload}: {verdict} ({seconds:.1f} s)", flush=True)
        except TimeoutError:
            break
        except BrokenExecutor:  # a compiler took its process down, and nobody says which: the first in line has been tried longest
            name, lost = left.pop(0)
            print(f"a process died; {name} {lost.id} is left out", flush=True)
    print(f"stopped after {time.perf_counter() - started:.0f} s, {len(left)} calls not done", flush=True)
    for process in multiprocessing.active_children():
        process.kill()
    for (backend, verdict), count in sorted(verdicts.items()):
        print(f"{backend}: {count} {verdict}", flush=True)
    os._exit(0)  # a pool whose processes were killed would wait for them


if __name__ == "__main__":
    main()
