"""keep_mask: the one definition of who attends to whom, for a tile of the score matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

__all__ = ["band_mask", "keep_mask", "tile_of"]


def tile_of(table: Tensor, rows: slice, columns: slice | Tensor) -> Tensor:
    """The `(rows, columns)` part of a table whose dims are 1 or full."""
    if table.shape[-2] != 1:
        table = table[..., rows, :]
    return table if table.shape[-1] == 1 else table[..., columns]


def band_mask(spec: AttentionSpec, rows: slice, columns: slice | Tensor, device: torch.device) -> Tensor | None:
    """`(rows, columns)` bool of causal and window together; None where neither is given."""
    left, right = spec.band
    if left is None and right is None:
        return None
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    j = columns if isinstance(columns, Tensor) else torch.arange(columns.start, columns.stop, device=device)
    distance = j[None, :] - i - spec.diagonal
    kept = None if left is None else distance >= -left
    if right is None:
        return kept
    return distance <= right if kept is None else kept & (distance <= right)


def keep_mask(spec: AttentionSpec, inputs: AttentionInputs, rows: slice, columns: slice | Tensor) -> Tensor | None:
    """Which pairs of the tile attend, by causal, window, mask and segments; a layout and -inf in the bias
    are the caller's to add.

    Args:
        rows, columns: the tile's queries and keys, with start and stop given; keys may also be int64 indices.

    Returns:
        Bool, broadcastable to `(B, Hq, rows, columns)`, or None where every pair attends.
    """
    kept = band_mask(spec, rows, columns, inputs.q.device)
    if inputs.mask is not None:
        mask = tile_of(inputs.mask, rows, columns)
        kept = mask if kept is None else kept & mask
    if inputs.q_segment_ids is not None and inputs.kv_segment_ids is not None:
        same = inputs.q_segment_ids[:, None, rows, None] == inputs.kv_segment_ids[:, None, None, columns]
        kept = same if kept is None else kept & same
    return kept
