"""Combinations of layouts mean what the same combinations of their dense masks mean; pictures show them."""

from __future__ import annotations

import random

import pytest
import torch

from attnzoo import BlockLayout, layouts
from attnzoo.layouts.picture import block_states
from attnzoo.layouts.validation import validate


def drawn(rng: random.Random, q_len: int, kv_len: int, block: tuple[int, int]) -> BlockLayout:
    batch, heads = rng.choice([1, 2]), rng.choice([1, 3])
    mask = torch.rand(batch, heads, q_len, kv_len) > rng.choice([0.1, 0.5, 0.95])
    mask[..., : q_len // 2, :] = rng.random() < 0.5
    kinds = [
        lambda: BlockLayout.from_dense(mask, block=block),
        lambda: BlockLayout.from_blocks(mask[..., :: block[0], :: block[1]], block=block, q_len=q_len, kv_len=kv_len),
        lambda: layouts.causal(q_len, kv_len, block=block, align="bottom_right"),
    ]
    return rng.choice(kinds)()


def test_and_or_not_equal_those_of_the_masks():
    rng = random.Random(1)
    for _ in range(60):
        q_len, kv_len, block = rng.randint(1, 40), rng.randint(1, 40), (rng.choice([1, 5, 8, 50]), rng.choice([1, 5, 8, 50]))
        a, b = drawn(rng, q_len, kv_len, block), drawn(rng, q_len, kv_len, block)
        for made, mask in (
            (a & b, a.to_dense() & b.to_dense()),
            (a | b, a.to_dense() | b.to_dense()),
            (~a, ~a.to_dense()),
        ):
            validate(made)
            assert torch.equal(made.to_dense(), mask)


def test_no_batch_and_no_heads_are_kept():
    shared = layouts.causal(24, block=8)
    for shape in ((0, 1), (1, 0), (0, 3), (2, 0)):
        none = BlockLayout.from_blocks(torch.ones(*shape, 3, 3, dtype=torch.bool), block=8)
        for made in (none & shared, shared & none, none | shared, shared | none, ~none):
            validate(made)
            assert made.to_dense().shape == (*shape, 24, 24)
        assert str(none) == "(no blocks)"


def test_stack_heads_keeps_their_order():
    heads = [layouts.causal(40, block=8), layouts.butterfly(40, block=8), BlockLayout.from_dense(torch.rand(2, 1, 40, 40) > 0.5, block=8)]
    made = layouts.stack_heads(heads)
    validate(made)
    assert torch.equal(made.to_dense(), torch.cat([layout.to_dense().expand(2, 1, 40, 40) for layout in heads], dim=1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layouts.causal(8, block=4) & layouts.causal(16, block=4), "q_len"),
        (lambda: layouts.causal(8, block=4) | layouts.causal(8, block=2), "block_q"),
        (lambda: layouts.stack_heads([]), "layouts"),
        (lambda: layouts.stack_heads([layouts.stack_heads([layouts.causal(8, block=4)] * 2)]), "heads"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_other_type_is_refused():
    with pytest.raises(TypeError):
        layouts.causal(8, block=4) & torch.ones(8, 8, dtype=torch.bool)


def test_text():
    assert str(layouts.causal(24, block=8)) == "▒▒    \n██▒▒  \n████▒▒"
    large = str(layouts.sliding_window(65536, window=512, block=128))
    assert len(large.splitlines()) == 32
    assert "█" not in large  # each character stands for 16 x 16 blocks, of which a few exist


@pytest.mark.parametrize(("batch", "head", "message"), [(1, 0, "batch is 1"), (0, 2, "head is 2"), (0, -1, "head is -1")])
def test_a_picture_is_of_a_head_that_is_there(batch, head, message):
    layout = layouts.stack_heads([layouts.causal(24, block=8)] * 2)
    with pytest.raises(ValueError, match=message):
        block_states(layout, batch, head)
    assert block_states(layout, 0, 1)[2].tolist() == [1.0, 1.0, 0.5]


def test_show_draws_the_blocks():
    figure = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed (extra bench)").Figure()
    axes = layouts.causal(24, block=8).show(figure.subplots())
    image = axes.get_images()[0].get_array()
    assert image.tolist() == [[0.5, 0, 0], [1, 0.5, 0], [1, 1, 0.5]]
    assert axes.get_xlabel() == "key"
