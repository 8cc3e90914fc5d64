"""The measured part of docs/io.md, made of the committed results of io_gpu.py.

python benchmarks/io_tables.py            write it into docs/io.md, between its two markers
"""

from __future__ import annotations

import json
from typing import Any

from pages import RESULTS, table, write

from attnzoo.cli.io import PAPER

FILE = RESULTS / "io.json"
ALLOWED = 0.15
"""How far the account may be off what is counted."""
PAPERS = {"flash": "FlashAttention", "eager, with mask and dropout": "standard attention"}


def measured(results: dict[str, Any]) -> str:
    """Everything between the markers; what did not run is left out, what failed says so."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if name in ("torch", "triton"))
    parts = [f"One {machine['name']}, {versions}, commit {machine.get('commit')} (`benchmarks/results/h200/io.json`)."]
    if results.get("measure"):
        parts += [
            "bf16, one batch, 16 heads, D = 128; sparse is a quarter of the blocks of 128 x 128; `both` is forward and backward. GB:",
            counted(results["measure"]),
            verdict(results["measure"]),
        ]
    if results.get("paper"):
        parts += ["GPT-2 medium's attention, fp16, forward and backward, beside the paper's A100:", papers(results["paper"])]
    if results.get("tiles"):
        parts += ["The portable forward at S = 8192, D = 64, 16 heads, by its tile:", tiles(results["tiles"])]
    return "\n\n".join(parts)


def counted(cases: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, case in cases.items():
        kind, direction, length = name.split("-")
        numbers = [_gigabytes(case[key]) for key in ("predicted_l2", "measured_l2")]
        ratio = "" if case["ratio"] is None else f"{case['ratio']:.2f}"
        memory = [_gigabytes(case[key]) for key in ("compulsory", "measured_dram")]
        rows.append((kind, direction, length, *numbers, ratio, *memory))
    head = ("call", "pass", "S", "account, L2", "counted, L2", "counted / account", "device memory, at least", "device memory, counted")
    return table(head, rows)


def verdict(cases: dict[str, dict[str, Any]]) -> str:
    """How many are within what is allowed, and which are not."""
    off = {name: case["ratio"] for name, case in cases.items() if case["ratio"] is not None and abs(case["ratio"] - 1) > ALLOWED}
    told = [case for case in cases.values() if case["ratio"] is not None]
    text = f"{len(told) - len(off)} of {len(cases)} cases are within {ALLOWED:.0%} of the account."
    if off:
        text += " Beyond it: " + ", ".join(f"{name} ({ratio:.2f})" for name, ratio in off.items()) + "."
    missing = {name: case.get("problem", "") for name, case in cases.items() if case["ratio"] is None}
    return text + "".join(f" {name} was not counted: {' '.join(problem.split())[-120:]}." for name, problem in missing.items())


def papers(found: dict[str, dict[str, Any]]) -> str:
    base = found.get("eager, with mask and dropout", {}).get("ms")
    theirs_base = float(PAPER["standard attention"][2])
    rows = []
    for name, each in found.items():
        theirs = PAPER.get(PAPERS.get(name, ""))
        if "ms" not in each:
            rows.append((name, each["error"], "", "", "", ""))
            continue
        gain = f"{base / each['ms']:.1f} x" if base else ""
        account = [f"{each[key]:,.1f}" if key in each else "" for key in ("gflop", "l2_gb")]
        beside = ("", "") if theirs is None else (theirs[2], f"{theirs_base / float(theirs[2]):.1f} x")
        rows.append((name, f"{each['ms']:.2f}", gain, *account, " / ".join(filter(None, beside))))
    return table(("attention", "ms", "against eager", "GFLOP", "GB to and from L2, account", "the paper's ms / gain"), rows)


def tiles(found: dict[str, dict[str, Any]]) -> str:
    rows = [(name, f"{each['l2_gb']:.2f}", f"{each['ms']:.3f}" if "ms" in each else each["error"]) for name, each in found.items()]
    return table(("queries x keys", "GB to and from L2, account", "ms"), rows)


def _gigabytes(count: float | None) -> str:
    return "" if count is None else f"{count / 1e9:.3g}"


if __name__ == "__main__":
    write("io.md", measured(json.loads(FILE.read_text())))
