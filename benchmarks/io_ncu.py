"""Bytes of kernels under Nsight Compute: its command line, which never touches the clocks, and what it prints."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["METRICS", "command", "counted", "known_metrics", "mark", "moved", "totals"]

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
MARK = "spin_kernel"


def mark() -> None:
    """Launch the kernel that separates one case's kernels from the next's."""
    import torch

    torch.cuda._sleep(1)


def known_metrics() -> frozenset[str]:
    """Those of METRICS that this ncu knows on this card, since it stops at one that it doesn't; the needed ones if it won't say."""
    try:
        done = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return NEEDED
    names = set(re.findall(r"^([a-z0-9]+__\w+)", done.stdout, re.MULTILINE))
    return frozenset(metric for metric in METRICS if metric.partition(".")[0] in names) or NEEDED


def command(script: Path, cases: list[str], metrics: frozenset[str]) -> list[str]:
    """ncu over `script run CASE...`, which marks each case between cudaProfilerStart and -Stop."""
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


def counted(text: str) -> list[list[dict[str, Any]]]:
    """The kernels of each case, from ncu's CSV: a header with the metrics' names, a line of units, a line a kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    cases: list[list[dict[str, Any]]] = []
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        if not re.fullmatch(r"\d+", row.get("ID") or ""):
            continue
        if MARK in row["Kernel Name"]:
            cases.append([])
        elif cases:
            values = {ours: _number(row[theirs]) for theirs, ours in METRICS.items() if row.get(theirs)}
            cases[-1].append({"kernel": row["Kernel Name"], **values})
    return cases


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:  # n/a
        return None


def totals(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """Sums over a case's kernels, of the metrics that each of them has."""
    names = [name for name in METRICS.values() if all(kernel.get(name) is not None for kernel in kernels)]
    return {name: sum(kernel[name] for kernel in kernels) for name in names}


def moved(totals: dict[str, float]) -> float | None:
    """Bytes between the multiprocessors and L2, seen from their side, or else from L2's; None if neither was counted."""
    if {"from_l2", "to_l2"} <= totals.keys():
        return totals["from_l2"] + totals["to_l2"]
    return totals["l2_sectors"] * SECTOR if "l2_sectors" in totals else None
