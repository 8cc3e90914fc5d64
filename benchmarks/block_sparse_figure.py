"""The paper's figure: run time against the share of non-zero blocks, from what `block_sparse_gpu.py quick` measured.

    python benchmarks/block_sparse_figure.py [RESULTS.json] [FIGURE.png]

A straight line is fitted to the points of each kernel; only the longest length is drawn, since short calls at low density are
bound by the host. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "block_sparse_quick.json"
FIGURE = ROOT / "docs" / "block_sparse.png"
DIRECTIONS = {"forward": 0, "backward": 1}
KERNELS = {"hopper": ("#1f4e79", "o-"), "portable": ("#b5651d", "s--")}


def line_through(density: np.ndarray[Any, Any], ms: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """Slope and intercept by least squares of the relative error, so that small densities count as much as large ones, and the
    largest relative distance of a point from the line."""
    table = np.stack([density, np.ones_like(density)], axis=1)
    slope, intercept = np.linalg.lstsq(table / ms[:, None], np.ones_like(ms), rcond=None)[0]
    return float(slope), float(intercept), float(np.abs((table @ [slope, intercept]) / ms - 1).max())


def draw(rows: list[dict[str, Any]], path: Path) -> list[str]:
    """Draw the figure; returns a line of text a fit."""
    longest = max(row["length"] for row in rows)
    dims = sorted({row["dim"] for row in rows}, reverse=True)
    figure, grid = pyplot.subplots(len(DIRECTIONS), len(dims), figsize=(4 * len(dims), 6), layout="constrained", squeeze=False)
    said = []
    for (direction, place), line in zip(DIRECTIONS.items(), grid):
        for dim, axes in zip(dims, line):
            here = [row for row in rows if (row["length"], row["dim"]) == (longest, dim)]
            density = np.array([row["density"] for row in here])
            for kernel, (colour, style) in KERNELS.items():
                ms = np.array([row[kernel][place] for row in here])
                slope, intercept, off = line_through(density, ms)
                label = f"{kernel}: {intercept:.2f} + {slope:.1f} x ms"
                axes.plot(density, ms, style[0], color=colour, markersize=4, label=label)
                axes.plot([0, 1], [intercept, intercept + slope], style[1:], color=colour, linewidth=1)
                said.append(f"{direction}, D = {dim}, {label}, points within {100 * off:.0f}%")
            axes.axhline(here[0]["dense"][place], color="#888888", linewidth=0.8, linestyle=":", label="cuDNN, dense")
            axes.set_title(f"{direction}, S = {longest}, D = {dim}", fontsize=9)
            axes.set_xlabel("share of non-zero blocks")
            axes.set_ylabel("ms")
            axes.set_xlim(0, 1.02)
            axes.set_ylim(0)
            axes.legend(fontsize=7, loc="upper left")
    figure.savefig(path, dpi=90)
    return said


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    source, target = (given + [RESULTS, FIGURE][len(given) :])[:2]
    print(*draw(json.loads(source.read_text())["quick"], target), sep="\n")
