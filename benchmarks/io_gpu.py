"""Bytes on a GPU beside the prediction: each kernel of a call under Nsight Compute, and the paper's table on this card.

    python benchmarks/io_gpu.py measure --output results.json      every case under ncu; needs ncu and its counters
    python benchmarks/io_gpu.py paper --output results.json        GPT-2 medium's attention: ms of eager, flash and SDPA
    python benchmarks/io_gpu.py tiles --output results.json        the forward's time against its tile, portable kernel

`run CASE` is what `measure` puts under ncu. Results are merged into the file.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from attnzoo.bench.machine import describe
from attnzoo.bench.timing import burst
from attnzoo.bench.worker import Prepared
from attnzoo.bench.workload import Workload
from attnzoo.registry import default
from attnzoo.traffic import Traffic, of_kernels, of_standard

METRICS = {
    "l1tex__m_xbar2l1tex_read_bytes.sum": "from_l2",
    "l1tex__m_l1tex2xbar_write_bytes.sum": "to_l2",
    "lts__t_bytes.sum": "l2",
    "dram__bytes.sum": "dram",
    "gpu__time_duration.sum": "ns",
}
TIMEOUT = 120


@dataclass(frozen=True)
class Case:
    """A call whose kernels are counted."""

    backend: str
    workload: Workload


def dense(length: int, direction: str) -> Workload:
    return Workload(1, 16, 16, length, length, 128, "bfloat16", direction=direction, device="cuda")


CASES = {
    f"{kind}-{direction}-{length}": Case(
        "flash" if kind == "dense" else "block_sparse",
        dense(length, direction) if kind == "dense" else dataclasses.replace(dense(length, direction), layout="random:0.25"),
    )
    for length in (8192, 32768)
    for kind in ("dense", "sparse")
    for direction in ("forward", "both")
}
GPT2 = Workload(64, 16, 16, 1024, 1024, 64, "float16", direction="both", device="cuda")


def run(name: str) -> None:
    """One call, between the marks that ncu waits for."""
    prepared = prepared_of(CASES[name])
    call = prepared.call()
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def prepared_of(case: Case) -> Prepared:
    prepared = Prepared.of(default().get(case.backend), case.workload)
    reasons = prepared.backend.unsupported_reasons(prepared.spec)
    if reasons:
        raise SystemExit(f"refused: {reasons}")
    return prepared


def measure(names: list[str]) -> dict[str, Any]:
    """Case -> predicted and counted bytes of each kernel, or why there are none."""
    found = {}
    for name in names or list(CASES):
        command = ["ncu", "--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base", "--cache-control", "none"]
        command += ["--metrics", ",".join(METRICS), sys.executable, __file__, "run", name]
        predicted = prediction(CASES[name])
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
            kernels = counted(done.stdout)
            problem = None if kernels else (done.stdout + done.stderr)[-300:]
        except (OSError, subprocess.TimeoutExpired) as error:
            kernels, problem = [], f"{type(error).__name__}: {error}"
        found[name] = summary(predicted, kernels) | ({"problem": problem} if problem else {})
        print(name, json.dumps({k: v for k, v in found[name].items() if k != "kernels"}), flush=True)
    return found


def prediction(case: Case) -> Traffic:
    return of_kernels(case.workload.spec(), torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0))


def counted(text: str) -> list[dict[str, Any]]:
    """The kernels of ncu's CSV: the header is the line with the metrics' names, the next holds their units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    return [
        {"kernel": row["Kernel Name"], **{ours: float(row[theirs].replace(",", "")) for theirs, ours in METRICS.items() if row.get(theirs)}}
        for row in rows
        if re.fullmatch(r"\d+", row.get("ID", ""))
    ]


