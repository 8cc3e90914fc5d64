"""Fill the compilers' caches for a matrix, many processes side by side, and say what is wrong before anything is timed.

    python benchmarks/compile_first.py benchmarks/h200.toml --processes 14 --seconds 60

`attnzoo bench` would compile one kind of call after the other; with `TRITON_CACHE_DIR` and `TORCHINDUCTOR_CACHE_DIR` set alike, it
then finds all of them. Each call's results are checked as the benchmark checks them.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from attnzoo.bench.matrix import Matrix
from attnzoo.bench.workload import Workload


def attempt(backend: str, workload: dict[str, Any]) -> tuple[str, str, str, float]:
    """Backend, workload, what became of its first call, and seconds."""
    import torch

    from attnzoo.bench.worker import Prepared
    from attnzoo.errors import in_words
    from attnzoo.registry import default, reasons_against

    torch.set_num_threads(1)
    started = time.perf_counter()
    asked = Workload(**workload)
    try:
        prepared = Prepared.of(default().get(backend), asked)
        reasons = reasons_against(prepared.backend, prepared.spec)
        verdict = f"refused: {'; '.join(reasons)}" if reasons else "right"
        if not reasons:
            prepared.first_call()
    except BaseException as error:  # SystemExit too: a plugin's doing
        verdict = " ".join(in_words(error).split())[:300]
    return backend, asked.id, verdict, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("matrix", type=Path)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600.0, help="begin nothing new after so many")
    asked = parser.parse_args()
    matrix = Matrix.from_toml(asked.matrix)
    verdicts: Counter[tuple[str, str]] = Counter()
    with ProcessPoolExecutor(asked.processes, mp_context=get_context("spawn")) as pool:
        calls = [pool.submit(attempt, name, workload.to_dict()) for workload in matrix.workloads for name in matrix.backends]
        try:
            for call in as_completed(calls, timeout=asked.seconds):
                backend, workload, verdict, seconds = call.result()
                verdicts[backend, verdict.partition(":")[0]] += 1
                if not verdict.startswith(("right", "refused")):
                    print(f"{backend} {workload}: {verdict} ({seconds:.1f} s)", flush=True)
        except TimeoutError:
            print(f"stopped after {asked.seconds:g} s")
            pool.shutdown(wait=False, cancel_futures=True)
    for (backend, verdict), count in sorted(verdicts.items()):
        print(f"{backend}: {count} {verdict}")


if __name__ == "__main__":
    main()
