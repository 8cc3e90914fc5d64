"""Capabilities: a backend without a backward says so once, and refuses each gradient for that reason."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnzoo import AttentionSpec, Capabilities

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