def summary(predicted: Traffic, kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the kernels, beside the prediction."""
    totals = {name: sum(kernel.get(name, 0.0) for kernel in kernels) for name in METRICS.values()}
    moved = totals["from_l2"] + totals["to_l2"]
    return {
        "predicted_l2": predicted.moved,
        "compulsory": predicted.compulsory,
        "measured_l2": moved,
        "measured_dram": totals["dram"],
        "ratio": moved / predicted.moved if kernels else None,
        "steps": [asdict(step) for step in predicted.steps],
        "kernels": kernels,
    }


def paper() -> dict[str, Any]:
    """ms and predicted bytes of GPT-2 medium's attention, forward and backward, interleaved; flash is checked first."""
    prepared = {name: Prepared.of(default().get(name), GPT2) for name in ("flash", "sdpa_cudnn", "sdpa_flash") if name in default().names()}
    calls: dict[str, Callable[[], object]] = {}
    for name, each in prepared.items():
        try:
            each.first_call()
            calls[name] = each.call()
        except Exception as error:
            print(name, type(error).__name__, str(error)[:200], flush=True)
    calls["eager, with mask and dropout"] = eager()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(5):
        for name, call in calls.items():
            times[name].append(statistics.median(burst(call, torch.device("cuda"), seconds=0.1, is_cold=True)))
    spec = GPT2.spec()
    predicted = {"flash": of_kernels(spec), "eager, with mask and dropout": of_standard(spec, has_mask_and_dropout=True)}
    found = {name: {"ms": statistics.median(rounds), "rounds": rounds} for name, rounds in times.items()}
    for name, traffic in predicted.items():
        found.setdefault(name, {}).update(gflop=traffic.flops / 1e9, l2_gb=traffic.moved / 1e9)
    print(json.dumps(found), flush=True)
    return found


def eager() -> Callable[[], object]:
    """The paper's baseline: scores, causal mask, softmax, dropout and the product, each a kernel, fp16."""
    q, k, v, grad_o = GPT2.tensors()
    hidden = ~torch.ones(GPT2.length, GPT2.length, dtype=torch.bool, device="cuda").tril()

    def call() -> object:
        scores = (q @ k.mT * GPT2.head_dim**-0.5).masked_fill(hidden, -torch.inf)
        o = torch.nn.functional.dropout(scores.softmax(-1), 0.1) @ v
        return torch.autograd.grad(o, (q, k, v), grad_o)

    return call


def tiles() -> list[dict[str, Any]]:
    """The portable forward under square and other tiles, at S = 8192: time, and bytes by the account."""
    from attnzoo.backends.flash import Flash
    from attnzoo.backends.triton import problem
    from attnzoo.backends.triton.table import Tile

    found = []
    for block_m, block_n, warps in ((16, 16, 4), (32, 32, 4), (64, 32, 4), (64, 64, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8)):
        tile = Tile(block_m, block_n, warps, 2)
        problem.facts_of.cache_clear()
        with mock.patch.object(problem, "tile_for", lambda *arguments, tile=tile: tile):
            each = Prepared.of(Flash(kernels="portable"), dataclasses.replace(dense(8192, "forward"), head_dim=64))
            try:
                each.first_call()
                ms = statistics.median(burst(each.forward, torch.device("cuda"), seconds=0.1, is_cold=False))
            except Exception as error:
                found.append({"tile": [block_m, block_n], "error": f"{type(error).__name__}: {str(error)[:120]}"})
                continue
        rows = 16 * 8192
        moved = rows * 64 * 2 * 2 + 16 * -(-8192 // block_m) * 8192 * 128 * 2
        found.append({"tile": [block_m, block_n], "ms": ms, "l2_gb": moved / 1e9})
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("run", "measure", "paper", "tiles"))
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    if asked.part == "run":
        run(*asked.cases)
        return
    parts: dict[str, Callable[[], Any]] = {"measure": lambda: measure(asked.cases), "paper": paper, "tiles": tiles}
    results = json.loads(asked.output.read_text()) if asked.output and asked.output.exists() else {}
    results |= {"machine": describe("cuda"), asked.part: parts[asked.part]()}
    if asked.output:
        draft = asked.output.with_name(asked.output.name + ".part")
        draft.write_text(json.dumps(results, indent=1))
        os.replace(draft, asked.output)


if __name__ == "__main__":
    main()
