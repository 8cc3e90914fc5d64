"""attnzoo-flex: calls become the right mask_mod, score_mod and BlockMask; what FlexAttention can't do is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters

import attnzoo
from attnzoo import AttentionInputs, AttentionSpec, BlockLayout, UnsupportedError
from attnzoo.testing import Subject, run_case
from attnzoo.testing.cases import CASES

backend = pytest.importorskip("attnzoo_flex.backend", reason="attnzoo-flex is not installed: pip install -e plugins/attnzoo-flex")
blocks = pytest.importorskip("attnzoo_flex.blocks")

FORWARD = [case for case in CASES if not case.problem.grads]


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def spec(**changes):
    q = torch.empty(2, 4, 16, 32)
    return dataclasses.replace(AttentionSpec.of(q, q, q), **changes)


def on_cuda(**changes):
    return spec(**{"device": torch.device("cuda"), "dtype": torch.bfloat16, **changes})


@pytest.mark.parametrize("case", FORWARD[:: max(len(FORWARD) // 30, 1)], ids=lambda case: case.id)
def test_a_sample_of_the_conformance_kit(case):
    run_case(Subject("flex_eager"), case, "cpu")


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "align": "bottom_right"},
        {"window": (40, 3), "align": "top_left"},
        {"mask": torch.rand(300, 420, generator=torch.Generator().manual_seed(0)) < 0.3},
        {"mask": torch.arange(420).view(1, 1, 1, 420) % 3 != 1, "causal": True, "align": "top_left"},
        {"bias": torch.arange(420).mul(-0.01).view(1, 1, 1, 420), "softcap": 2.0},
        {"segment_ids": (torch.arange(300).div(70).long().expand(2, 300), torch.arange(420).div(70).long().expand(2, 420))},
        {"layout": attnzoo.layouts.random(300, 420, density=0.4, block=(64, 32))},
        {"layout": attnzoo.layouts.sliding_window(300, 420, window=100, block=64, align="bottom_right")},
        {"layout": attnzoo.layouts.random(300, 420, density=0.4, block=64), "window": (150, 10), "align": "bottom_right"},
        {"return_lse": True, "causal": True, "align": "bottom_right"},
    ],
    ids=lambda options: "-".join(options),
)
def test_each_rule_means_the_same(options):
    q, k, v = randn(2, 4, 300, 16), randn(2, 2, 420, 16), randn(2, 2, 420, 24)
    found = attnzoo.attention(q, k, v, backend="flex_eager", **options)
    truth = attnzoo.attention(q, k, v, backend="naive", **options)
    for one, other in zip(*((result if isinstance(result, tuple) else (result,)) for result in (found, truth))):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


def test_the_compiled_kernel_gives_the_same_and_is_compiled_once():
    q, k = randn(1, 4, 200, 32), randn(1, 2, 200, 32)
    layout = attnzoo.layouts.random(200, density=0.5, block=64)
    truth = attnzoo.attention(q, k, k, layout=layout, window=(90, 0), backend="naive")
    torch.testing.assert_close(attnzoo.attention(q, k, k, layout=layout, window=(90, 0), backend="flex"), truth, atol=2e-6, rtol=1e-5)
    before = counters["stats"]["unique_graphs"]
    other = attnzoo.layouts.random(200, density=0.3, block=64, seed=1)
    truth = attnzoo.attention(q, k, k, layout=other, window=(90, 0), backend="naive")
    found = attnzoo.attention(q, k, k, layout=other, window=(90, 0), backend="flex")
    torch.testing.assert_close(found, truth, atol=2e-6, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] - before <= 1, "another layout of the same kind compiles again and again"


def test_a_layout_of_full_blocks_alone_brings_no_rule_into_the_compiled_kernel():
    """A lookup that no block needs is compiled in all the same: it costs time, and on a card shared memory that there isn't."""
    from torch.nn.attention.flex_attention import noop_mask

    q = randn(1, 2, 200, 32)
    full = attnzoo.layouts.random(200, density=0.5, block=64)
    cut = attnzoo.layouts.sliding_window(200, window=90, block=64)
    made = {}
    for name, layout, options in (("full", full, {}), ("full, causal", full, {"causal": True}), ("cut", cut, {})):
        asked = AttentionSpec.of(q, q, q, layout=layout, **options)
        inputs = AttentionInputs.of(asked, q, q, q, layout=layout)
        made[name] = blocks.block_mask(asked, inputs)
        assert (made[name].mask_mod is noop_mask) == (name == "full"), name
        assert blocks.block_mask(asked, inputs, skips=False).mask_mod is not noop_mask, name
    truth = attnzoo.attention(q, q, q, layout=full, backend="naive")
    torch.testing.assert_close(attnzoo.attention(q, q, q, layout=full, backend="flex"), truth, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(attnzoo.attention(q, q, q, layout=full, backend="flex_eager"), truth, atol=2e-6, rtol=1e-5)


def test_the_tables_of_a_layout_are_made_once(monkeypatch):
    mods = pytest.importorskip("attnzoo_flex.mods")
    made = []
    monkeypatch.setattr(mods, "mask_mod_of", lambda layout, make=mods.mask_mod_of: made.append(layout) or make(layout))
    q, layout = randn(1, 2, 200, 32), attnzoo.layouts.sliding_window(200, window=90, block=64)
    for _ in range(2):
        attnzoo.attention(q, q, q, layout=layout, backend="flex_eager")
    assert len(made) == 1


def test_no_recompilation_limit_is_met():
    for length in range(20, 20 + 2 * torch._dynamo.config.recompile_limit):
        q = randn(1, 1, length, 8)
        torch.testing.assert_close(
            attnzoo.attention(q, q, q, causal=True, backend="flex_eager"), attnzoo.attention(q, q, q, causal=True, backend="naive")
        )


def test_blocks_outside_the_band_are_skipped():
    q = torch.empty(1, 1, 1024, 16)
    asked = AttentionSpec.of(q, q, q, window=(128, 0))
    made = blocks.block_mask(asked, AttentionInputs.of(asked, q, q, q))
    listed = int(made.kv_num_blocks.sum() + made.full_kv_num_blocks.sum())
    assert listed == 8 + 7, f"{listed} blocks of 128 x 128 are listed; the window meets 15"
    assert blocks.block_mask(spec(), AttentionInputs.of(spec(), *randn(3, 2, 4, 16, 32))) is None, "every pair attends"


def table(counts, indices, columns):
    """The blocks that lists stand for, `(rows, columns)`."""
    listed = torch.arange(columns) < counts[0, 0, :, None]
    return torch.zeros(counts.shape[2], columns, dtype=torch.bool).scatter_(1, indices[0, 0, :, :columns].long(), listed)


@pytest.mark.parametrize("lengths", [(300, 300), (300, 1000), (1000, 300), (1, 700), (128, 256), (129, 257)])
@pytest.mark.parametrize("band", [(None, 0), (128, 0), (0, 0), (40, None), (None, 300), (127, 127), (5000, 5000)])
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_the_blocks_of_a_band_are_those_of_its_layout(lengths, band, align):
    q, k = torch.empty(1, 1, lengths[0], 16), torch.empty(1, 1, lengths[1], 16)
    asked = AttentionSpec.of(q, k, k, window=band, align=align)
    made = blocks.block_mask(asked, AttentionInputs.of(asked, q, k, k))
    layout = attnzoo.layouts.sliding_window(*lengths, window=band, block=128, align=align)
    for lists, counts, indices in (
        (layout.partial, made.kv_num_blocks, made.kv_indices),
        (layout.full, made.full_kv_num_blocks, made.full_kv_indices),
    ):
        expected = torch.zeros(layout.rows, layout.columns, dtype=torch.bool)
        expected[lists.row_of_each(), lists.indices.long()] = True
        assert torch.equal(table(counts, indices, layout.columns), expected)


@pytest.mark.parametrize(
    "options", [{}, {"window": (200, 0)}, {"mask": torch.arange(300)[None] % 5 != 1}], ids=["causal", "window", "mask"]
)
def test_a_band_compiles_in_one_graph(options):
    """Its lists of blocks are made by what Dynamo can follow, also where it takes the lengths as symbols."""

    def call(q):
        return attnzoo.attention(q, q, q, backend="flex_eager", **{"causal": True, **options})

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for length in (300,) if "mask" in options else (300, 140, 400):
        q = randn(2, 2, length, 16)
        torch.testing.assert_close(compiled(q), call(q), atol=1e-6, rtol=1e-5)


def test_what_reaches_beyond_int32_is_copied():
    far = torch.empty_strided((1, 1, 3, 8), (2**33, 2**33, 2**30, 1), device="meta")
    assert backend.near(far).stride() == (24, 24, 8, 1), "FlexAttention's kernels count in int32, and would read elsewhere"
    assert backend.near(far[:, :, :2]).stride(2) == 2**30, "what it can count is not copied"


def test_a_layout_is_converted_once():
    layout = BlockLayout.from_blocks(torch.eye(2, dtype=torch.bool), block=64)
    q = randn(1, 1, 128, 16)
    asked = AttentionSpec.of(q, q, q, layout=layout)
    first, second = (blocks.block_mask(asked, AttentionInputs.of(asked, q, q, q, layout=layout)) for _ in range(2))
    assert first.kv_indices.data_ptr() == second.kv_indices.data_ptr(), "the lists are made anew in each call"


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        (spec(grads=("q",)), "it has no backward"),
        (spec(return_lse=True), "lse (return_lse"),
        (spec(dtype=torch.float64), "dtype is float64"),
        (spec(sinks_dtype=torch.float32), "sinks"),
        (spec(dropout_p=0.1), "dropout"),
        (on_cuda(bias=(1, 1, 16, 16), bias_dtype=torch.bfloat16, grads=("q", "bias")), "bias_grad"),
        (on_cuda(bias=(1, 1, 16, 16), bias_dtype=torch.bfloat16, return_lse=True), "base 2"),
        (on_cuda(head_dim=8), "head_dim is 8, it takes 64 to 128"),
        (on_cuda(), "torch sees no CUDA device here"),
    ],
)
def test_what_it_can_not_do_is_refused(monkeypatch, asked, part):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = attnzoo.get("flex").unsupported_reasons(asked)
    assert any(part in reason for reason in found), found


