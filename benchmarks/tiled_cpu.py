"""`tiled` on a CPU, beside `naive` and torch's SDPA: time, what skipping saves, and memory.

    python benchmarks/tiled_cpu.py [--rounds 7] [--threads 2] [--output benchmarks/results/tiled_cpu.json]

Rounds alternate between the backends; figures are medians over rounds. Memory is the growth of a fresh process's peak
resident size over one forward and backward, results included; it needs Linux. Run it on an idle machine with 8 GiB
free: with other work on its cores, several threads wait for one another at every operation, and only `--threads 1`
says anything.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnzoo

BATCH, HEADS, LENGTH, DIM = 1, 8, 4096, 64
MEMORY_LENGTH = 16384
LIMITS = {"forward_vs_sdpa": 1.7, "backward_vs_sdpa": 1.6, "naive_vs_forward": 4.0, "memory_share": 0.03}

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(heads: int, length: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(BATCH, heads, length, DIM).requires_grad_() for _ in range(3)]


def through(backend: str, **options: Any) -> Call:
    return lambda q, k, v: attnzoo.attention(q, k, v, backend=backend, **options)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def medians_ms(calls: dict[str, Call], rounds: int) -> dict[str, dict[str, float]]:
    """Forward and backward of each call, in milliseconds; the first round warms up."""
    q, k, v = inputs(HEADS, LENGTH)
    grad = torch.randn(BATCH, HEADS, LENGTH, DIM)
    spent: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": []} for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            o = call(q, k, v)
            middle = time.perf_counter()
            torch.autograd.grad(o, (q, k, v), grad)
            spent[name]["forward"].append(middle - start)
            spent[name]["backward"].append(time.perf_counter() - middle)
    return {name: {part: round(statistics.median(t[1:]) * 1e3, 1) for part, t in parts.items()} for name, parts in spent.items()}


def skipping_calls() -> dict[str, Call]:
    ids = torch.arange(LENGTH)[None] // (LENGTH // 8)
    blocks = torch.rand(LENGTH // 128, LENGTH // 128, generator=torch.Generator().manual_seed(1)) < 0.1
    return {
        "everything": through("tiled"),
        "causal": through("tiled", causal=True),
        "window of 256, causal": through("tiled", causal=True, window=(256, 0)),
        "8 segments": through("tiled", segment_ids=ids),
        f"layout, density {blocks.float().mean():.2f}": through("tiled", layout=attnzoo.BlockLayout.from_blocks(blocks, block=128)),
    }


def peak_growth_mib(backend: str) -> float:
    """In a process of its own."""
    command = [sys.executable, __file__, "--memory-of", backend]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak_growth(backend: str) -> None:
    q, k, v = inputs(1, 64)
    call = through(backend, causal=True)
    torch.autograd.grad(call(q, k, v), (q, k, v), q.detach())  # what a first call loads is not counted
    q, k, v = inputs(1, MEMORY_LENGTH)
    grad = torch.ones_like(q)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident_kib("VmRSS")
    torch.autograd.grad(call(q, k, v), (q, k, v), grad)
    print((resident_kib("VmHWM") - before) / 1024)


def resident_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def measure(rounds: int) -> dict[str, Any]:
    load = round(os.getloadavg()[0], 1)
    times = medians_ms({"naive": through("naive", causal=True), "tiled": through("tiled", causal=True), "sdpa": sdpa}, rounds)
    memory = {name: round(peak_growth_mib(name), 1) for name in ("naive", "tiled")}
    ratios = {
        "forward_vs_sdpa": times["tiled"]["forward"] / times["sdpa"]["forward"],
        "backward_vs_sdpa": times["tiled"]["backward"] / times["sdpa"]["backward"],
        "naive_vs_forward": times["naive"]["forward"] / times["tiled"]["forward"],
        "naive_vs_backward": times["naive"]["backward"] / times["tiled"]["backward"],
        "memory_share": memory["tiled"] / memory["naive"],
    }
    return {
        "command": f"python benchmarks/tiled_cpu.py --rounds {rounds} --threads {torch.get_num_threads()}",
        "machine": {
            "cpu": processor(),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "load_average_before": load,
        },
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "attnzoo": attnzoo.__version__},
        "problem": f"fp32, B={BATCH}, H={HEADS}, S={LENGTH}, D={DIM}, causal; memory at S={MEMORY_LENGTH}, H=1",
        "rounds": rounds,
        "ms": times,
        "ratios": {name: round(value, 4) for name, value in ratios.items()},
        "limits": LIMITS,
        "skipping_ms": medians_ms(skipping_calls(), max(3, rounds // 2)),
        "peak_growth_mib": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--memory-of", metavar="BACKEND", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print_peak_growth(arguments.memory_of)
        return
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    report = json.dumps(measure(arguments.rounds), indent=2)
    print(report)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(report + "\n")


if __name__ == "__main__":
    main()
