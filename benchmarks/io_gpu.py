"""Bytes on a GPU: each kernel of a call under Nsight Compute, and the paper's table on this card.

    python benchmarks/io_gpu.py compile --processes 12             fills the compilers' caches for what follows
    python benchmarks/io_gpu.py measure --output results.json      every case under ncu; needs ncu and its counters
    python benchmarks/io_gpu.py paper --output results.json        GPT-2 medium's attention: ms of eager, flash and SDPA
    python benchmarks/io_gpu.py paper_bytes --output results.json  its eager and flash under ncu
    python benchmarks/io_gpu.py tiles --output results.json        the forward's time against its tile, portable kernel

`run CASE...` is what `measure` and `paper_bytes` put under ncu. Results are merged into the file, as they come: what was
measured alone. The account beside it is made with the page, by io_tables.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from io_cases import CASES, EAGER, GPT2, PAPER, TILED, TILES, Case, title
from ncu import count_kernels, under_ncu

from attnzoo.backends.triton.table import Tile
from attnzoo.bench.machine import describe
from attnzoo.bench.prepared import Prepared
from attnzoo.bench.timing import burst
from attnzoo.registry import default

CUDA = torch.device("cuda")
Found = Iterator[tuple[str, Any]]


# Bytes


METRICS = {
    "l1tex__m_xbar2l1tex_read_bytes.sum": "from_l2",  # into a multiprocessor
    "l1tex__m_l1tex2xbar_write_bytes.sum": "to_l2",  # out of one
    "lts__t_sectors_srcunit_tex_op_read.sum": "l2_sectors_read",  # the same, seen from L2, in sectors of 32 bytes
    "lts__t_sectors_srcunit_tex_op_write.sum": "l2_sectors_written",
    "lts__t_sectors_srcunit_tex_op_red.sum": "l2_sectors_added",
    "lts__t_sectors_srcunit_tex.sum": "l2_sectors",
    "lts__t_bytes.sum": "l2",
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_written",
    "gpu__time_duration.sum": "ns",
}
"""Metric -> our name for it."""
NEEDED = frozenset(metric for metric, name in METRICS.items() if name in ("from_l2", "to_l2", "dram_read", "dram_written"))
SECTOR = 32  # bytes


def run(names: list[str]) -> None:
    """What ncu looks at."""
    for name in names:
        count_kernels(call_of(name))


def call_of(name: str) -> Callable[[], object]:
    """Of a case, or of the paper's shape."""
    if name in CASES:
        return prepared_of(CASES[name]).call()
    return eager() if PAPER[name] == EAGER else prepared_of(Case(PAPER[name], GPT2)).call()


def prepared_of(case: Case) -> Prepared:
    prepared = Prepared.of(default().get(case.backend), case.workload)
    reasons = prepared.backend.unsupported_reasons(prepared.spec)
    if reasons:
        raise SystemExit(f"refused: {reasons}")
    return prepared


def measure(names: list[str], seconds: float = 120.0) -> Found:
    """Case -> counted bytes of each kernel, or why there are none; the cases of one length share a process."""
    asked = [name for name in CASES if not names or name in names]
    for length in dict.fromkeys(CASES[name].workload.length for name in asked):
        group = [name for name in asked if CASES[name].workload.length == length]
        kernels, problem = under_ncu(Path(__file__), group, METRICS, NEEDED, seconds)
        for place, name in enumerate(group):
            found = summary(kernels[place] if place < len(kernels) else [])
            yield name, found | ({} if found["kernels"] else {"problem": problem})


def paper_bytes(seconds: float = 120.0) -> Found:
    """Counted bytes of GPT-2 medium's attention: what the paper counted is `measured_dram`."""
    kernels, problem = under_ncu(Path(__file__), list(PAPER), METRICS, NEEDED, seconds)
    for place, name in enumerate(PAPER.values()):
        found = summary(kernels[place] if place < len(kernels) else [])
        yield name, found | ({} if found["kernels"] else {"problem": problem})


