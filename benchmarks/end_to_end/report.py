"""The end-to-end results as Markdown and as a picture of the loss curves.

python benchmarks/end_to_end/report.py RESULTS.json [MORE.json] [--picture FILE.svg] [--merge FILE.json] [--page]
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any


def table(rows: list[dict[str, Any]]) -> str:
    """Tokens a second, beside `eager`'s and `stock`'s of the same model and length, and peak memory; `~` where that ran in another run."""
    order = list(dict.fromkeys((row["model"], row["length"]) for row in rows))
    rows = sorted(rows, key=lambda row: order.index((row["model"], row["length"])))
    bases = [name for name in ("eager", "stock") if any(row["attention"] == name for row in rows)]
    numbered = ["run"] if len({run_of(row) for row in rows}) > 1 else []
    heads = ["model", "length", "attention", *numbered, "tokens/s", *[f"beside {name}" for name in bases], "ms a step", "peak GiB"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row in rows:
        same = {r["attention"]: r for r in rows if (r["model"], r["length"]) == (row["model"], row["length"]) and r["status"] == "time"}
        head = f"| {row['model']} | {row['length']} | {row['attention']} |" + (f" {run_of(row)} |" if numbered else "")
        if row["status"] != "time":
            detail = textwrap.shorten(row.get("detail", "").replace("|", "/"), 110, placeholder=" ...")
            lines.append(f"{head} {row['status']}: {detail} |{' |' * (len(bases) + 2)}")
            continue
        beside = [_beside(row, same[name]) if name in same else "" for name in bases]
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        lines.append(f"{head} " + " | ".join([f"{row['tokens_s']:,.0f}", *beside, f"{row['ms']:.1f}", peak]) + " |")
    return "\n".join(lines)


def _beside(row: dict[str, Any], base: dict[str, Any]) -> str:
    return f"{'~' * (run_of(row) != run_of(base))}{row['tokens_s'] / base['tokens_s']:.2f} x"


def run_of(row: dict[str, Any]) -> int:
    """Of merged results: the place of its run, from 1."""
    return int(row.get("run", 1))


PAPER = (
    ("BERT-large", 512, "1.15 x", "Nvidia's MLPerf 1.1 code, time to the target accuracy"),
    ("GPT-2 medium", 1024, "3.0 x", "Hugging Face's; 1.7 x Megatron-LM's"),
    ("LRA encoder", 1024, "2.4 x", "standard attention, five tasks of 1K to 4K together"),
    ("LRA encoder", 4096, "2.4 x", "the same"),
)
"""Model, length, gain and what it is over: Dao et al., arXiv 2205.14135, tables 1 to 3, A100."""


def beside_paper(rows: list[dict[str, Any]]) -> str:
    """`flash` over `eager`, where both have a time, beside the paper's gain."""
    tokens = {(row["model"], row["length"], row["attention"]): row["tokens_s"] for row in rows if row["status"] == "time"}
    lines = ["| model | length | flash over eager | the paper's | over |", "| --- " * 5 + "|"]
    for model, length, gain, over in PAPER:
        ours, base = (tokens.get((model, length, name)) for name in ("flash", "eager"))
        if ours and base:
            lines.append(f"| {model} | {length} | {ours / base:.2f} x | {gain} | {over} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def losses(curves: list[dict[str, Any]]) -> str:
    """Where each curve ends, and how far it is from the first one on the way."""
    lines = ["| attention | last training loss | held-out loss | furthest from the first curve |", "| --- " * 4 + "|"]
    first = next((curve for curve in curves if "losses" in curve), None)
    for curve in curves:
        if "losses" not in curve or first is None:
            lines.append(f"| {curve['attention']} | {curve.get('error')} | | |")
            continue
        apart = max(abs(one - other) for one, other in zip(curve["losses"], first["losses"]))
        last = sum(curve["losses"][-20:]) / len(curve["losses"][-20:])
        lines.append(f"| {curve['attention']} | {last:.3f} | {curve['held_out']:.3f} | {apart:.3f} |")
    return "\n".join(lines)


def draw(curves: list[dict[str, Any]], file: Path) -> None:
    """The curves over each other, and their distance from the first below. SystemExit if there is none."""
    if not any("losses" in curve for curve in curves):
        raise SystemExit("the results hold no loss curve to draw; run the part `curves`")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    drawn = [curve for curve in curves if "losses" in curve]
    for curve, (colour, style) in zip(drawn, (("#0072b2", "-"), ("#d55e00", "--"), ("#009e73", ":"), ("#cc79a7", "-."))):
        upper.plot(curve["losses"], style, color=colour, linewidth=1.4, label=f"{curve['attention']} (held out {curve['held_out']:.3f})")
        if curve is not drawn[0]:
            apart = [one - other for one, other in zip(curve["losses"], drawn[0]["losses"])]
            lower.plot(apart, color=colour, linewidth=1)
    upper.set_ylabel("training loss, nats a character")
    upper.legend(frameon=False)
    lower.set_ylabel(f"minus {drawn[0]['attention']}")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
    figure.savefig(file, dpi=130)


CARD_CURVES = "end_to_end_h200.png"
KEY = ("model", "length", "attention")
"""What a row is of; a curve has its attention alone."""


def measured(results: dict[str, Any]) -> str:
    """The part of docs/end_to_end.md between its markers: results of a card."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if name in ("torch", "triton"))
    shown = {run_of(row) for row in (*results["steps"], *results["curves"])}
    runs = [f"{place} at {_told(run)}" for place, run in enumerate(results.get("runs", [machine]), 1) if place in shown]
    commit = "" if len(runs) > 1 else f", {_told(machine)}"
    parts = [f"One {machine['name']}, {versions}{commit} (`benchmarks/results/h200/end_to_end.json`)."]
    parts += [f"Runs: {'; '.join(runs)}."] if len(runs) > 1 else []
    if results["steps"]:
        parts.append(table(results["steps"]))
        beside = beside_paper(results["steps"])
        parts += [f"Beside the paper's models:\n\n{beside}"] if beside else []
    if results["curves"]:
        setting = results["curves"][0]
        sizes = ", ".join(f"{setting[name]} {name}" for name in ("layers", "width", "heads", "length", "batch", "steps") if name in setting)
        sizes += f"; run {run_of(setting)}" if len(runs) > 1 else ""
        parts += [f"Loss curves of a small decoder ({sizes}):", losses(results["curves"]), f"![The loss curves on the card]({CARD_CURVES})"]
    else:
        parts.append("Known gap: the loss curves of the larger decoder have not run on a GPU yet.")
    return "\n\n".join(parts)


def _told(run: dict[str, Any]) -> str:
    return f"commit {run.get('commit')}" + (f", {run['started']}" if run.get("started") else "")


def merged(files: list[Path]) -> dict[str, Any]:
    """Runs of one kind of machine as one: the rows of all, of a model and attention that ran twice the later file's, each with its run."""
    every = [json.loads(file.read_text()) for file in files]
    for what, kinds in (
        ("machines", {each["machine"]["name"] for each in every}),
        ("versions of torch", {each["machine"]["versions"]["torch"] for each in every}),
    ):
        if len(kinds) > 1:
            raise SystemExit(f"results of several {what}: {', '.join(sorted(kinds))}")
    if len(every) == 1:
        return every[0]
    runs: list[dict[str, Any]] = []
    rows: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {"steps": {}, "curves": {}}
    for each in every:
        for part, found in rows.items():
            found |= {tuple(row.get(name) for name in KEY): row | {"run": len(runs) + run_of(row)} for row in each[part]}
        runs += each.get("runs", [each["machine"]])
    return every[0] | {"runs": runs} | {part: list(found.values()) for part, found in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--merge", type=Path, metavar="FILE", help="write all results there as one")
    parser.add_argument("--page", action="store_true", help="write the measured part of docs/end_to_end.md")
    asked = parser.parse_args()
    results = merged(asked.results)
    print(table(results["steps"]), losses(results["curves"]), sep="\n\n")
    if asked.picture is not None:
        draw(results["curves"], asked.picture)
    if asked.merge is not None:
        asked.merge.write_text(json.dumps(results, indent=1) + "\n")
    if asked.page:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from pages import ROOT, write

        if results["curves"]:
            draw(results["curves"], ROOT / "docs" / CARD_CURVES)
        write("end_to_end.md", measured(results))


if __name__ == "__main__":
    main()
