"""What the scripts around `block_sparse_gpu.py` share: tensors, and the patterns that are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo import BlockLayout, layouts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = 16
BLOCK = 128
SHARES = (1, 2, 4, 8, 16, 32)


def qkv(length: int, dim: int, heads: int = HEADS, batch: int = 1) -> dict[str, Tensor]:
    """bf16 leaves `(batch, heads, length, dim)`, views of `(batch, length, heads, dim)`."""

    def made() -> Tensor:
        return torch.randn(batch, length, heads, dim, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    return {"q": made(), "k": made(), "v": made()}


def random_blocks(batch: int, heads: int, length: int, block: tuple[int, int], density: float = 0.4) -> BlockLayout:
    """On the CPU, with an empty row of blocks in the middle."""
    rows, columns = -(-length // block[0]), -(-length // block[1])
    table = torch.rand(batch, heads, rows, columns, generator=torch.Generator().manual_seed(5)) < density
    table[:, :, rows // 2] = False
    return BlockLayout.from_blocks(table, block=block, q_len=length, kv_len=length)


@dataclass(frozen=True, eq=False)
class Pattern:
    """A layout, and the rule of its partial blocks in the peers' terms: both None where all blocks are full.

    Attributes:
        left: tokens that a causal sliding window reaches back.
        ids: `(length,)` int32, which document each token is of.
    """

    layout: BlockLayout
    left: int | None = None
    ids: Tensor | None = None

    @property
    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
        """The rule as FlexAttention takes it."""
        left, ids = self.left, self.ids
        if left is not None:
            return lambda b, h, i, j: (i >= j) & (i - j <= left)
        if ids is not None:
            return lambda b, h, i, j: ids[i] == ids[j]
        return None


def document_ids(length: int) -> Tensor:
    """Thirteen documents or fewer, whose ends fall within blocks."""
    return torch.arange(length, device=DEVICE, dtype=torch.int32) // (length // 12 + 37)


FAMILIES: dict[str, dict[str, Callable[[int], Pattern]]] = {
    "blocks": {
        **{f"random 1/{n}": lambda S, n=n: Pattern(layouts.random(S, density=1 / n, block=BLOCK, device=DEVICE)) for n in SHARES},
        "butterfly": lambda S: Pattern(layouts.butterfly(S, block=BLOCK, device=DEVICE)),
        "bigbird": lambda S: Pattern(layouts.bigbird(S, block=BLOCK, device=DEVICE)),
    },
    "window": {"sliding_window": lambda S: Pattern(layouts.sliding_window(S, window=S // 16, block=BLOCK, device=DEVICE), left=S // 16)},
    "documents": {"documents": lambda S: Pattern(layouts.documents(ids := document_ids(S), block=BLOCK, device=DEVICE), ids=ids)},
}
"""Patterns by a function of the length. Those of a family share what the peers compile."""
