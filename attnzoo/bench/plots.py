"""Results as pictures: speed and memory against length, time against density, and the roofline. Needs matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnzoo.bench.results import Cell, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["figures", "svg"]

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#7f3c8d",
    "#11a579",
    "#4b4b4b",
    "#a5aa99",
    "#b5651d",
    "#e73f74",
)
MARKERS = "osD^vP*Xh<>p"
ACROSS = {4: 2, 8: 4}
"""Axes side by side where there are so many; three else, so that pairs of a forward and a backward stay together."""
WIDEST = 58  # characters of a title

Looks = Mapping[str, dict[str, Any]]
"""Backend -> colour and marker, the same in every picture."""


def figures(results: Results) -> dict[str, Figure]:
    """Title -> figure, those for which there are cells."""
    timed = [cell for cell in results.cells if cell.status == "time"]
    names = list(dict.fromkeys(cell.backend for cell in results.cells))
    looks = {name: _look(place, len(names)) for place, name in enumerate(names)}
    dense = [cell for cell in timed if not cell.workload.layout]
    made = {
        "Speed against length": _grid(_many(dense, _length), looks, _speed),
        "Memory against length": _grid(_many([c for c in dense if c.peak], _length), looks, _memory),
        "Time against density": _grid(_many([c for c in timed if c.workload.layout], _density, _of_length), looks, _density_curve),
        "Roofline": _roofline(results, timed, looks),
    }
    return {title: figure for title, figure in made.items() if figure is not None}


def _look(place: int, count: int) -> dict[str, Any]:
    """The first is drawn first and largest, so that it shows around another on the same points."""
    share = 1 - place / count
    size = {"markersize": 5 + 3 * share, "linewidth": 1 + share}
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)], **size}


def svg(figure: Figure) -> str:
    """The `<svg>` element alone, fit for HTML; text stays text."""
    import matplotlib as mpl

    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "attnzoo"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _length(cell: Cell) -> float:
    return cell.workload.kv_length


def _density(cell: Cell) -> float:
    return cell.density


def _family(cell: Cell) -> str:
    return cell.workload.family


def _of_length(cell: Cell) -> str:
    return f"S {cell.workload.length}, {cell.workload.family}"


def _many(cells: Sequence[Cell], x: Callable[[Cell], float], family_of: Callable[[Cell], str] = _family) -> dict[str, list[Cell]]:
    """Families of cells that have at least two places on the x axis; one whose curves had several points at a place is split by size."""
    families: dict[str, list[Cell]] = {}
    for family, members in _grouped(cells, family_of).items():
        places = {(cell.backend, x(cell)) for cell in members}
        if len(places) == len(members):
            families[family] = members
        else:
            families |= {f"{family}, {size}": each for size, each in _grouped(members, _size_of(members)).items()}
    return {family: members for family, members in families.items() if len({x(cell) for cell in members}) > 1}


def _grouped(cells: Sequence[Cell], key: Callable[[Cell], str]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return groups


def _size_of(cells: Sequence[Cell]) -> Callable[[Cell], str]:
    """The sizes that differ among cells, of one in words; the length of q only where it is not that of k and v."""
    sizes = {"B": "batch", "H": "heads"} | ({"S": "length"} if any(c.workload.length != c.workload.kv_length for c in cells) else {})
    differing = {short: name for short, name in sizes.items() if len({getattr(c.workload, name) for c in cells}) > 1}
    return lambda cell: " ".join(f"{short} {getattr(cell.workload, name)}" for short, name in differing.items())


def _grid(families: Mapping[str, list[Cell]], looks: Looks, draw: Callable[[Axes, list[Cell], Looks], None]) -> Figure | None:
    """One axes a family, one legend for all; what all families share is said once, above them."""
    if not families:
        return None
    figure, grid = _many_axes(len(families), height=3.3)
    shared, titles = _titles(list(families))
    figure.suptitle(shared, fontsize=9)
    for axes, title, cells in zip(grid, titles, families.values()):
        draw(axes, cells, looks)
        axes.set_title(_wrapped(title), fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25, linewidth=0.6)
    _legend(figure, looks, {cell.backend for cells in families.values() for cell in cells})
    return figure


def _many_axes(count: int, *, height: float) -> tuple[Figure, Sequence[Axes]]:
    """In rows, each of them so many inches high."""
    from matplotlib.figure import Figure

    across = ACROSS.get(count, min(3, count))
    down = -(-count // across)
    figure = Figure(figsize=(max((4.6 if across < 4 else 3.6) * across, 6.0), height * down + 0.8), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for axes in grid[count:]:
        axes.remove()
    return figure, list(grid[:count])


def _titles(families: Sequence[str]) -> tuple[str, list[str]]:
    """The parts that all families share, and each without them; a family alone keeps its whole name on its axes."""
    parts = [family.split(", ") for family in families]
    shared = [part for part in parts[0] if len(families) > 1 and all(part in others for others in parts)]
    return ", ".join(shared), [", ".join(part for part in each if part not in shared) for each in parts]


def _legend(figure: Figure, looks: Looks, shown: set[str]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], label=name, **look) for name, look in looks.items() if name in shown]
    rows = -(-len(lines) // 6)
    figure.legend(handles=lines, loc="outside lower center", ncols=-(-len(lines) // rows), fontsize=8, frameon=False)


def _wrapped(family: str) -> str:
    """In lines that are no wider than the axes."""
    return "\n".join(textwrap.wrap(family, WIDEST))


def _curves(cells: Sequence[Cell], x: Callable[[Cell], float]) -> dict[str, list[Cell]]:
    curves: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=x):
        curves.setdefault(cell.backend, []).append(cell)
    return curves


def _speed(axes: Axes, cells: list[Cell], looks: Looks) -> None:
    for name, curve in _curves(cells, _length).items():
        axes.plot([_length(c) for c in curve], [c.tflops for c in curve], **looks[name])
    _lengths(axes, cells)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("useful TFLOP/s", fontsize=8)


def _memory(axes: Axes, cells: list[Cell], looks: Looks) -> None:
    for name, curve in _curves(cells, _length).items():
        axes.plot([_length(c) for c in curve], [(c.peak or 0) / 2**20 for c in curve], **looks[name])
    _lengths(axes, cells)
    peaks = [cell.peak or 0 for cell in cells]
    if max(peaks) > 16 * min(peaks):
        axes.set_yscale("log", base=2)
        _plain_numbers(axes.yaxis, base=2)
    else:
        axes.set_ylim(0, 1.08 * max(peaks) / 2**20)
    axes.set_ylabel("peak MiB beyond the inputs", fontsize=8)


def _density_curve(axes: Axes, cells: list[Cell], looks: Looks) -> None:
    for name, curve in _curves(cells, _density).items():
        densities = [_density(c) for c in curve]
        bars = [[c.median - min(c.rounds) for c in curve], [max(c.rounds) - c.median for c in curve]]
        axes.errorbar(densities, [c.median for c in curve], yerr=bars, capsize=2, **looks[name])
        ideal = [curve[-1].median * density / densities[-1] for density in densities]
        axes.plot(densities, ideal, color=looks[name]["color"], linestyle=":", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("share of blocks that exist (dotted: in proportion)", fontsize=8)
    axes.set_ylabel("ms", fontsize=8)


def _plain_numbers(axis: Axis, *, base: int) -> None:
    """On a log scale; between the powers of ten too."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(base=base, subs=(1.0, 2.0, 5.0) if base == 10 else (1.0,), numticks=12))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _lengths(axes: Axes, cells: Sequence[Cell]) -> None:
    places = sorted({_length(cell) for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{int(place)}" for place in places])
    axes.minorticks_off()
    axes.set_xlabel("length of k and v", fontsize=8)


def _roofline(results: Results, cells: Sequence[Cell], looks: Looks) -> Figure | None:
    """Useful FLOPs a second over useful FLOPs a compulsory byte, one axes a direction, under the measured ceilings."""
    ceilings = results.machine.get("ceilings", {})
    if not cells or "copy" not in ceilings:
        return None
    kinds = list(dict.fromkeys((cell.workload.direction, cell.workload.dtype) for cell in cells))
    figure, grid = _many_axes(len(kinds), height=3.6)
    for axes, (direction, dtype) in zip(grid, kinds):
        members = [cell for cell in cells if (cell.workload.direction, cell.workload.dtype) == (direction, dtype)]
        for name, curve in _curves(members, _intensity).items():
            axes.plot([_intensity(c) for c in curve], [c.tflops for c in curve], **{**looks[name], "linewidth": 0})
        reached = _ceiling(axes, members, ceilings["copy"] / 1e3, ceilings.get(dtype))
        axes.set_title(f"{direction}, {dtype}\n{reached}", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25, linewidth=0.6, which="both")
    _legend(figure, {name: {**look, "linewidth": 0} for name, look in looks.items()}, {cell.backend for cell in cells})
    return figure


def _intensity(cell: Cell) -> float:
    return cell.flops / cell.hbm_bytes


def _ceiling(axes: Axes, cells: Sequence[Cell], terabytes: float, tflops: float | None) -> str:
    """Draw the roof, and say in words what it is made of."""
    low, high = min(map(_intensity, cells)) / 2, max(map(_intensity, cells)) * 2
    corner = high if tflops is None else min(max(tflops / terabytes, low), high)
    places = [low, corner, high]
    roof = [min(terabytes * place, tflops if tflops is not None else float("inf")) for place in places]
    axes.plot(places, roof, color="#888888", linewidth=1.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        _plain_numbers(axis, base=10)
    axes.set_xlabel("useful FLOPs a compulsory byte", fontsize=8)
    axes.set_ylabel("useful TFLOP/s", fontsize=8)
    return f"copy {terabytes:.3g} TB/s" + ("" if tflops is None else f", matrix product {tflops:.3g} TFLOP/s")