def summary(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the kernels; None for what was not counted."""
    sums = totals(kernels) if kernels else {}
    dram = sums["dram_read"] + sums["dram_written"] if {"dram_read", "dram_written"} <= sums.keys() else None
    return {"measured_l2": moved(sums), "measured_dram": dram, "totals": sums, "kernels": kernels}


def totals(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """Sums over a case's kernels, of the metrics that each of them has."""
    names = [name for name in METRICS.values() if all(kernel.get(name) is not None for kernel in kernels)]
    return {name: sum(kernel[name] for kernel in kernels) for name in names}


def moved(totals: dict[str, float]) -> float | None:
    """Bytes between the multiprocessors and L2, seen from their side, or else from L2's; None if neither was counted."""
    if {"from_l2", "to_l2"} <= totals.keys():
        return totals["from_l2"] + totals["to_l2"]
    return totals["l2_sectors"] * SECTOR if "l2_sectors" in totals else None


# Time


def paper() -> Found:
    """ms of GPT-2 medium's attention, forward and backward, interleaved; each of ours is checked first."""
    calls: dict[str, Callable[[], object]] = {}
    for name in ("flash", "sdpa_cudnn", "sdpa_flash"):
        try:
            prepared = Prepared.of(default().get(name), GPT2)
            prepared.first_call()
            calls[name] = prepared.call()
        except Exception as error:
            yield name, {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    calls[EAGER] = eager()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(5):
        for name, call in calls.items():
            times[name].append(statistics.median(burst(call, CUDA, seconds=0.1, is_cold=True)))
    for name, rounds in times.items():
        yield name, {"ms": statistics.median(rounds), "rounds": rounds}


def eager() -> Callable[[], object]:
    """The paper's baseline: scores, causal mask, softmax, dropout and the product, each a kernel, fp16."""
    q, k, v, grad_o = GPT2.tensors()
    hidden = ~torch.ones(GPT2.length, GPT2.length, dtype=torch.bool, device=q.device).tril()

    def call() -> object:
        scores = (q @ k.mT * GPT2.head_dim**-0.5).masked_fill(hidden, -torch.inf)
        o = torch.nn.functional.dropout(scores.softmax(-1), 0.1) @ v
        return torch.autograd.grad(o, (q, k, v), grad_o)

    return call


@contextlib.contextmanager
def portable(tile: Tile) -> Iterator[Prepared]:
    """The portable forward, launched with this tile."""
    from attnzoo.backends.flash import Flash
    from attnzoo.backends.triton import problem

    problem.facts_of.cache_clear()
    with mock.patch.object(problem, "tile_for", return_value=tile):
        yield Prepared.of(Flash(kernels="portable"), TILED)
    problem.facts_of.cache_clear()


def tiles() -> Found:
    """The portable forward's time under square and other tiles."""
    for tile in TILES:
        with portable(tile) as prepared:
            sizes = [tile.block_m, tile.block_n]
            try:
                prepared.first_call()
                ms = statistics.median(burst(prepared.forward, CUDA, seconds=0.1, is_cold=False))
                yield title(tile), {"tile": sizes, "ms": ms}
            except Exception as error:
                yield title(tile), {"tile": sizes, "error": f"{type(error).__name__}: {str(error)[:120]}"}


# Compilation


def attempt(job: str | Tile) -> str:
    """Call once what a case's name, GPT-2's shape ("paper") or a tile stands for."""
    try:
        if isinstance(job, Tile):
            with portable(job) as prepared:
                prepared.forward()
        else:
            prepared_of(Case("flash", GPT2) if job == "paper" else CASES[job]).call()()
        torch.cuda.synchronize()
    except BaseException as error:  # SystemExit too
        return f"{job}: {type(error).__name__}: {str(error)[:200]}"
    return f"{job}: compiled"


def compile_all(processes: int) -> None:
    shortest = min(case.workload.length for case in CASES.values())  # the kernels are the same for every length
    jobs = [*TILES, *[name for name, case in CASES.items() if case.workload.length == shortest], "paper"]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(attempt, job) for job in jobs]):
            print(done.result(), flush=True)


def keep(output: Path | None, part: str, found: Found) -> None:
    """Print each result and merge it into the file."""
    results: dict[str, Any] = json.loads(output.read_text()) if output and output.exists() else {}
    here = describe("cuda")
    results.setdefault("machine", here)
    results.setdefault("commits", {})[part] = here.get("commit")
    for name, value in found:
        results.setdefault(part, {})[name] = value
        print(name, json.dumps({k: v for k, v in value.items() if k != "kernels"}), flush=True)
        if output:
            draft = output.with_name(output.name + ".part")
            draft.write_text(json.dumps(results, indent=1) + "\n")
            os.replace(draft, output)


PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "measure": lambda asked: measure(asked.cases, asked.timeout),
    "paper": lambda asked: paper(),
    "paper_bytes": lambda asked: paper_bytes(asked.timeout),
    "tiles": lambda asked: tiles(),
}
"""What is measured, by its name in the results."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("compile", "run", *PARTS))
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the cases of one length under ncu")
    asked = parser.parse_intermixed_args()  # cases behind an option too
    unknown = sorted(set(asked.cases) - CASES.keys() - PAPER.keys())
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if asked.part == "run":
        run(asked.cases)
    elif asked.part == "compile":
        compile_all(asked.processes)
    else:
        keep(asked.output, asked.part, PARTS[asked.part](asked))


if __name__ == "__main__":
    main()
