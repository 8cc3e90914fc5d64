"""The measured part of docs/flash.md, made of the committed results.

python benchmarks/flash_tables.py            write it into docs/flash.md, between its two markers
"""

from __future__ import annotations

import json
from statistics import geometric_mean
from typing import Any

import pages

MEASURED = pages.RESULTS / "flash.json"
MATRIX = pages.RESULTS / "bench.json"
BACKENDS = ("flash", "flex", "fa2", "cudnn")


def compared(results: dict[str, Any]) -> list[str]:
    lines = [f"| D | causal | S | {' | '.join(BACKENDS)} |", f"| {'--- | ' * (3 + len(BACKENDS))}".rstrip()]
    for row in results["compare"]:
        cells = [f"{row[name][0]:.0f} / {row[name][1]:.0f}" for name in BACKENDS]
        lines.append(f"| {row['dim']} | {'yes' if row['causal'] else 'no'} | {row['length']} | {' | '.join(cells)} |")
    return lines


def ratios(results: dict[str, Any]) -> list[str]:
    lines = ["| against | calls | forward | backward |", "| --- | --- | --- | --- |"]
    for peer in ("flex", "fa2"):
        for which, wanted in (("all", (False, True)), ("full", (False,)), ("causal", (True,))):
            rows = [row for row in results["compare"] if row["causal"] in wanted]
            cells = []
            for place in (0, 1):
                found = [row["flash"][place] / row[peer][place] for row in rows]
                cells.append(f"{geometric_mean(found):.2f}, worst {min(found):.2f}")
            lines.append(f"| {peer} | {which} | {' | '.join(cells)} |")
    return lines


FA2_GOALS = {False: 1.3, True: 1.1}
"""Forward, causal or not: times as fast as FA2."""


def behind_fa2(results: dict[str, Any]) -> str:
    """The cells under the goal, which the means hide."""
    cells = []
    for row in results["compare"]:
        times = row["flash"][0] / row["fa2"][0]
        if times < FA2_GOALS[row["causal"]]:
            cells.append(f"{times:.2f} at D = {row['dim']}, {'causal' if row['causal'] else 'full'}, {row['length']}")
    goal = f"Forward, the goal is {FA2_GOALS[False]} times fa2 without causal and {FA2_GOALS[True]} with"
    if not cells:
        return f"{goal}: every cell reaches it."
    return f"{goal}. Known gap: the means reach it, {len(cells)} of {len(results['compare'])} cells don't: {'; '.join(cells)}."


def decoding(results: dict[str, Any]) -> list[str]:
    lines = ["| B | queries | us in a graph | us eager | TB/s | of a copy's |", "| --- | --- | --- | --- | --- | --- |"]
    *rows, few_heads = results["decode"]
    for row in rows:
        cells = f"{row['us']:.0f} | {row['eager us']:.0f} | {row['TB/s']:.2f} | {row['of copy']:.2f}"
        lines.append(f"| {row['batch']} | {row['queries']} | {cells} |")
    us = {(row["batch"], row["queries"]): row["us"] for row in rows}
    eight = " and ".join(f"{us[batch, 8] / us[batch, 1]:.2f}" for batch in (1, 8))
    return [
        *lines,
        "",
        f"Eight queries take {eight} times as long as one. Calls are repeated as they are: at B = 1 a part of the 134 MB of keys",
        "and values may come from the L2 of 50 MB; at B = 8 they are 1074 MB. The goals: for one query 0.75 of a copy's at B = 1 and",
        "0.85 at B = 8; 1.3 times for eight.",
        "",
        f"256 queries over 131072 keys, 8/1 heads: {few_heads['few heads']:.0f} TFLOP/s, of a goal of 300.",
    ]


def searched(results: dict[str, Any]) -> list[str]:
    """What random problems and the sanitizers found."""
    deep, sanitizers = results["deep"], results["sanitizers"]
    lines = [
        f"The deep profile: {deep['problems']} random problems and {deep['variants']} kernel variants, {deep['failed']} failures,"
        f" {deep['seconds']} s on {deep['cards']} card{'s' * (deep['cards'] > 1)} (`{deep['command']}`).",
        "",
        f"compute-sanitizer (`{sanitizers['command']}`), errors:",
        "",
        "| tool | portable kernels | Hopper kernels | the right kernel of `sanitizer_limits.py` |",
        "| --- | --- | --- | --- |",
    ]
    for tool, found in sanitizers["tools"].items():
        cells = [f"{found[f'{kernels} errors']}, {found[f'{kernels} calls']} calls" for kernels in ("portable", "Hopper")]
        lines.append(f"| {tool} | {cells[0]} | {cells[1]} | {found['limits'] or 0} |")
    return lines


