"""The measured part of docs/block_sparse.md and its figure, made of the committed results.

    python benchmarks/block_sparse_report.py     write both; the figure needs matplotlib

The figure is the paper's: run time against the share of non-zero blocks, a straight line fitted to the points of each
kernel. Only the longest length is drawn.
"""

from __future__ import annotations

import json
import statistics
import textwrap
from pathlib import Path
from typing import Any

from block_sparse_summary import OURS, PEERS, WAYS, Row, over_ideal, summary, tflops
from pages import RESULTS, table, write

COMPARED, QUICK = RESULTS / "block_sparse.json", RESULTS / "block_sparse_quick.json"
PAGE = "block_sparse.md"
SPARSEST = 32  # the share of blocks up to which the goal holds
FIGURE = Path(__file__).parents[1] / "docs" / "block_sparse.png"
STYLES = {
    "block_sparse": ("#1f4e79", "o-"),
    "fa4": ("#b5651d", "s--"),
    "flex": ("#5b8c5a", "^:"),
    "hopper": ("#1f4e79", "o-"),
    "portable": ("#b5651d", "s--"),
}


def wrapped(text: str) -> str:
    return textwrap.fill(text, 125, break_long_words=False, break_on_hyphens=False)


# One run beside the peers


def rate(row: Row, way: str, name: str) -> str:
    return f"{tflops(row, way, name):.0f}" if name in row["ms"][way] else "-"


def measured_ways(rows: list[Row]) -> list[str]:
    return [way for way in WAYS if any(row["ms"][way] for row in rows)]


def compared_rows(rows: list[Row]) -> str:
    cells, ways = [], measured_ways(rows)
    for row in rows:
        rates = [" / ".join(rate(row, way, name) for way in ways) for name in (OURS, *PEERS)]
        over = over_ideal(row)
        start = [str(row["dim"]), str(row["length"]), row["layout"], f"{row['density']:.4f}"]
        cells.append([*start, *rates, "-" if over is None else f"{over:.2f}"])
    return table(["D", "S", "layout", "density", OURS, *PEERS, "over density x dense"], cells)


def ratios(found_of: dict[str, Any]) -> str:
    rows = []
    for peer in PEERS:
        for way in WAYS:
            found = found_of.get(f"{peer} {way}")
            if found:
                worst = f"{found['worst']:.2f} ({found['worst cell']})"
                rows.append([f"{peer}, {way}", str(found["cells"]), f"{found['geometric mean']:.2f}", worst])
    return table(["its time over ours", "cells", "geometric mean", "worst"], rows)


