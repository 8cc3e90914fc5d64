"""Draws docs/hopper.png, the schedules of the Hopper kernels as timelines: python docs/draw_hopper.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLOURS = {"copy": "#9db7d5", "scores": "#e0a458", "values": "#c8553d", "softmax": "#7a9e7e", "other": "#b8b8b8"}

# By lane: label, start, end, colour; in units of about 256 cycles, as the kernels are meant to run, not as measured
FORWARD = {
    "producer": (
        "K0, 0, 0.9, copy; V0, 0.9, 1.8, copy; K1, 1.8, 2.7, copy; V1, 2.7, 3.6, copy; K2, 4, 4.9, copy; "
        "claim, 4.9, 5.6, other; V2, 8, 8.9, copy; Q', 8.9, 9.8, copy; K0', 9.8, 10.7, copy; V0', 12, 12.9, copy"
    ),
    "tensor core": (
        "A S0, 1, 2, scores; B S0, 2, 3, scores; A S1, 4, 5, scores; A PV0, 5, 6, values; B S1, 6, 7, scores; "
        "B PV0, 7, 8, values; A S2, 8, 9, scores; A PV1, 9, 10, values; B S2, 10, 11, scores; "
        "B PV1, 11, 12, values; A PV2, 12, 13, values; A S0', 13, 14, scores; B PV2, 14, 15, values; "
        "B S0', 15, 16, scores"
    ),
    "consumer A": (
        "softmax 0, 2, 4, softmax; softmax 1, 5, 7.6, softmax; O, 7.6, 8, other; softmax 2, 9, 11.6, softmax; "
        "O, 11.6, 12, other; epilogue, 13, 14.2, other; softmax 0', 14.2, 16.4, softmax"
    ),
    "consumer B": (
        "softmax 0, 3, 5.4, softmax; softmax 1, 7, 9.6, softmax; O, 9.6, 10, other; softmax 2, 11, 13.6, softmax; "
        "O, 13.6, 14, other; epilogue, 15, 16.2, other"
    ),
}
BACKWARD = {
    "producer": "Q1 lse, 0, 0.7, copy; dO1 δ, 0.7, 1.4, copy; Q2 lse, 8, 8.7, copy; dO2 δ, 8.7, 9.4, copy",
    "tensor core": (
        "S, 0, 1, scores; dP, 1, 2, scores; dV, 4, 5, values; dQ, 5.2, 6.2, values; dK, 6.2, 7.2, values; "
        "S, 8, 9, scores; dP, 9, 10, scores; dV, 12, 13, values; dQ, 13.2, 14.2, values; dK, 14.2, 15.2, values"
    ),
    "consumers": (
        "P = exp2, 1, 2.4, softmax; dS → shared, 2.4, 4, softmax; meet, 4.8, 5.2, other; "
        "dQ → shared, 6.2, 7.4, other; P = exp2, 9, 10.4, softmax; dS → shared, 10.4, 12, softmax; "
        "meet, 12.8, 13.2, other; dQ → shared, 14.2, 15.4, other"
    ),
    "dQ writer": ("claim, 5.2, 6.2, other; store or add, 7.4, 9.4, copy; claim, 13.2, 14.2, other; store or add, 15.4, 16.4, copy"),
}


def draw(axes: Axes, bars: dict[str, str], title: str) -> None:
    lanes = list(bars)
    for y, lane in enumerate(reversed(lanes), 1):
        for bar in bars[lane].split("; "):
            label, start, end, colour = bar.split(", ")
            left, right = float(start), float(end)
            axes.barh(y, right - left, left=left, height=0.7, color=COLOURS[colour], edgecolor="white")
            axes.text((left + right) / 2, y, label, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(lanes), 0, -1), lanes)
    axes.set_xticks([])
    axes.set_xlim(0, 16.5)
    axes.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)


def main() -> None:
    figure, (above, below) = plt.subplots(2, 1, figsize=(12, 5.2), constrained_layout=True)
    draw(above, FORWARD, "Forward: two consumer warpgroups, a tile of three blocks and the beginning of the next (')")
    draw(below, BACKWARD, "Backward: two steps; both consumer warpgroups do the same on their halves of the keys")
    figure.savefig(Path(__file__).with_name("hopper.png"), dpi=110)


if __name__ == "__main__":
    main()
