"""Capabilities: a backend without a backward says so once, and refuses each gradient for that reason."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnzoo import AttentionSpec, BlockLayout, Capabilities

Q = torch.empty(1, 2, 8, 16)
PLAIN = AttentionSpec.of(Q, Q, Q, causal=True)


def test_without_a_backward_every_gradient_is_refused():
    claims = Capabilities(dtypes={torch.float32}, forward={"causal"}, gradients=False)
    assert claims.reasons_against(PLAIN) == []
    asked = dataclasses.replace(PLAIN, grads=("q", "v"))
    assert claims.reasons_against(asked) == ["a gradient of q, v is asked for, it has no backward"], "one reason, not one a feature"


def test_without_a_backward_no_feature_of_one_is_claimed():
    with pytest.raises(ValueError, match="gradients is False"):
        Capabilities(backward={"causal"}, gradients=False)


def test_multiples_are_part_of_the_claims():
    claims = Capabilities(dtypes={torch.float32}, head_dims=(64, 128), head_dim_multiple=32, forward={"layout"}, block_multiple=128)
    assert claims.reasons_against(AttentionSpec.of(*[torch.empty(1, 2, 8, 96)] * 3)) == []
    found = claims.reasons_against(AttentionSpec.of(*[torch.empty(1, 2, 8, 72)] * 3))
    assert found == ["head_dim is 72, it takes multiples of 32", "value_dim is 72, it takes multiples of 32"]
    blocks = BlockLayout.from_blocks(torch.ones(1, 1, dtype=torch.bool), block=(128, 64))
    q, k = torch.empty(1, 2, 128, 64), torch.empty(1, 2, 64, 64)
    assert claims.reasons_against(AttentionSpec.of(q, k, k, layout=blocks)) == [
        "the layout's blocks are 128 x 64, it takes multiples of 128"
    ]
    assert [claims.nearest_head_dim(dim) for dim in (1, 64, 65, 97, 300)] == [64, 64, 96, 128, 128]


@pytest.mark.parametrize(
    ("claimed", "error", "said"),
    [
        ({"head_dim_multiple": 0}, TypeError, "head_dim_multiple is 0; it takes an int, 1 or more"),
        ({"block_multiple": 1.5}, TypeError, "block_multiple is 1.5"),
        ({"head_dims": (60, 128), "head_dim_multiple": 32}, ValueError, "both are multiples of it"),
    ],
)
def test_multiples_are_whole_and_hold_for_the_claimed_head_dims(claimed, error, said):
    with pytest.raises(error, match=said):
        Capabilities(**claimed)
