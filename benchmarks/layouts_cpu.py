"""Building layouts of long sequences on a CPU, transposed lists included: time and memory.

    python benchmarks/layouts_cpu.py [--rounds 15] [--threads 1] [--output benchmarks/results/layouts_cpu.json]

A time is the median over rounds. Memory is the growth of a fresh process's peak resident size over building one layout,
after a small one has loaded what is loaded once; it needs Linux. With other work on the cores several threads wait for one
another, and only one thread says anything. Exit code 1 if a limit is broken.
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

import torch

from attnzoo import layouts
from attnzoo.layout import BlockLayout

MAKERS: dict[str, Callable[[int], BlockLayout]] = {
    "sliding_window 1024, S = 1048576, block 128": lambda scale: layouts.sliding_window(2**20 // scale, window=1024),
    "causal, S = 131072, block 128": lambda scale: layouts.causal(131072 // scale),
    "butterfly, S = 131072, block 128": lambda scale: layouts.butterfly(131072 // scale),
    "documents of 5000, S = 131072, block 128": lambda scale: layouts.documents([5000] * (26 // scale)),
}
LIMITS = {"ms": 50.0, "MB": 100.0}


def build(name: str, scale: int = 1) -> BlockLayout:
    layout = MAKERS[name](scale)
    _ = layout.transposed
    return layout


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def memory_of(name: str) -> float:
    """Growth of the peak, in MB; of this process, which must be fresh."""
    build(name, scale=26)
    before = peak_bytes()
    build(name)
    return (peak_bytes() - before) / 1e6


def measure(name: str, rounds: int, threads: int) -> dict[str, float]:
    layout, times = build(name), []
    for _ in range(rounds):
        began = time.perf_counter()
        build(name)
        times.append(1000 * (time.perf_counter() - began))
    command = [sys.executable, __file__, "--threads", str(threads), "--memory-of", name]
    memory = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    blocks = layout.summary.full_blocks + layout.summary.partial_blocks
    return {"blocks": blocks, "ms": statistics.median(times), "fastest ms": min(times), "MB": float(memory)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory-of", choices=MAKERS, help="print the memory of one layout and do nothing else")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(memory_of(options.memory_of))
        return 0
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "threads": options.threads, "torch": torch.__version__}
    found = {name: measure(name, options.rounds, options.threads) for name in MAKERS}
    broken = []
    for name, row in found.items():
        print(f"{name}: {row['blocks']} blocks, {row['ms']:.1f} ms (fastest {row['fastest ms']:.1f}), {row['MB']:.1f} MB")
        broken += [f"{name}: {row[unit]:.1f} {unit}, at most {limit:.0f}" for unit, limit in LIMITS.items() if row[unit] > limit]
    if options.output:
        options.output.write_text(json.dumps({"machine": machine, "limits": LIMITS, "layouts": found}, indent=1) + "\n")
    print(*broken, sep="\n")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
