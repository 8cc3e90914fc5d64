"""Combinations of layouts mean what the same combinations of their dense masks mean; pictures show them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnzoo import BlockLayout, layouts
from attnzoo.layout import ElementRule
from attnzoo.layouts import build
from attnzoo.layouts.convert import to_bsr
from attnzoo.layouts.picture import shades
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


def test_a_stack_with_no_batch_has_none():
    none = BlockLayout.from_blocks(torch.ones(0, 1, 3, 3, dtype=torch.bool), block=8)
    assert layouts.stack_heads([none, layouts.causal(24, block=8)]).to_dense().shape == (0, 2, 24, 24)


def test_what_is_made_has_the_blocks_that_its_pairs_need():
    """Whole blocks are full and empty ones absent, whatever the pairs beyond the ends say."""
    left = BlockLayout.from_dense(torch.arange(20).expand(20, 20) % 8 < 4, block=8)
    whole = left | ~left
    assert (len(whole.full.indices), len(whole.partial.indices)) == (9, 0)
    assert (left & ~left).density == 0.0
    every_bit = torch.full((9, 8, 1), -1, dtype=torch.int32)
    partial = replace(whole, full=whole.partial, partial=whole.full, rule=ElementRule(bits=every_bit))
    assert (~partial).density == 0.0, "a block was made of pairs past the ends"


def test_many_partial_blocks_are_combined_some_at_a_time(monkeypatch):
    """Of each pair a few numbers are computed: for all blocks at once they would take gigabytes."""
    asked, partial_blocks = [], build.partial_blocks
    monkeypatch.setattr(build, "partial_blocks", lambda layout, *which: asked.extend(which) or partial_blocks(layout, *which))
    monkeypatch.setitem(build.ELEMENTS_AT_ONCE, "cpu", 3 * 64)
    documents = layouts.documents([30, 21, 49], block=8)
    rest = ~documents
    assert len(asked) == -(-len(documents.partial.indices) // 3)
    assert torch.equal(rest.to_dense(), ~documents.to_dense())
    prefix = layouts.prefix_lm(100, prefix=50, block=8).to_dense()[0, 0]
    i, j = torch.arange(100)[:, None], torch.arange(100)
    assert torch.equal(prefix, (j < 50) | (j <= i))


@pytest.mark.parametrize("place", range(5))
def test_a_layout_that_was_written_to_is_not_combined(place):
    layout, other = layouts.causal(24, block=8) & layouts.butterfly(24, block=8), layouts.causal(24, block=8)
    layout.tensors()[place].add_(1)
    uses = {
        "&": lambda: other & layout,
        "|": lambda: layout | other,
        "~": lambda: ~layout,
        "stack_heads": lambda: layouts.stack_heads([other, layout]),
        "str": lambda: str(layout),
        "to_bsr": lambda: to_bsr(layout),
    }
    for name, use in uses.items():
        with pytest.raises(ValueError, match=r"layout.*written in place"):
            raise AssertionError(f"{name} took a tampered layout: {use()}")


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
        (lambda: layouts.stack_heads([BlockLayout.from_dense(torch.ones(n, 1, 8, 8).bool()) for n in (1, 2, 3)]), "batch is 2 .* and 3"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_other_type_is_refused():
    with pytest.raises(TypeError):
        layouts.causal(8, block=4) & torch.ones(8, 8, dtype=torch.bool)
    with pytest.raises(TypeError, match="layouts is a BlockLayout"):
        layouts.stack_heads(layouts.causal(8, block=4))
    with pytest.raises(TypeError, match=r"layouts\[1\] is a int"):
        layouts.stack_heads([layouts.causal(8, block=4), 3])


def test_text():
    assert str(layouts.causal(24, block=8)) == "▒▒    \n██▒▒  \n████▒▒"
    large = str(layouts.sliding_window(65536, window=512, block=128))
    assert len(large.splitlines()) == 32
    assert "█" not in large  # each character stands for 16 x 16 blocks, of which a few exist


def test_a_picture_costs_what_the_layout_holds():
    """A number for each of 2^36 blocks would take 256 GB."""
    long = layouts.sliding_window(2**22, window=64, block=16)
    assert [len(line.strip()) for line in str(long).splitlines()] == [2] + [4] * 31
    table = shades(long, most=1000)
    assert table.shape == (1000, 1000)
    assert table.sum() > 0


def test_cells_of_a_picture_are_means():
    layout = BlockLayout.from_blocks(torch.rand(70, 37, generator=torch.Generator().manual_seed(0)) < 0.3, block=8)
    parts = [(torch.arange(count) * 32 // count == cell) for count in (70, 37) for cell in range(32)]
    table = layout.to_dense()[0, 0, ::8, ::8].double()
    means = [[table[parts[row]][:, parts[32 + column]].mean().item() for column in range(32)] for row in range(32)]
    assert (shades(layout, most=32) - torch.tensor(means)).abs().max() < 1e-6


@pytest.mark.parametrize(("batch", "head", "message"), [(1, 0, "batch is 1"), (0, 2, "head is 2"), (0, -1, "head is -1")])
def test_a_picture_is_of_a_head_that_is_there(batch, head, message):
    layout = layouts.stack_heads([layouts.causal(24, block=8)] * 2)
    with pytest.raises(ValueError, match=message):
        shades(layout, batch, head, most=32)
    assert shades(layout, 0, 1, most=32)[2].tolist() == [1.0, 1.0, 0.5]


def test_show_draws_the_blocks():
    figure = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed (extra bench)").Figure()
    axes = layouts.causal(24, block=8).show(figure.subplots())
    image = axes.get_images()[0].get_array()
    assert image.tolist() == [[0.5, 0, 0], [1, 0.5, 0], [1, 1, 0.5]]
    assert axes.get_xlabel() == "key"
