"""The measured part of docs/hopper.md, made of the committed results.

python benchmarks/hopper_tables.py           write it into docs/hopper.md, between its two markers
"""

from __future__ import annotations

import json
from statistics import geometric_mean
from typing import Any

import pages

MEASURED = pages.RESULTS / "hopper_compare.json"
PROFILE = pages.RESULTS / "hopper_profile.json"
COUNTERS = {
    "tensor cores busy, %": "tensor cores",
    "exponentials and conversions, % of peak": "exponentials",
    "issue slots used, %": "issue slots",
    "LSU's part of shared memory, %": "shared memory",
    "L2 busy, %": "L2",
    "DRAM busy, %": "DRAM",
}
"""Counter of the profile -> its column."""
NAMES = ("ours", "cudnn", "fa2", "fa3", "fa4", "flex")
TITLES = {
    ("table", "forward"): "Multi-head, forward",
    ("table", "backward"): "Multi-head, backward",
    ("grouped", "forward"): "64 query heads on 8 key heads, B = 2, forward",
    ("grouped", "backward"): "64 query heads on 8 key heads, B = 2, backward",
    ("window", "forward"): "Sliding windows, forward",
    ("window", "backward"): "Sliding windows, backward",
    ("dims", "forward"): "Other head dims, forward",
    ("dims", "backward"): "Other head dims, backward",
}
Row = dict[str, Any]


def cells_of(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        speeds = [f"{row['tflops'][name]:.0f}" if name in row["tflops"] else "" for name in NAMES]
        lines.append([row["cell"].partition(" ")[2], *speeds, f"{row['ours_to_best']:.3f}"])
    return pages.table(["cell", *NAMES, "ours / best"], lines)


def ratios(rows: list[Row]) -> list[str]:
    """Of ours over each peer's, and over the best of them cell by cell: `mean (least; cells)`, empty where nothing was measured."""
    found = []
    for peer in NAMES[1:]:
        each = [row["tflops"]["ours"] / row["tflops"][peer] for row in rows if peer in row["tflops"] and "ours" in row["tflops"]]
        found.append(f"{geometric_mean(each):.2f} ({min(each):.2f}; {len(each)})" if each else "")
    best = [row["ours_to_best"] for row in rows if row["ours_to_best"]]
    return [*found, f"{geometric_mean(best):.3f} ({min(best):.3f}; {len(best)})"]


def groups(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by what a line of the summary is about; the other head dims one by one."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["pass"] != "step":
            what = f"head dim {row['head_dim']}" if row["section"] == "dims" else TITLES[row["section"], row["pass"]].rpartition(",")[0]
            found.setdefault(f"{what}, {row['pass']}", []).append(row)
    return found


def summary(rows: list[Row]) -> str:
    return pages.table(["", *NAMES[1:], "the best of them"], [[what, *ratios(of)] for what, of in groups(rows).items()])


def steps_of(rows: list[Row]) -> str:
    names = list(rows[0]["tokens_per_second"])
    lines = []
    for row in rows:
        speeds = [str(row["tokens_per_second"][name]) for name in names]
        lines.append([row["cell"].partition(" s")[2], *speeds, f"{row['ours_to_best']:.3f}"])
    return pages.table(["T", *names, "ours / best"], lines)


def profiled(profile: dict[str, Any]) -> str:
    """How busy each part of the card is, in percent of what it could do, in the kernel that takes longest."""
    lines = []
    for case, counters in profile["kernels"].items():
        shares = [f"{counters[name]:.0f}" for name in COUNTERS]
        kernel, _, cell = case.partition(": ")[2].partition(" ")
        lines.append([f"{kernel} {cell.partition(' ')[2]}", f"{counters['cycles'] / 1e3:.0f}", *shares])
    return pages.table(["kernel", "thousand cycles", *COUNTERS.values()], lines)


def measured(results: dict[str, Any]) -> str:
    rows, versions = results["rows"], results["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if name not in ("attnzoo", "nvidia-cudnn-cu13"))
    late = sorted({f"{name} in {row['cell']}" for row in rows for name in row.get("host_was_late", ())})
    parts = [
        f"One {results['device']}, all side by side in one process; {named}, cuDNN {results['cudnn']}; commit {results['commit']}. "
        "TFLOP/s of useful work, bf16.",
        f"`{results['command']}`.",
        "Ours over each, the geometric mean (the least; cells):",
        summary(rows),
    ]
    for (section, kind), title in TITLES.items():
        chosen = [row for row in rows if row.get("section") == section and row["pass"] == kind]
        parts += [f"### {title}", cells_of(chosen)] if chosen else []
    steps = [row for row in rows if row["pass"] == "step"]
    if steps:
        parts += ["### GPT-2 medium, a training step of 16384 tokens, bf16 autocast, no compile: tokens/s", steps_of(steps)]
    profile = json.loads(PROFILE.read_text(encoding="utf-8"))
    parts += [
        "### What is busy",
        f"`ncu` over one call of ours each (`python benchmarks/hopper_profile.py measure`, `{PROFILE.name}`, commit "
        f"{profile['machine']['commit']}), in percent of what each part could do in the kernel's cycles; of a backward the main kernel. "
        "Shared memory is its pipe for loads and stores, which products that read operands there share.",
        profiled(profile),
    ]
    if late:
        parts.append("The host could not launch these ahead of the GPU, so that their times hold its share: " + ", ".join(late) + ".")
    return "\n\n".join(parts)


def main() -> None:
    pages.write("hopper.md", measured(json.loads(MEASURED.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
