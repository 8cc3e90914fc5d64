"""Draws docs/layouts.png, the presets side by side.

    python docs/draw_layouts.py [FILE.png]

Needs matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

from attnzoo import BlockLayout, layouts

LENGTH, BLOCK = 2048, 64

LAYOUTS: dict[str, BlockLayout] = {
    "causal": layouts.causal(LENGTH, block=BLOCK),
    "sliding_window": layouts.sliding_window(LENGTH, window=500, block=BLOCK),
    "dilated": layouts.dilated(LENGTH, reach=4, step=3, block=BLOCK),
    "strided": layouts.strided(LENGTH, stride=8, reach=1, block=BLOCK),
    "fixed": layouts.fixed(LENGTH, stride=8, block=BLOCK),
    "butterfly": layouts.butterfly(LENGTH, block=BLOCK),
    "bigbird": layouts.bigbird(LENGTH, block=BLOCK),
    "longformer": layouts.longformer(LENGTH, reach=2, global_blocks=2, block=BLOCK),
    "prefix_lm": layouts.prefix_lm(LENGTH, prefix=600, block=BLOCK),
    "documents": layouts.documents([700, 300, 1048], causal=True, block=BLOCK),
    "random": layouts.random(LENGTH, density=0.15, block=BLOCK),
    "butterfly & causal": layouts.butterfly(LENGTH, block=BLOCK) & layouts.causal(LENGTH, block=BLOCK),
}


def draw(path: Path) -> None:
    figure, grid = pyplot.subplots(3, 4, figsize=(10, 8.2), layout="constrained")
    for axes, (name, layout) in zip(grid.flat, LAYOUTS.items()):
        layout.show(axes)
        axes.set_title(f"{name}, density {layout.density:.2f}", fontsize=9)
        axes.set_xlabel("")
        axes.set_ylabel("")
        axes.set_xticks([])
        axes.set_yticks([])
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("layouts.png"))
