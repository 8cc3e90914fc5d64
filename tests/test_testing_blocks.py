"""Every kind of seeded layout can be made at the sizes that a problem may have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnzoo.testing.blocks import LAYOUTS, block_layout
from attnzoo.testing.problem import Blocks, Problem


@pytest.mark.parametrize("dims", ["11", "bh"])
@pytest.mark.parametrize("lengths", [(0, 40), (40, 0), (0, 0), (40, 33)], ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_layout_of_every_kind_and_length(kind, lengths, dims):
    problem = replace(Problem(), batch=2, q_heads=2, kv_heads=1, q_len=lengths[0], kv_len=lengths[1])
    blocks = Blocks(kind, (16, 32), dims)
    first, second = [block_layout(problem, blocks, torch.Generator().manual_seed(0)) for _ in range(2)]
    assert (first.q_len, first.kv_len) == lengths
    assert (first.batch, first.heads) == ((1, 1) if dims == "11" else (2, 2))
    assert torch.equal(first.to_dense(), second.to_dense())