def reasons(rows: list[Row]) -> str:
    """What is left out of the tables, and why: a line a kind of reason, with the first cell that has it."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row["reasons"].items():
            if name == "fa4 native" and reason.startswith("NotImplementedError"):
                continue  # an absence that the table's head explains
            said = " ".join(reason.split()).partition(", at most")[0][:160]
            kind = said.partition(" is ")[0] if "relative error" in said else said
            cells.setdefault((name, kind), []).append(f"D = {row['dim']}, S = {row['length']}, {row['layout']}: {said.rpartition(': ')[2]}")
    return "\n".join(f"- {name}, {len(where)} cells, the first {where[0]}" for (name, _), where in cells.items())


def built(rows: list[Row]) -> str:
    cells = [[row["layout"], str(row["blocks"]), f"{row['ms']:.2f}", f"{row['schedule ms']:.2f}", f"{row['peak MB']:.0f}"] for row in rows]
    return table(["layout", "blocks", "ms", "its schedule, ms", "MB at most"], cells)


def in_one_run(results: dict[str, Any]) -> list[str]:
    machine, rows = results["machine"], results["compare"]
    versions, said = machine["versions"], summary(rows)
    over = said.get("over density x dense")
    parts = [
        wrapped(
            f"`benchmarks/block_sparse_gpu.py build compare` on one {machine['device']}, torch {versions['torch']}, "
            f"triton {versions['triton']}, flash-attn-4 {versions['flash-attn-4']} (`benchmarks/results/h200/{COMPARED.name}`, commit "
            f"{machine['commit'] or 'unknown'}). bf16, B = 1, {rows[0]['heads']} heads, blocks of 128, medians of five interleaved "
            "rounds, the host's share left out. Every output and gradient was compared with float64 before its time counts. fa4 and "
            "flex are given the same blocks; fa4 native is FlashAttention 4 without lists of blocks, by its window or packed "
            f"documents. TFLOP/s {' / '.join(measured_ways(rows))} over the blocks that exist; the last column is the forward's time "
            "over the density times the fastest dense forward of the same rounds."
        ),
        compared_rows(rows),
        ratios(said),
    ]
    if over:
        worst = f"at most {over['worst']:.2f} times density x dense ({over['worst cell']}), in {over['cells']} cells"
        parts.append(wrapped(f"At S = {over['length']} the forward takes {worst}."))
    left_out = reasons(rows)
    parts += [f"Left out:\n\n{left_out}"] if left_out else []
    late = sorted({name for row in rows for name in row["late"]})
    parts += [wrapped(f"Calls that wait for the GPU, so that the host's time is part of theirs: {', '.join(late)}.")] if late else []
    if "build" in results:
        parts.append("Layouts made on the device, transposed lists included, and the schedule of a layout's first call:")
        parts.append(built(results["build"]))
        parts += topk_against_forward(results["build"], rows)
    return parts


def topk_against_forward(made: list[dict[str, Any]], rows: list[Row]) -> list[str]:
    """Choosing an eighth of the blocks beside one forward over as many of them, where both were measured."""
    chosen = [each for each in made if each["layout"].startswith("topk")]
    forwards = {row["dim"]: row["ms"]["forward"].get(OURS) for row in rows if (row["length"], row["layout"]) == (32768, "random 1/8")}
    said = [f"{ms:.2f} ms at D = {dim}" for dim, ms in forwards.items() if ms is not None]
    if not chosen or not said:
        return []
    return [wrapped(f"topk takes {chosen[0]['ms']:.2f} ms there, one forward over random blocks of that density {', '.join(said)}.")]


# The earlier run of both kinds of kernels


def both_kernels(rows: list[Row]) -> list[str]:
    cells = []
    for row in rows:
        useful = 4e-9 * 16 * row["length"] ** 2 * row["dim"] * row["density"]
        rates = [f"{useful / row[kernel][0]:.0f} / {2.5 * useful / row[kernel][1]:.0f}" for kernel in ("hopper", "portable")]
        over = row["hopper"][0] / row["density"] / row["dense"][0]
        cells.append([str(row["dim"]), str(row["length"]), f"{row['density']:.4f}", *rates, f"{over:.2f}"])
    return [
        wrapped(
            "The Hopper kernels beside the portable ones, an earlier run of `benchmarks/block_sparse_gpu.py quick` on random blocks with "
            f"the diagonal (`benchmarks/results/h200/{QUICK.name}`). The last column divides by cuDNN's dense forward. Calls below "
            "0.2 ms were bound by a busy host."
        ),
        table(["D", "S", "density", "Hopper", "portable", "Hopper over density x dense"], cells),
    ]


# The figure


def points(compared: dict[str, Any] | None, quick: list[Row]) -> list[Row]:
    """What is drawn: `dim`, `length`, `density`, `ms` by direction and name. Random blocks of the run beside the peers, or of the
    earlier one where that lacks a head dim or a direction."""
    drawn = [row for row in compared["compare"] if row["layout"].startswith("random")] if compared else []
    if {row["dim"] for row in quick} <= {row["dim"] for row in drawn} and all(OURS in row["ms"][way] for row in drawn for way in WAYS):
        return drawn
    names = ("hopper", "portable")
    made = []
    for row in quick:
        ms = {way: {name: row[name][place] for name in names} for place, way in enumerate(WAYS)}
        ms["forward"]["dense cudnn"] = row["dense"][0]
        made.append({**{key: row[key] for key in ("dim", "length", "density")}, "ms": ms})
    return made


def line_through(density: list[float], ms: list[float]) -> tuple[float, float, float]:
    """Slope and intercept by least squares of the relative error, so that small densities count as much as large ones, and the
    largest relative distance of a point from the line."""
    a, b, c = (sum((x**power) / y**2 for x, y in zip(density, ms)) for power in (2, 1, 0))
    u, w = sum(x / y for x, y in zip(density, ms)), sum(1 / y for y in ms)
    slope, intercept = (u * c - w * b) / (a * c - b * b), (a * w - b * u) / (a * c - b * b)
    return slope, intercept, max(abs((slope * x + intercept) / y - 1) for x, y in zip(density, ms))


def lines(rows: list[Row]) -> dict[tuple[str, int, str], tuple[float, float, float]]:
    """By direction, head dim and kernel the line through its points at the longest length, where it has three or more."""
    longest = max(row["length"] for row in rows)
    found = {}
    for way in WAYS:
        for dim in sorted({row["dim"] for row in rows}, reverse=True):
            here = [row for row in rows if (row["length"], row["dim"]) == (longest, dim)]
            for name in STYLES:
                with_it = [row for row in here if name in row["ms"][way]]
                if len(with_it) > 2:
                    found[way, dim, name] = line_through([row["density"] for row in with_it], [row["ms"][way][name] for row in with_it])
    return found


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    longest, fits = max(row["length"] for row in rows), lines(rows)
    dims = sorted({dim for _, dim, _ in fits}, reverse=True)
    figure, grid = pyplot.subplots(len(WAYS), len(dims), figsize=(4 * len(dims), 6), layout="constrained", squeeze=False)
    for way, axes_of_way in zip(WAYS, grid):
        for dim, axes in zip(dims, axes_of_way):
            here = [row for row in rows if (row["length"], row["dim"]) == (longest, dim)]
            for name, (colour, style) in STYLES.items():
                if (way, dim, name) not in fits:
                    continue
                slope, intercept, _ = fits[way, dim, name]
                with_it = [(row["density"], row["ms"][way][name]) for row in here if name in row["ms"][way]]
                label = f"{name}: {intercept:.2f} + {slope:.1f} x ms"
                axes.plot(*zip(*with_it), style[0], color=colour, markersize=4, label=label)
                axes.plot([0, 1], [intercept, intercept + slope], style[1:], color=colour, linewidth=1)
            dense = [ms for row in here for name, ms in row["ms"][way].items() if name.startswith("dense")]
            if dense:
                axes.axhline(min(dense), color="#888888", linewidth=0.8, linestyle=":", label="fastest dense")
            axes.set(title=f"{way}, S = {longest}, D = {dim}", xlabel="share of non-zero blocks", ylabel="ms", xlim=(0, 1.02), ylim=0)
            axes.legend(fontsize=7, loc="upper left")
    figure.savefig(path, dpi=90)


def about_the_figure(rows: list[Row]) -> list[str]:
    fits = lines(rows)
    ours = {key: fit for key, fit in fits.items() if key[2] in (OURS, "hopper")}
    off = max(fit[2] for fit in ours.values())
    empty = [f"{ours[key][1]:.2f} ms {key[0]} at D = {key[1]}" for key in ours]
    return [
        f"![time against density]({FIGURE.name})",
        wrapped(
            f"The paper's figure, random blocks at S = {max(row['length'] for row in rows)}: time is a straight line in the share of "
            f"non-zero blocks. Each of our points lies within {100 * off:.0f}% of its line; a layout with no block would take "
            f"{', '.join(empty)}."
        ),
        wrapped(
            f"Split along these lines, the forward's time over density x the fastest dense forward at a density of 1/{SPARSEST}: what the "
            "blocks take, at any density, and what is left of a layout with no block, a tile's start and end."
        ),
        split_by_line(rows, fits),
    ]


def split_by_line(rows: list[Row], fits: dict[tuple[str, int, str], tuple[float, float, float]]) -> str:
    cells = []
    longest = max(row["length"] for row in rows)
    for way, dim, name in fits:
        dense = [
            min(ms for each, ms in row["ms"]["forward"].items() if each.startswith("dense"))
            for row in rows
            if (row["length"], row["dim"]) == (longest, dim)
        ]
        if way == "forward" and name in (OURS, "fa4", "hopper"):
            slope, intercept = [part / statistics.median(dense) for part in fits[way, dim, name][:2]]
            cells.append([str(dim), name, *[f"{part:.2f}" for part in (slope, SPARSEST * intercept, slope + SPARSEST * intercept)]])
    return table(["D", "kernel", "blocks", "start and end", "together"], cells)


# The page


def measured(compared: dict[str, Any] | None, quick: list[Row]) -> str:
    """Everything between the markers."""
    first = ["Not compared with FlexAttention and FlashAttention 4 in one run yet."] if compared is None else in_one_run(compared)
    return "\n\n".join([*first, *about_the_figure(points(compared, quick)), *both_kernels(quick)])


def load() -> tuple[dict[str, Any] | None, list[Row]]:
    compared = json.loads(COMPARED.read_text()) if COMPARED.exists() else None
    return compared, json.loads(QUICK.read_text())["quick"]


def main() -> None:
    compared, quick = load()
    write(PAGE, measured(compared, quick))
    draw(points(compared, quick), FIGURE)


if __name__ == "__main__":
    main()
