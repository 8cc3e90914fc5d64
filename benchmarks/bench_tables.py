"""The measured part of docs/bench.md and its pictures, and the speeds in README.md and docs/hopper.md, made of the committed matrix.

python benchmarks/bench_tables.py            write each between its two markers, draw the pictures and the page; these need matplotlib
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import geometric_mean

from pages import RESULTS, ROOT, between, table, write

from attnzoo.bench.page import page
from attnzoo.bench.plots import figures
from attnzoo.bench.results import Cell, Results
from attnzoo.bench.tables import machine_line
from attnzoo.bench.workload import Workload

FILE = RESULTS / "bench.json"
PAGE = RESULTS / "bench.html"
SPEED = "<!-- speed:begin -->", "<!-- speed:end -->"
SPEED_PAGES = ("README.md", "docs/hopper.md")
DIRECTIONS = ("forward", "backward")
OURS = ("flash", "block_sparse")
SHORT = {"unsupported": "", "out of memory": "memory"}


def measured(results: Results) -> str:
    """Everything between the markers; a cell that is not there leaves its place empty."""
    dense = [cell for cell in results.cells if not cell.workload.layout and cell.workload.cache == "cold"]
    sparse = [cell for cell in results.cells if cell.workload.layout]
    warm = [cell for cell in results.cells if not cell.workload.layout and cell.workload.cache == "warm"]
    rounds = f"{results.settings.get('rounds')} rounds of {results.settings.get('seconds')} s"
    how = f"Medians of {rounds}, the cache overwritten before each call (`benchmarks/results/h200/bench.json`)."
    parts = [f"{machine_line(replace(results, settings={}))}. {how}"]
    for direction in DIRECTIONS:
        cells = [cell for cell in dense if cell.workload.direction == direction]
        if any(cell.status == "time" for cell in cells):
            parts += [
                f"{direction.capitalize()}, useful TFLOP/s, 16384 tokens, heads x D = 2048; the fastest is bold:",
                speeds(cells),
            ]
    if any(cell.status == "time" for cell in dense):
        parts += ["`flash` against the fastest of the others, cell by cell:", ratios(dense)]
        parts += ["`flash` against each, geometric mean of the ratios of speed (the least; cells):", against(dense, "flash")]
    if any(cell.status == "time" for cell in sparse):
        parts += ["Random blocks of 128 x 128 and the diagonal, one batch, 16 heads, D = 128, ms forward / backward:", densities(sparse)]
        parts += ["`block_sparse` against each:", against(sparse, "block_sparse")]
    if any(cell.status == "time" for cell in warm):
        parts += ["Launched by torch and replayed from a CUDA graph, warm cache, S = 2048, D = 128, causal, ms:", launches(warm)]
    return "\n\n".join([*parts, failures(results.cells)])


def speeds(cells: Sequence[Cell]) -> str:
    """A row a shape, a column a backend."""
    names = list(dict.fromkeys(cell.backend for cell in cells if cell.status == "time"))
    rows = []
    for w in sorted({cell.workload for cell in cells}, key=lambda w: (w.head_dim, w.causal, w.length)):
        found = {cell.backend: cell for cell in cells if cell.workload == w}
        best = max((cell.tflops for cell in found.values() if cell.status == "time"), default=0.0)
        shown = [_speed(found.get(name), best) for name in names]
        rows.append((str(w.head_dim), "yes" if w.causal else "no", str(w.length), *shown))
    return table(("D", "causal", "S", *names), rows)


def _speed(cell: Cell | None, best: float) -> str:
    if cell is None or cell.status != "time":
        return "" if cell is None else SHORT.get(cell.status, cell.status)
    return f"**{cell.tflops:.0f}**" if cell.tflops == best else f"{cell.tflops:.0f}"


def ratios(cells: Sequence[Cell]) -> str:
    """Geometric mean and worst cell of flash's speed over the fastest peer's."""
    rows = []
    for direction in DIRECTIONS:
        for causal in (False, True):
            found = []
            for w in dict.fromkeys(cell.workload for cell in cells):
                speed = {cell.backend: cell.tflops for cell in cells if cell.workload == w and cell.status == "time"}
                if (w.direction, w.causal) == (direction, causal) and "flash" in speed and len(speed) > 1:
                    found.append((speed["flash"] / max(value for name, value in speed.items() if name != "flash"), w))
            if found:
                worst, where = min(found, key=lambda each: each[0])
                mean = geometric_mean([ratio for ratio, _ in found])
                place = f"{worst:.2f} at D = {where.head_dim}, S = {where.length}"
                rows.append((direction, "yes" if causal else "no", str(len(found)), f"{mean:.2f}", place))
    return table(("pass", "causal", "cells", "geometric mean", "worst"), rows)


def against(cells: Sequence[Cell], own: str) -> str:
    """A row a peer, and one for the fastest peer of each cell: our speed over theirs."""
    peers = list(dict.fromkeys(cell.backend for cell in cells if cell.status == "time" and cell.backend != own))
    rows = [(f"`{peer}`", *[_gain(cells, own, (peer,), direction) for direction in DIRECTIONS]) for peer in peers]
    if len(peers) > 1:
        rows.append(("the fastest of them, cell by cell", *[_gain(cells, own, peers, direction) for direction in DIRECTIONS]))
    return table(("against", *DIRECTIONS), rows)


def _gain(cells: Sequence[Cell], own: str, peers: Sequence[str], direction: str) -> str:
    """`geometric mean (least; cells)` over the workloads where both have a time; empty where there is none."""
    found = []
    for w in dict.fromkeys(cell.workload for cell in cells if cell.workload.direction == direction):
        speed = {cell.backend: cell.tflops for cell in cells if cell.workload == w and cell.status == "time"}
        theirs = [value for name, value in speed.items() if name in peers]
        if own in speed and theirs:
            found.append(speed[own] / max(theirs))
    return f"{geometric_mean(found):.3f} ({min(found):.3f}; {len(found)})" if found else ""


def speed(results: Results) -> str:
    """The short form for README.md and docs/hopper.md."""
    dense = [cell for cell in results.cells if not cell.workload.layout and cell.workload.cache == "cold"]
    machine, versions = results.machine, results.machine.get("versions", {})
    known = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "fa3-fwd", "flash-attn-4") if name in versions)
    shapes = {name: sorted({getattr(cell.workload, name) for cell in dense}) for name in ("head_dim", "length")}
    count = len({cell.run for cell in dense})
    runs = "one run" if count == 1 else f"{count} runs"
    text = (
        f"On one {machine.get('name')} ({known}; commit {machine.get('commit')}), all side by side in {runs}, bf16, 16384 tokens, "
        f"head dims {' and '.join(map(str, shapes['head_dim']))}, {min(shapes['length'])} to {max(shapes['length'])} keys, causal and "
        "not: `flash`'s speed over each peer's, the geometric mean (the least; cells). Below 1 the peer is faster."
    )
    return f"{textwrap.fill(text, 120)}\n\n{against(dense, 'flash')}"


def densities(cells: Sequence[Cell]) -> str:
    names = sorted(dict.fromkeys(cell.backend for cell in cells if cell.status == "time"), key=lambda name: name not in OURS)
    rows = []
    places = sorted({(cell.workload.length, cell.density) for cell in cells}, key=lambda place: (place[0], -place[1]))
    for length, density in places:
        here = [cell for cell in cells if (cell.workload.length, cell.density) == (length, density)]
        rows.append((str(length), f"{density:.4g}", *[_both(here, name) for name in names]))
    return table(("S", "density", *names), rows)


def launches(cells: Sequence[Cell]) -> str:
    names = list(dict.fromkeys(cell.backend for cell in cells if cell.status == "time"))
    kinds = list(dict.fromkeys(cell.workload.launch for cell in cells))
    rows = [(name, *[_both([cell for cell in cells if cell.workload.launch == kind], name) for kind in kinds]) for name in names]
    return table(("backend, forward / backward", *kinds), rows)


def _both(cells: Sequence[Cell], name: str) -> str:
    """ms forward / backward, or the status; a dash for what did not run."""
    found = {cell.workload.direction: cell for cell in cells if cell.backend == name}
    shown = []
    for direction in DIRECTIONS:
        cell = found.get(direction)
        if cell is not None and cell.status == "time":
            shown.append(f"{cell.median:.3f}")
        else:
            shown.append("" if cell is None else SHORT.get(cell.status, cell.status))
    return " / ".join(each or "-" for each in shown) if any(shown) else ""


def failures(cells: Sequence[Cell]) -> str:
    """How many cells have which status, and each that is wrong, an error or out of memory."""
    counts = Counter(cell.status for cell in cells)
    lines = [f"{len(cells)} cells: " + ", ".join(f"{count} {status}" for status, count in counts.items()) + "."]
    bad = [cell for cell in cells if cell.status not in ("time", "unsupported")]
    if bad:
        lines += ["", table(("backend", "workload", "status"), [_failure(cell.backend, cell.workload, cell) for cell in bad])]
    return "\n".join(lines)


def _failure(name: str, workload: Workload, cell: Cell) -> tuple[str, str, str]:
    detail = " ".join(cell.detail.split())[:160].replace("|", "/")
    return name, workload.id, f"{cell.status}: {detail}"


def draw(results: Results) -> None:
    """docs/bench_*.png, a file a picture."""
    for title, figure in figures(results).items():
        figure.savefig(ROOT / "docs" / f"bench_{title.lower().replace(' ', '_')}.png", dpi=85)


if __name__ == "__main__":
    committed = Results.read(FILE)
    draw(committed)
    PAGE.write_text(page(committed), encoding="utf-8")
    write("bench.md", measured(committed))
    for name in SPEED_PAGES:
        between(ROOT / name, SPEED, speed(committed))