def test_small_blocks_are_refused_on_cuda():
    layout = BlockLayout.from_blocks(torch.ones(1, 1, dtype=torch.bool), block=16).summary
    found = attnzoo.get("flex").unsupported_reasons(on_cuda(layout=layout))
    assert any("multiples of 128" in reason for reason in found), found
    assert not attnzoo.get("flex").unsupported_reasons(spec(layout=layout)), "the CPU's kernel takes any block"


def test_the_eager_reference_has_no_backward():
    q = randn(1, 1, 4, 8).requires_grad_()
    with pytest.raises(UnsupportedError, match="it has no backward"):
        attnzoo.attention(q, q, q, backend="flex_eager")


@pytest.mark.parametrize("options", [{"causal": True}, {"layout": True}, {"layout": True, "window": (9, 0)}], ids=",".join)
def test_what_is_kept_of_a_call_in_inference_mode_serves_training(options):
    """Tensors made in that mode can't be saved for a backward: an evaluation would break the training step after it."""
    q = randn(1, 1, 261, 16)
    if "layout" in options:
        options = {**options, "layout": attnzoo.layouts.random(261, density=0.6, block=64, seed=3)}
    with torch.inference_mode():
        attnzoo.attention(q, q, q, backend="flex_eager", **options)
    asked = AttentionSpec.of(q, q, q, **options)
    made = blocks.block_mask(asked, AttentionInputs.of(asked, q, q, q, layout=options.get("layout")))
    lists = [made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.q_indices]
    assert not any(tensor.is_inference() for tensor in lists if tensor is not None)


def test_a_call_under_a_fake_mode_leaves_nothing_behind():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(1, 1, 263, 16)
        attnzoo.attention(q, q, q, causal=True, backend="flex_eager")
    q = randn(1, 1, 263, 16)
    truth = attnzoo.attention(q, q, q, causal=True, backend="naive")
    torch.testing.assert_close(attnzoo.attention(q, q, q, causal=True, backend="flex_eager"), truth, atol=2e-6, rtol=1e-5)
