"""A layout as a picture: characters for the terminal, an image for matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnzoo.layout import BlockLayout

__all__ = ["draw", "shades", "text"]

PARTIAL, FULL = 0.5, 1.0  # an absent block is 0
CHARACTERS = " ░▒▓█"  # share of pairs, from none to all
TEXT_ROWS = 32
DRAWN_ROWS = 2048


def shades(layout: BlockLayout, batch: int = 0, head: int = 0, *, most: int) -> Tensor:
    """One head's blocks on the CPU, absent 0, partial 0.5, full 1: `(rows, columns)`, where they are more than `most`
    the means over neighbours. Memory is that of the blocks that exist, not of the table.

    Raises:
        ValueError: the layout has no such batch entry or head.
    """
    layout.check_unmodified()
    for name, place, count in (("batch", batch, layout.batch), ("head", head, layout.heads)):
        if not 0 <= place < count:
            raise ValueError(f"{name} is {place}; the layout has {count}, counted from 0")
    size = (min(layout.rows, most), min(layout.columns, most))
    cell_of_row, cell_of_column = [
        torch.arange(count, device="cpu") * cells // count for count, cells in zip((layout.rows, layout.columns), size)
    ]
    total = torch.zeros(size[0] * size[1], dtype=torch.float64, device="cpu")
    first = (batch * layout.heads + head) * layout.rows
    for lists, value in zip(layout.host_lists, (FULL, PARTIAL)):
        offsets = lists.offsets[first : first + layout.rows + 1].long()
        row_cells = torch.repeat_interleave(cell_of_row, offsets.diff())
        cells = row_cells * size[1] + cell_of_column[lists.indices[offsets[0] : offsets[-1]].long()]
        total += value * torch.bincount(cells, minlength=len(total))
    rows, columns = [torch.bincount(cells, minlength=count) for cells, count in zip((cell_of_row, cell_of_column), size)]
    return total.view(size) / (rows[:, None] * columns)


def text(layout: BlockLayout, batch: int = 0, head: int = 0) -> str:
    """At most 32 rows of characters; where blocks are many, a character stands for the mean of several."""
    if 0 in (layout.batch, layout.heads, layout.rows, layout.columns):
        return "(no blocks)"
    table = shades(layout, batch, head, most=TEXT_ROWS)
    levels = (table * (len(CHARACTERS) - 1)).ceil().long().tolist()  # a lone block among many still shows
    return "\n".join("".join(CHARACTERS[level] * 2 for level in row) for row in levels)


def draw(layout: BlockLayout, axes: Any = None, *, batch: int = 0, head: int = 0) -> Any:
    """Draw one head's blocks into a matplotlib axes, a new one if none is given; returns it.

    Needs matplotlib (extra `bench`).
    """
    from matplotlib import pyplot
    from matplotlib.colors import LinearSegmentedColormap

    if axes is None:
        _, axes = pyplot.subplots(figsize=(4, 4))
    extent = (0, layout.columns * layout.block_kv, layout.rows * layout.block_q, 0)
    colours = LinearSegmentedColormap.from_list("blocks", ["#f4f4f4", "#8fb8de", "#1f4e79"])
    axes.imshow(shades(layout, batch, head, most=DRAWN_ROWS).numpy(), cmap=colours, vmin=0, vmax=1, extent=extent, interpolation="nearest")
    axes.set_xlim(0, layout.kv_len)
    axes.set_ylim(layout.q_len, 0)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_title(f"density {layout.density:.3g}, blocks {layout.block_q} x {layout.block_kv}")
    return axes