PROBED = (
    "rows 2^25 elements apart, 70,000 batches and heads, slices and expanded heads, a graph captured cold and one of a forward and\n"
    "backward, each replayed 100 times on fresh data, a side stream, 200 equal deterministic calls, biases of 1e4 and of `finfo.min`,\n"
    "forward and backward at S = 1,048,576 in 652 MiB beyond the inputs: o, its gradient and three gradients take 640, 3 numbers a row 12"
)
"""What `flash_gpu.py probes` held at the commit of its results."""


def probed(results: dict[str, Any]) -> str:
    failed = "; ".join(results["probes"]) or "none failed"
    return f"What only a card can show (`python benchmarks/flash_gpu.py probes`), {failed}: {PROBED}."


CELL = "bf16-b1-h32-s16384-d64-cuda-cold-eager"


def memory() -> str:
    """Peaks of one call of the matrix, and what they are made of, in MiB."""
    cells = {cell["id"]: cell for cell in json.loads(MATRIX.read_text())["cells"] if cell["backend"] == "flash"}
    forward, backward = cells[f"forward-{CELL}"], cells[f"backward-{CELL}"]
    shape = forward["workload"]
    rows = shape["batch"] * shape["heads"] * shape["length"]
    o, statistic = [rows * size / 2**20 for size in (2 * shape["head_dim"], 4)]
    return (
        f"Memory beyond the inputs at S = {shape['length']}, {shape['heads']} heads, D = {shape['head_dim']}, bf16, by `bench.json`:"
        f" {forward['peak'] / 2**20:.0f} MiB forward, where o takes {o:.0f}\nand the lse {statistic:.0f};"
        f" {backward['peak'] / 2**20:.0f} forward and backward, where the gradients add {3 * o:.0f}, two more numbers a row"
        f" {2 * statistic:.0f}, and dq's sum in fp32,\nwhich the Hopper kernels alone need, {2 * o:.0f}."
    )


HOST_GOALS = {"without grad": 25, "with grad": 45}
"""us"""


def hosted(results: dict[str, Any]) -> str:
    """The host's share of a call, its launches apart, of each run."""
    runs = results["host"]
    lines = ["| kernels | launches alone | the rest, without gradients | with |", "| --- | --- | --- | --- |"]
    for kernels in runs[0]:
        cells = [", ".join(f"{run[kernels][part]:.0f}" for run in runs) for part in ("launches", *HOST_GOALS)]
        lines.append(f"| {kernels} | {' | '.join(cells)} |")
    late = any(min(run[kernels][part] for run in runs) > goal for kernels in runs[0] for part, goal in HOST_GOALS.items())
    goals = " and ".join(f"{goal} {part}" for part, goal in HOST_GOALS.items())
    return "\n".join([*lines, "", f"{'Known gap: the' if late else 'The'} goal is {goals}."])


def measured(results: dict[str, Any]) -> str:
    """Everything between the markers."""
    card, torch, triton = results["machine"]
    commits = "; ".join(f"{words} at {commit}" for words, commit in results["commits"].items())
    parts = [
        f"One {card}, torch {torch}, triton {triton}, `benchmarks/flash_gpu.py` (`benchmarks/results/h200/flash.json`: {commits}).",
        "The portable kernels against torch's in one process, bf16, 16384 tokens, heads x D = 2048, medians of five interleaved\n"
        "rounds, TFLOP/s forward / backward. fa2 and cudnn are SDPA's, flex is `torch.compile(flex_attention)`.",
        "\n".join(compared(results)),
        "Ratios of speed, geometric mean and the worst cell:",
        "\n".join(ratios(results)),
        behind_fa2(results),
        "Few queries, 64/8 heads, D = 128, 32768 keys, bf16:",
        "\n".join(decoding(results)),
        "The host's share of a forward call, us, the least of 20 means, in runs one after the other; launching the recorded kernels\n"
        "again is its own column, the rest validates, chooses, allocates and records for autograd (`python benchmarks/flash_gpu.py host`):",
        hosted(results),
        memory(),
        probed(results),
        "\n".join(searched(results)),
        f"{results['repeats']['times']} deterministic backward passes with all but 2 GiB of the card's memory taken gave equal bits.",
    ]
    return "\n\n".join(parts)


def main() -> None:
    pages.write("flash.md", measured(json.loads(MEASURED.read_text())))


if __name__ == "__main__":
    main()
