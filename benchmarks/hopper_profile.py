"""What binds the attention kernels of a Hopper card: Nsight Compute's counters of one call, ours beside the peers'.

    python benchmarks/hopper_profile.py measure --output results.json [--only fa4] [CASE...]    needs ncu and its counters

`run CASE...` is what `measure` puts under ncu, a process for each contender, and calls as `hopper_compare.py` does. A call has one
kernel or several; the one that takes longest is kept. Clocks are left as they are, so cycles are compared and times are not.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hopper_compare import cell_runs, cells
from ncu import count_kernels, under_ncu

from attnzoo.bench.machine import describe

METRICS = {
    "sm__cycles_elapsed.max": "cycles",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor cores busy, %",
    "sm__inst_executed_pipe_tensor.sum": "tensor instructions",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed": "exponentials and conversions, % of peak",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_elapsed": "ALU, % of peak",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_elapsed": "FMA, % of peak",
    "sm__inst_issued.avg.pct_of_peak_sustained_elapsed": "issue slots used, %",
    "sm__inst_executed.sum": "instructions",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed": "LSU's part of shared memory, %",
    "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed": "shared memory's banks read, %",
    "l1tex__data_bank_writes.avg.pct_of_peak_sustained_elapsed": "shared memory's banks written, %",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": "L2 busy, %",
    "lts__t_sector_hit_rate.pct": "L2 hits, %",
    "dram__bytes.sum.pct_of_peak_sustained_elapsed": "DRAM busy, %",
    **{
        f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio": f"warps stalled: {title}"
        for reason, title in {
            "barrier": "barrier",
            "branch_resolve": "branch",
            "dispatch_stall": "dispatch",
            "gmma": "products",
            "long_scoreboard": "L1 and memory",
            "math_pipe_throttle": "pipe is full",
            "mio_throttle": "queue to memory and exponentials is full",
            "no_instruction": "instruction fetch",
            "not_selected": "another is issued",
            "selected": "issued",
            "short_scoreboard": "shared memory and exponentials",
            "sleeping": "asleep",
            "wait": "fixed latency",
            "warpgroup_arrive": "its warpgroup",
        }.items()
    },
}
"""Metric -> our name for it. Stalls are warps per issue slot in which one was issued."""
CYCLES = frozenset({"sm__cycles_elapsed.max"})
CONTENDERS = ("ours", "fa3", "fa4")
PROFILED = (
    ("forward", "table d64 32/32 full s8192"),
    ("forward", "table d64 32/32 causal s8192"),
    ("forward", "table d128 16/16 full s8192"),
    ("forward", "table d128 16/16 causal s8192"),
    ("forward", "dims d192 10/10 full s8192"),
    ("forward", "dims d256 8/8 full s512"),
    ("forward", "grouped d128 64/8 full s32768"),
    ("forward", "window d128 16/16 window 128 s8192"),
    ("backward", "table d64 32/32 full s8192"),
    ("backward", "table d64 32/32 causal s8192"),
    ("backward", "table d128 16/16 full s8192"),
    ("backward", "table d128 16/16 causal s8192"),
)
"""Pass and cell of `hopper_compare.py`: those that fall short of a target, and the like that don't."""
CELLS = {cell.name: cell for cell in cells()}
CASES = {f"{who}: {kind} {name}": (who, kind, CELLS[name]) for who in CONTENDERS for kind, name in PROFILED}


def run(names: list[str]) -> None:
    """What ncu looks at."""
    for name in names:
        who, kind, cell = CASES[name]
        forward, backward, reasons = cell_runs(cell, [who], checked=False)
        runs = forward if kind == "forward" else backward
        count_kernels(runs.get(who, lambda: None))  # one that can't run it leaves its mark alone
        if who not in runs:
            print(f"{name}: {reasons.get(who, 'it has no backward')}", flush=True)
        torch.cuda.empty_cache()


def measure(names: list[str], seconds: float) -> Iterator[tuple[str, Any]]:
    """Case -> the counters of its longest kernel, or why there are none."""
    for contender in CONTENDERS:
        group = [name for name in CASES if CASES[name][0] == contender and (not names or name in names)]
        kernels, problem = under_ncu(Path(__file__), group, METRICS, CYCLES, seconds) if group else ([], "")
        for place, name in enumerate(group):
            found = kernels[place] if place < len(kernels) else []
            yield name, max(found, key=lambda kernel: kernel["cycles"] or 0) if found else {"problem": problem}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "run"))
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--only", choices=CONTENDERS, help="all cases of this one alone")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the cases of one contender under ncu")
    asked = parser.parse_intermixed_args()  # cases behind an option too
    unknown = sorted(set(asked.cases) - CASES.keys())
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if asked.what == "run":
        run(asked.cases)
        return
    results: dict[str, Any] = {"machine": describe("cuda"), "kernels": {}}
    of_one = [name for name, (contender, *_) in CASES.items() if contender == asked.only]
    for name, counters in measure([*asked.cases, *of_one], asked.timeout):
        results["kernels"][name] = counters
        print(name, json.dumps(counters), flush=True)
        if asked.output:
            draft = asked.output.with_name(asked.output.name + ".part")
            draft.write_text(json.dumps(results, indent=1) + "\n")
            os.replace(draft, asked.output)


if __name__ == "__main__":
    main()
