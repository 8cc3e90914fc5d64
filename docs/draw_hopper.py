"""Draws docs/hopper.png, the schedules of the Hopper kernels as timelines: python docs/draw_hopper.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLOURS = {"copy": "#9db7d5", "scores": "#e0a458", "values": "#c8553d", "softmax": "#7a9e7e", "other": "#b8b8b8", "wait": "#f2f2f2"}

# (lane, start, end, label, colour); in units of about 256 cycles, as the kernels are meant to run, not as measured
FORWARD = [
    ("producer", 0, 0.9, "K0", "copy"), ("producer", 0.9, 1.8, "V0", "copy"), ("producer", 1.8, 2.7, "K1", "copy"), ("producer", 2.7, 3.6, "V1", "copy"),
    ("producer", 4, 4.9, "K2", "copy"), ("producer", 4.9, 5.6, "claim", "other"), ("producer", 8, 8.9, "V2", "copy"), ("producer", 8.9, 9.8, "Q'", "copy"),
    ("producer", 9.8, 10.7, "K0'", "copy"), ("producer", 12, 12.9, "V0'", "copy"),
    ("tensor core", 1, 2, "A S0", "scores"), ("tensor core", 2, 3, "B S0", "scores"),
    ("tensor core", 4, 5, "A S1", "scores"), ("tensor core", 5, 6, "A PV0", "values"), ("tensor core", 6, 7, "B S1", "scores"), ("tensor core", 7, 8, "B PV0", "values"),
    ("tensor core", 8, 9, "A S2", "scores"), ("tensor core", 9, 10, "A PV1", "values"), ("tensor core", 10, 11, "B S2", "scores"), ("tensor core", 11, 12, "B PV1", "values"),
    ("tensor core", 12, 13, "A PV2", "values"), ("tensor core", 13, 14, "A S0'", "scores"), ("tensor core", 14, 15, "B PV2", "values"), ("tensor core", 15, 16, "B S0'", "scores"),
    ("consumer A", 2, 4, "softmax 0", "softmax"), ("consumer A", 5, 7.6, "softmax 1", "softmax"), ("consumer A", 7.6, 8, "O", "other"), ("consumer A", 9, 11.6, "softmax 2", "softmax"),
    ("consumer A", 11.6, 12, "O", "other"), ("consumer A", 13, 14.2, "epilogue", "other"), ("consumer A", 14.2, 16.4, "softmax 0'", "softmax"),
    ("consumer B", 3, 5.4, "softmax 0", "softmax"), ("consumer B", 7, 9.6, "softmax 1", "softmax"), ("consumer B", 9.6, 10, "O", "other"), ("consumer B", 11, 13.6, "softmax 2", "softmax"),
    ("consumer B", 13.6, 14, "O", "other"), ("consumer B", 15, 16.2, "epilogue", "other"),
]  # fmt: skip
BACKWARD = [
    ("producer", 0, 0.7, "Q1 lse", "copy"), ("producer", 0.7, 1.4, "dO1 δ", "copy"), ("producer", 8, 8.7, "Q2 lse", "copy"), ("producer", 8.7, 9.4, "dO2 δ", "copy"),
    ("tensor core", 0, 1, "S", "scores"), ("tensor core", 1, 2, "dP", "scores"), ("tensor core", 4, 5, "dV", "values"), ("tensor core", 5.2, 6.2, "dQ", "values"), ("tensor core", 6.2, 7.2, "dK", "values"),
    ("tensor core", 8, 9, "S", "scores"), ("tensor core", 9, 10, "dP", "scores"), ("tensor core", 12, 13, "dV", "values"), ("tensor core", 13.2, 14.2, "dQ", "values"), ("tensor core", 14.2, 15.2, "dK", "values"),
    ("consumers", 1, 2.4, "P = exp2", "softmax"), ("consumers", 2.4, 4, "dS → shared", "softmax"), ("consumers", 4.8, 5.2, "meet", "other"), ("consumers", 6.2, 7.4, "dQ → shared", "other"),
    ("consumers", 9, 10.4, "P = exp2", "softmax"), ("consumers", 10.4, 12, "dS → shared", "softmax"), ("consumers", 12.8, 13.2, "meet", "other"), ("consumers", 14.2, 15.4, "dQ → shared", "other"),
    ("dQ writer", 5.2, 6.2, "claim", "other"), ("dQ writer", 7.4, 9.4, "store or add", "copy"), ("dQ writer", 13.2, 14.2, "claim", "other"), ("dQ writer", 15.4, 16.4, "store or add", "copy"),
]  # fmt: skip


def draw(axes: Axes, bars: list[tuple[str, float, float, str, str]], title: str) -> None:
    lanes = list(dict.fromkeys(lane for lane, *_ in bars))
    for lane, start, end, label, colour in bars:
        y = len(lanes) - lanes.index(lane)
        axes.barh(y, end - start, left=start, height=0.7, color=COLOURS[colour], edgecolor="white")
        axes.text((start + end) / 2, y, label, ha="center", va="center", fontsize=7)
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
