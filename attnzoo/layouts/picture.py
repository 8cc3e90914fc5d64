"""A layout as a picture: characters for the terminal, an image for matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnzoo.layout import BlockLayout

__all__ = ["block_states", "draw", "text"]

ABSENT, PARTIAL, FULL = 0.0, 0.5, 1.0
CHARACTERS = " ░▒▓█"  # share of pairs, from none to all
TEXT_ROWS = 32


def block_states(layout: BlockLayout, batch: int = 0, head: int = 0) -> Tensor:
    """`(rows, columns)` on the CPU: 0 absent, 0.5 partial, 1 full.

    Raises:
        ValueError: the layout has no such batch entry or head.
    """
    for name, place, count in (("batch", batch, layout.batch), ("head", head, layout.heads)):
        if not 0 <= place < count:
            raise ValueError(f"{name} is {place}; the layout has {count}, counted from 0")
    states = torch.zeros(layout.rows, layout.columns)
    first = (batch * layout.heads + head) * layout.rows
    for lists, value in zip(layout.host_lists, (FULL, PARTIAL)):
        offsets = lists.offsets[first : first + layout.rows + 1].long()
        row = torch.repeat_interleave(torch.arange(layout.rows), offsets.diff())
        states[row, lists.indices[offsets[0] : offsets[-1]].long()] = value
    return states


def text(layout: BlockLayout, batch: int = 0, head: int = 0) -> str:
    """At most 32 rows of characters; where blocks are many, a character stands for the mean of several."""
    if 0 in (layout.batch, layout.heads, layout.rows, layout.columns):
        return "(no blocks)"
    states = block_states(layout, batch, head)
    size = (min(states.shape[0], TEXT_ROWS), min(states.shape[1], TEXT_ROWS))
    shades = torch.nn.functional.adaptive_avg_pool2d(states[None], size)[0]
    levels = (shades * (len(CHARACTERS) - 1)).ceil().long().tolist()  # a lone block among many still shows
    return "\n".join("".join(CHARACTERS[level] * 2 for level in row) for row in levels)


def draw(layout: BlockLayout, axes: Any = None, *, batch: int = 0, head: int = 0) -> Any:
    """Draw one head's blocks into a matplotlib axes, a new one if none is given; returns it.

    Needs matplotlib (extra `bench`).
    """
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    if axes is None:
        _, axes = pyplot.subplots(figsize=(4, 4))
    extent = (0, layout.columns * layout.block_kv, layout.rows * layout.block_q, 0)
    colours = ListedColormap(["#f4f4f4", "#8fb8de", "#1f4e79"])
    axes.imshow(block_states(layout, batch, head).numpy(), cmap=colours, vmin=0, vmax=1, extent=extent, interpolation="nearest")
    axes.set_xlim(0, layout.kv_len)
    axes.set_ylim(layout.q_len, 0)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_title(f"density {layout.density:.3g}, blocks {layout.block_q} x {layout.block_kv}")
    return axes
