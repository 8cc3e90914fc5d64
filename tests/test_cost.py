"""The cost model: pairs against counting them, FLOPs against the formula, memory that does not lie about scores."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnzoo import AttentionSpec, BlockLayout
from attnzoo.cost import attended_pairs, predict
from attnzoo.traffic import of_standard

bounds = st.none() | st.integers(0, 12)
lengths = st.integers(0, 11)


def spec_of(q_len, kv_len, *, batch=2, heads=3, head_dim=4, value_dim=4, dtype=torch.float32, **options):
    q, k = (torch.empty(batch, heads, n, head_dim, dtype=dtype, device="meta") for n in (q_len, kv_len))
    v = torch.empty(batch, heads, kv_len, value_dim, dtype=dtype, device="meta")
    return AttentionSpec.of(q, k, v, **options)


@settings(max_examples=150, deadline=None)
@given(lengths, lengths, st.booleans(), st.sampled_from(["top_left", "bottom_right"]), st.tuples(bounds, bounds))
def test_pairs_are_counted_right(q_len, kv_len, causal, align, window):
    spec = spec_of(q_len, kv_len, causal=causal, align=align, window=window)
    expected = 2 * 3 * int(oracle.band(q_len, kv_len, causal, align, window).sum())
    assert attended_pairs(spec) == expected, f"{attended_pairs(spec)} pairs, counted {expected}"


@pytest.mark.parametrize("heads", [1, 3])
def test_pairs_of_a_layout_of_whole_blocks(heads):
    blocks = torch.rand(1, heads, 3, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    layout = BlockLayout.from_blocks(blocks, block=(4, 2))
    spec = spec_of(12, 8, layout=layout.to("meta"))
    expected = 2 * int(layout.to_dense().expand(1, 3, 12, 8).sum())
    assert attended_pairs(spec) == expected, f"{attended_pairs(spec)} pairs, the layout has {expected}"


def test_flops_of_the_matrix_products():
    spec = spec_of(8, 16, head_dim=32, value_dim=64)
    pairs = 2 * 3 * 8 * 16
    assert predict(spec, materializes_scores=False).flops == pairs * (2 * 32 + 2 * 64), "S = Q K^T and O = P V"
    trained = predict(replace(spec, grads=("q",)), materializes_scores=False).flops
    assert trained == pairs * (2 * 32 + 2 * 64) + pairs * (3 * 2 * 32 + 2 * 2 * 64), "S again, dQ, dK; dP, dV"


def test_compulsory_bytes():
    spec = spec_of(8, 16, head_dim=32, value_dim=64, dtype=torch.float16)
    expected = 2 * 6 * (8 * 32 + 16 * 32 + 16 * 64 + 8 * 64) + 4 * 6 * 8
    assert predict(spec, materializes_scores=False).hbm_bytes == expected, "q, k, v and o in fp16, the lse in fp32"


def test_compulsory_bytes_of_a_backward():
    spec = spec_of(8, 16, head_dim=32, value_dim=64, dtype=torch.float16)
    forward, both = (predict(replace(spec, grads=grads), materializes_scores=False).hbm_bytes for grads in ((), ("q", "k", "v")))
    read = 8 * 32 + 16 * 32 + 16 * 64 + 8 * 64 + 8 * 64  # q, k, v, o, dO
    written = 8 * 32 + 16 * 32 + 16 * 64  # dq, dk, dv
    assert both - forward == 2 * 6 * (read + written) + 4 * 6 * 8, "each once in fp16, and the lse in fp32"


@pytest.mark.parametrize("grads", [(), ("q", "k", "v")], ids=["forward", "backward"])
def test_standard_attention_moves_its_scores_as_often_as_its_steps_do(grads):
    """As `attnzoo io` counts them step by step, there in the dtype of q."""
    spec = replace(spec_of(64, 64), grads=grads)
    scores = 2 * 3 * 64 * 64 * 4
    passes = predict(spec, materializes_scores=True).hbm_bytes - predict(spec, materializes_scores=False).hbm_bytes
    by_steps = sum(round(amount / scores) for step in of_standard(spec).steps for amount in (step.read, step.written))
    assert passes == by_steps * scores, f"{passes / scores} passes, {by_steps} in the steps"


@pytest.mark.parametrize("grads", [(), ("q", "k", "v")], ids=["forward", "backward"])
def test_only_materialised_scores_grow_with_the_square(grads):
    def extra(length, materializes_scores):
        return predict(replace(spec_of(length, length), grads=grads), materializes_scores=materializes_scores).extra_bytes

    assert extra(2048, False) == 2 * extra(1024, False), "memory without scores is linear in the length"
    assert extra(2048, True) > 3.9 * extra(1024, True), "memory with scores is quadratic in the length"


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_nothing_costs_no_flops(sizes):
    assert predict(spec_of(*sizes, causal=True, align="top_left"), materializes_scores=True).flops == 0, f"{sizes} costs something"
