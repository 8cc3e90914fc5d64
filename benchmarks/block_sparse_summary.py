"""What the rows of `block_sparse_gpu.py compare` say: rates, ratios to the peers, distance from the ideal."""

from __future__ import annotations

import statistics
from typing import Any

Row = dict[str, Any]

OURS, PEERS = "block_sparse", ("fa4", "flex", "fa4 native")
WAYS = {"forward": 1.0, "backward": 2.5}
"""FLOPs of a direction, in forwards."""


def tflops(row: Row, way: str, name: str) -> float:
    """Over the blocks that exist."""
    useful = WAYS[way] * 4e-9 * row["heads"] * row["length"] ** 2 * row["dim"] * row["density"]
    return useful / row["ms"][way][name]


def over_ideal(row: Row) -> float | None:
    """Our forward's time over the density times the fastest dense forward of the same rounds."""
    dense = [ms for name, ms in row["ms"]["forward"].items() if name.startswith("dense")]
    ms = row["ms"]["forward"].get(OURS)
    return None if ms is None or not dense else ms / row["density"] / min(dense)


def summary(rows: list[Row]) -> dict[str, Any]:
    """Of each peer and direction: its time over ours, geometric mean, worst cell and number of cells; and the largest
    `over_ideal` at the longest length."""
    found: dict[str, Any] = {}
    for peer in PEERS:
        for way in WAYS:
            ratios = {}
            for row in rows:
                ms = row["ms"][way]
                if peer in ms and OURS in ms:
                    ratios[f"D={row['dim']} S={row['length']} {row['layout']}"] = ms[peer] / ms[OURS]
            if ratios:
                worst = min(ratios, key=lambda name: ratios[name])
                found[f"{peer} {way}"] = {
                    "geometric mean": statistics.geometric_mean(ratios.values()),
                    "worst": ratios[worst],
                    "worst cell": worst,
                    "cells": len(ratios),
                }
    longest = max((row["length"] for row in rows), default=0)
    over = {f"D={row['dim']} {row['layout']}": over_ideal(row) for row in rows if row["length"] == longest}
    known = {name: value for name, value in over.items() if value is not None}
    if known:
        worst = max(known, key=lambda name: known[name])
        found["over density x dense"] = {"length": longest, "worst": known[worst], "worst cell": worst, "cells": len(known)}
    return found


def line_of(row: Row) -> str:
    parts = [f"D={row['dim']:3d} S={row['length']:5d} {row['layout']:14s} density {row['density']:.4f}"]
    for way in WAYS:
        ms = row["ms"][way]
        if OURS in ms:
            ratios = [f"{name} x{ms[name] / ms[OURS]:.2f}" for name in PEERS if name in ms]
            parts.append(" ".join([f"{way} {ms[OURS]:.3f} ms {tflops(row, way, OURS):.0f} TFLOP/s", *ratios]))
    over = over_ideal(row)
    parts += [] if over is None else [f"over density x dense {over:.2f}"]
    parts += [f"{key}: {reason[:150]}" for key, reason in row["reasons"].items() if "no option of its own" not in reason]
    return "  ".join(parts)
