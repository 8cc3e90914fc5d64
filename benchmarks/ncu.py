"""Nsight Compute over a script: its command line, which never touches the clocks, and what it prints."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["count_kernels", "under_ncu"]

MARK = "spin_kernel"
Kernels = list[dict[str, Any]]


def count_kernels(call: Callable[[], object]) -> None:
    """One call, warm, behind the mark that separates one case's kernels from the next's."""
    import torch

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    torch.cuda._sleep(1)
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def under_ncu(
    script: Path, cases: list[str], metrics: Mapping[str, str], needed: frozenset[str], seconds: float
) -> tuple[list[Kernels], str]:
    """The kernels of each case, as far as it came, and the end of what was said.

    Args:
        script: `SCRIPT run CASE...` gives each case to `count_kernels`.
        metrics: metric -> our name for it.
        needed: those asked for even if ncu doesn't say that it knows them.
    """
    try:
        asked = command(script, cases, known_metrics(metrics, needed))
        done = subprocess.run(asked, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"{type(error).__name__}: {str(error)[-300:]}"
    return counted(done.stdout, metrics), (done.stdout + done.stderr)[-500:]


def known_metrics(metrics: Mapping[str, str], needed: frozenset[str]) -> frozenset[str]:
    """Those that this ncu knows on this card, since it stops at one that it doesn't; the needed ones if it won't say."""
    try:
        done = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return needed
    names = set(re.findall(r"^([a-z0-9]+__\w+)", done.stdout, re.MULTILINE))
    return frozenset(metric for metric in metrics if metric.partition(".")[0] in names) or needed


def command(script: Path, cases: list[str], metrics: frozenset[str]) -> list[str]:
    """ncu over `script run CASE...`, between cudaProfilerStart and -Stop."""
    options = [
        "--profile-from-start",
        "off",
        "--target-processes",
        "all",
        "--clock-control",
        "none",
        "--cache-control",
        "none",
    ]
    options += ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(sorted(metrics))]
    return ["ncu", *options, sys.executable, str(script), "run", *cases]


def counted(text: str, metrics: Mapping[str, str]) -> list[Kernels]:
    """The kernels of each case, from ncu's CSV: a header with the metrics' names, a line of units, a line a kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    cases: list[Kernels] = []
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        if not re.fullmatch(r"\d+", row.get("ID") or ""):
            continue
        if MARK in row["Kernel Name"]:
            cases.append([])
        elif cases:
            values = {ours: _number(row[theirs]) for theirs, ours in metrics.items() if row.get(theirs)}
            cases[-1].append({"kernel": row["Kernel Name"], **values})
    return cases


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:  # n/a
        return None
