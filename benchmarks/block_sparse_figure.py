"""The paper's figure: run time against the share of non-zero blocks, from what `block_sparse_gpu.py compare` measured.

    python benchmarks/block_sparse_figure.py [RESULTS.json] [FIGURE.png]

A straight line is fitted to the random layouts of each panel; the other layouts are drawn where they fall. Needs matplotlib.
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
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "block_sparse.json"
FIGURE = ROOT / "docs" / "block_sparse.png"
WAYS = {"forward": 0, "backward": 1}


def line_through(density: np.ndarray[Any, Any], ms: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Slope and intercept by least squares of the relative error, so that small densities count as much as large ones."""
    table = np.stack([density, np.ones_like(density)], axis=1) / ms[:, None]
    slope, intercept = np.linalg.lstsq(table, np.ones_like(ms), rcond=None)[0]
    return float(slope), float(intercept)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    rows = [row for row in rows if isinstance(row["block_sparse"], list)]
    panels = sorted({(row["length"], row["dim"]) for row in rows})
    figure, grid = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), layout="constrained", squeeze=False)
    for axes, (length, dim) in zip(grid.flat, panels):
        here = [row for row in rows if (row["length"], row["dim"]) == (length, dim)]
        for (way, place), colour in zip(WAYS.items(), ("#1f4e79", "#b5651d")):
            for is_random, marker in ((True, "o"), (False, "x")):
                some = [row for row in here if row["layout"].startswith("random") == is_random]
                axes.plot(
                    [row["density"] for row in some], [row["block_sparse"][place] for row in some], marker, color=colour, markersize=4
                )
            random = [row for row in here if row["layout"].startswith("random")]
            density = np.array([row["density"] for row in random])
            slope, intercept = line_through(density, np.array([row["block_sparse"][place] for row in random]))
            axes.plot(
                [0, 1], [intercept, intercept + slope], "-", color=colour, linewidth=1, label=f"{way}: {intercept:.2f} + {slope:.2f} x ms"
            )
        axes.set_title(f"S = {length}, D = {dim}", fontsize=9)
        axes.set_xlabel("share of non-zero blocks")
        axes.set_ylabel("ms")
        axes.set_xlim(0, 1)
        axes.set_ylim(0)
        axes.legend(fontsize=7, loc="upper left")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    source, target = (given + [RESULTS, FIGURE][len(given) :])[:2]
    draw(json.loads(source.read_text())["compare"], target)
