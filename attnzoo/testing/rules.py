"""Who attends to whom, and what dropout keeps, from the arguments of a call: the oracle's own reading."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.layout import BlockLayout
from attnzoo.testing.inputs import Call
from attnzoo.testing.philox import kept

__all__ = ["allowed_pairs", "dropout_factor", "expanded_layout"]


def allowed_pairs(call: Call) -> Tensor:
    """Bool `(B, Hq, Sq, Skv)`: causal, window, mask, segments, layout and -inf in the bias, together."""
    batch, heads, q_len, _ = call.q.shape
    k_len, device, options = call.k.shape[2], call.q.device, call.options
    allowed = torch.ones(batch, heads, q_len, k_len, dtype=torch.bool, device=device)
    offset = k_len - q_len if options.get("align") == "bottom_right" else 0
    position = torch.arange(q_len, device=device).view(-1, 1) + offset
    key = torch.arange(k_len, device=device).view(1, -1)
    if options.get("causal"):
        allowed &= key <= position
    left, right = options.get("window") or (None, None)
    if left is not None:
        allowed &= key >= position - left
    if right is not None:
        allowed &= key <= position + right
    if "mask" in options:
        allowed &= options["mask"]
    if "bias" in options:
        allowed &= options["bias"].detach() != -torch.inf
    if "segment_ids" in options:
        ids = options["segment_ids"]
        q_ids, k_ids = ids if isinstance(ids, tuple) else (ids, ids)
        allowed &= (q_ids.unsqueeze(2) == k_ids.unsqueeze(1)).unsqueeze(1)
    if "layout" in options:
        allowed &= expanded_layout(options["layout"]).to(device)
    return allowed


def expanded_layout(layout: BlockLayout) -> Tensor:
    """The mask that a layout stands for, read block by block from its lists."""
    dense = torch.zeros(layout.batch, layout.heads, layout.q_len, layout.kv_len, dtype=torch.bool)
    rows = -(-layout.q_len // layout.block_q)
    place = 0
    for kind, lists in (("full", layout.full), ("partial", layout.partial)):
        offsets, indices = lists.offsets.tolist(), lists.indices.tolist()
        for line in range(len(offsets) - 1):
            head, row = divmod(line, rows)
            b, h = divmod(head, layout.heads)
            for column in indices[offsets[line] : offsets[line + 1]]:
                i = torch.arange(row * layout.block_q, min((row + 1) * layout.block_q, layout.q_len))
                j = torch.arange(column * layout.block_kv, min((column + 1) * layout.block_kv, layout.kv_len))
                block = torch.ones(len(i), len(j), dtype=torch.bool)
                if kind == "partial":
                    block = _ruled(layout, b, i, j, place)
                    place += 1
                dense[b, h, i[0] : i[-1] + 1, j[0] : j[-1] + 1] = block
    return dense


def _ruled(layout: BlockLayout, b: int, i: Tensor, j: Tensor, place: int) -> Tensor:
    """Which pairs of the partial block number `place` attend."""
    block = torch.ones(len(i), len(j), dtype=torch.bool)
    rule = layout.rule
    if rule.bits is not None:
        words = rule.bits[place].cpu().tolist()
        for row in range(len(i)):
            bits = [words[row][column // 32] >> (column % 32) & 1 for column in range(len(j))]
            block[row] = torch.tensor(bits, dtype=torch.bool)
    if rule.band is not None:
        left, right, diagonal = rule.band
        distance = j.view(1, -1) - i.view(-1, 1) - diagonal
        block &= (distance >= -left) if left is not None else True
        block &= (distance <= right) if right is not None else True
    if rule.segments is not None:
        q_ids, k_ids = (ids.cpu()[min(b, ids.shape[0] - 1)] for ids in rule.segments)
        block &= q_ids[i].view(-1, 1) == k_ids[j].view(1, -1)
    return block


def dropout_factor(call: Call) -> Tensor | None:
    """`(B, Hq, Sq, Skv)` float64: `1 / (1 - p)` where an element is kept, else 0; None without dropout."""
    p = call.options.get("dropout_p", 0.0)
    if not p:
        return None
    seed = call.options["dropout_seed"]
    seed = int(seed.item()) if isinstance(seed, Tensor) else seed
    batch, heads, q_len, _ = call.q.shape
    keep = torch.from_numpy(kept(seed, p, batch, heads, q_len, call.k.shape[2]))
    return keep.to(device=call.q.device, dtype=torch.float64) / (1 - float(p))
