"""BlockLayout: malformed ones are refused by field, sound ones round-trip, and none can be changed unseen."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnzoo
from attnzoo import BlockLayout, layouts
from attnzoo.layout import BlockLists, ElementRule


def ints(*values, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


def lists(offsets=(0, 2, 3), indices=(0, 2, 1)):
    return BlockLists(*(part if isinstance(part, torch.Tensor) else ints(*part) for part in (offsets, indices)))


def parts(**changes):
    """5 x 9 tokens in 3 x 3 blocks: 2 block rows, 3 block columns; two full blocks above, one partial below."""
    sound = {
        "q_len": 5,
        "kv_len": 9,
        "block_q": 3,
        "block_kv": 3,
        "full": lists((0, 2, 2), (0, 2)),
        "partial": lists((0, 0, 1), (1,)),
        "rule": ElementRule(band=(None, 0, 1)),
    }
    return sound | changes


def bits(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def segments(*shapes, dtype=torch.int32):
    return tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)


# id: (error, words of the message, what is changed in a sound layout)
MALFORMED = {
    "q-len-float": (TypeError, "q_len is 5.0; float; int", {"q_len": 5.0}),
    "kv-len-negative": (ValueError, "kv_len is -1; at least 0", {"kv_len": -1}),
    "batch-bool": (TypeError, "batch is True; bool; int", {"batch": True}),
    "heads-negative": (ValueError, "heads is -2; at least 0", {"heads": -2}),
    "block-q-zero": (ValueError, "block_q is 0; at least 1", {"block_q": 0}),
    "block-kv-none": (TypeError, "block_kv is None; int", {"block_kv": None}),
    "full-tuple": (TypeError, "full is a tuple; BlockLists", {"full": (ints(0, 0, 0), ints())}),
    "partial-none": (TypeError, "partial is a NoneType; BlockLists", {"partial": None}),
    "offsets-list": (TypeError, "full.offsets is a list; tensor", {"full": BlockLists([0, 2, 2], ints(0, 2))}),
    "offsets-int64": (TypeError, "full.offsets has dtype torch.int64; int32", {"full": lists(ints(0, 2, 2, dtype=torch.int64), (0, 2))}),
    "indices-float": (TypeError, "full.indices has dtype torch.float32; int32", {"full": lists((0, 2, 2), torch.zeros(2))}),
    "offsets-2-dims": (ValueError, "full.offsets has shape (1, 3); one dim", {"full": lists(ints(0, 2, 2)[None], (0, 2))}),
    "indices-0-dims": (ValueError, "full.indices has shape (); one dim", {"full": lists((0, 0, 1), torch.tensor(1, dtype=torch.int32))}),
    "indices-sparse": (TypeError, "full.indices; sparse; strided", {"full": lambda: lists((0, 2, 2), ints(0, 2).to_sparse())}),
    "offsets-short": (ValueError, "full.offsets has 2 entries; need 3", {"full": lists((0, 2), (0, 2))}),
    "offsets-long": (ValueError, "partial.offsets has 4 entries; need 3", {"partial": lists((0, 0, 1, 1), (1,))}),
    "offsets-of-one-batch": (ValueError, "full.offsets has 3 entries; batch 2; need 5", {"batch": 2}),
    "offsets-start": (ValueError, "full.offsets runs from 1 to 2; from 0 to the 2", {"full": lists((1, 2, 2), (0, 2))}),
    "offsets-end-early": (ValueError, "full.offsets runs from 0 to 1; the 2 entries", {"full": lists((0, 1, 1), (0, 2))}),
    "offsets-end-late": (ValueError, "partial.offsets runs from 0 to 2; the 1 entries", {"partial": lists((0, 0, 2), (1,))}),
    "offsets-decrease": (ValueError, "full.offsets decreases at row 1", {"full": lists((0, 3, 2), (0, 2))}),
    "offsets-beyond-and-back": (ValueError, "full.offsets decreases at row 1", {"full": lists((0, 9, 2), (0, 2))}),
    "offsets-around-the-range": (  # the differences of int32 are all positive
        ValueError,
        "full.offsets decreases at row 1",
        {"q_len": 11, "full": lists((0, 2**31 - 1, -(2**31), -1, 2), (0, 2)), "partial": lists((0, 0, 1, 1, 1), (1,))},
    ),
    "index-negative": (ValueError, "full.indices holds -1; 0 to 2", {"full": lists((0, 2, 2), (-1, 2))}),
    "index-beyond": (ValueError, "full.indices holds 3; 0 to 2", {"full": lists((0, 2, 2), (0, 3))}),
    "index-in-an-empty-matrix": (ValueError, "full.indices holds 2; no block column", {"kv_len": 0}),
    "index-repeats": (ValueError, "full.indices repeats; entry 1; ascend", {"full": lists((0, 2, 2), (2, 2))}),
    "index-out-of-order": (ValueError, "full.indices is out of order; entry 1; ascend", {"full": lists((0, 2, 2), (2, 0))}),
    "full-and-partial": (ValueError, "partial.indices; block column 2 of row 0; full or partial", {"partial": lists((0, 1, 1), (2,))}),
    "lists-device": (ValueError, "full.indices is on meta; cpu", {"full": lists((0, 2, 2), ints(0, 2, device="meta"))}),
    "partial-device": (
        ValueError,
        "partial; meta; cpu",
        {"partial": lists(ints(0, 0, 1, device="meta"), ints(1, device="meta"))},
    ),
    "all-meta": (
        ValueError,
        "full.offsets is on meta; no data",
        {name: lists(ints(0, 0, 0, device="meta"), ints(device="meta")) for name in ("full", "partial")},
    ),
    "rule-none": (TypeError, "rule is a NoneType; ElementRule", {"rule": None}),
    "rule-empty": (ValueError, "rule is empty; band, segments or bits", {"rule": ElementRule()}),
    "band-list": (TypeError, "rule.band is [None; (left, right, diagonal)", {"rule": ElementRule(band=[None, 0, 0])}),
    "band-pair": (TypeError, "rule.band is (0, 0); (left, right, diagonal)", {"rule": ElementRule(band=(0, 0))}),
    "band-negative": (ValueError, "rule.band left is -1; at least 0", {"rule": ElementRule(band=(-1, 0, 0))}),
    "band-float": (TypeError, "rule.band right is 1.5; int", {"rule": ElementRule(band=(None, 1.5, 0))}),
    "band-huge": (ValueError, "rule.band left; at most", {"rule": ElementRule(band=(2**70, 0, 0))}),
    "band-diagonal-none": (TypeError, "rule.band diagonal is None; int", {"rule": ElementRule(band=(0, 0, None))}),
    "band-diagonal-huge": (ValueError, "rule.band diagonal; at least", {"rule": ElementRule(band=(0, 0, -(2**70)))}),
    "segments-tensor": (TypeError, "rule.segments; pair", {"rule": ElementRule(segments=torch.zeros(1, 5))}),
    "segments-float": (
        TypeError,
        "rule.segments of the queries; torch.float32",
        {"rule": ElementRule(segments=segments((1, 5), (1, 9), dtype=torch.float32))},
    ),
    "segments-uint64": (
        TypeError,
        "rule.segments of the queries; uint64",
        {"rule": ElementRule(segments=segments((1, 5), (1, 9), dtype=torch.uint64))},
    ),
    "segments-length": (
        ValueError,
        "rule.segments of the keys has shape (1, 5); (1, 9)",
        {"rule": ElementRule(segments=segments((1, 5), (1, 5)))},
    ),
    "segments-batch": (
        ValueError,
        "rule.segments of the queries has shape (2, 5); (1, 5)",
        {"rule": ElementRule(segments=segments((2, 5), (2, 9)))},
    ),
    "bits-bool": (TypeError, "rule.bits; torch.bool; int32", {"rule": ElementRule(bits=bits(1, 3, 1, dtype=torch.bool))}),
    "bits-blocks": (ValueError, "rule.bits has shape (2, 3, 1); (1, 3, 1)", {"rule": ElementRule(bits=bits(2, 3, 1))}),
    "bits-words": (ValueError, "rule.bits has shape (1, 3, 3); (1, 3, 1)", {"rule": ElementRule(bits=bits(1, 3, 3))}),
    "bits-device": (ValueError, "rule.bits is on meta; cpu", {"rule": ElementRule(bits=bits(1, 3, 1).to("meta"))}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_layout_names_the_field(name):
    error, words, changes = MALFORMED[name]
    changes = {field: value() if callable(value) else value for field, value in changes.items()}
    with pytest.raises(error) as caught:
        BlockLayout(**parts(**changes))
    missing = [word for word in words.split("; ") if word not in str(caught.value)]
    assert not missing, f"{name}: the message {caught.value!s} lacks {missing}"
    assert type(caught.value) is error, f"{name}: raised {type(caught.value).__name__}, not {error.__name__}"


MAKERS = {
    "blocks-list": (TypeError, "blocks is a list", lambda: BlockLayout.from_blocks([[True]], block=4)),
    "blocks-float": (TypeError, "blocks has dtype torch.float32; bool", lambda: BlockLayout.from_blocks(torch.ones(2, 2), block=4)),
    "blocks-3-dims": (ValueError, "blocks has 3 dims; 2 or 4", lambda: BlockLayout.from_blocks(bits(1, 2, 2, dtype=torch.bool), block=4)),
    "block-zero": (ValueError, "block is 0; at least 1", lambda: BlockLayout.from_blocks(bits(2, 2, dtype=torch.bool), block=0)),
    "block-float": (TypeError, "block is 4.0", lambda: BlockLayout.from_dense(bits(2, 2, dtype=torch.bool), block=4.0)),
    "block-triple": (ValueError, "block is (4, 4, 4)", lambda: BlockLayout.from_dense(bits(2, 2, dtype=torch.bool), block=(4, 4, 4))),
    "q-len-long": (
        ValueError,
        "blocks has 2 rows; q_len 9; 3",
        lambda: BlockLayout.from_blocks(bits(2, 2, dtype=torch.bool), block=4, q_len=9),
    ),
    "kv-len-long": (
        ValueError,
        "blocks has 2 columns; kv_len 90; 23",
        lambda: BlockLayout.from_blocks(bits(2, 2, dtype=torch.bool), block=4, kv_len=90),
    ),
    "kv-len-short": (
        ValueError,
        "blocks has 2 columns; kv_len 4; 1",
        lambda: BlockLayout.from_blocks(bits(2, 2, dtype=torch.bool), block=4, kv_len=4),
    ),
    "mask-int": (TypeError, "mask has dtype torch.int32; bool", lambda: BlockLayout.from_dense(bits(2, 2))),
    "mask-1-dim": (ValueError, "mask has 1 dims; 2 or 4", lambda: BlockLayout.from_dense(bits(2, dtype=torch.bool))),
    "mask-sparse": (TypeError, "mask; sparse; strided", lambda: BlockLayout.from_dense(bits(2, 2, dtype=torch.bool).to_sparse())),
    "mask-meta": (ValueError, "mask is on meta; no data", lambda: BlockLayout.from_dense(bits(2, 2, dtype=torch.bool).to("meta"))),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_maker_given_the_wrong_thing_names_it(name):
    error, words, make = MAKERS[name]
    with pytest.raises(error) as caught:
        make()
    missing = [word for word in words.split("; ") if word not in str(caught.value)]
    assert not missing, f"{name}: the message {caught.value!s} lacks {missing}"


def test_the_unchanged_layout_is_sound():
    layout = BlockLayout(**parts())
    expected = torch.zeros(5, 9, dtype=torch.bool)
    expected[:3, :3] = expected[:3, 6:] = True
    for i, j in itertools.product((3, 4), (3, 4, 5)):
        expected[i, j] = j <= i + 1
    assert torch.equal(layout.to_dense()[0, 0], expected), f"stands for\n{layout.to_dense()[0, 0].int()}"
    assert layout.density == 0.5, f"3 of 6 blocks are a density of {layout.density}"


# Ownership and tampering


def partial_layout():
    return BlockLayout.from_dense(torch.ones(5, 9, dtype=torch.bool).tril(3), block=3)


def test_a_layout_owns_copies():
    given_parts = parts(rule=ElementRule(segments=segments((1, 5), (1, 9)), bits=torch.full((1, 3, 1), 7, dtype=torch.int32)))
    layout = BlockLayout(**given_parts)
    before = layout.to_dense()
    given_parts["full"].indices.fill_(1)
    given_parts["full"].offsets.fill_(0)
    given_parts["rule"].bits.zero_()
    given_parts["rule"].segments[0].fill_(5)
    layout.check_unmodified()
    assert torch.equal(layout.to_dense(), before), "the layout changed with the tensors it was made of"


def test_makers_own_copies_too():
    mask, blocks = torch.ones(4, 4, dtype=torch.bool), torch.ones(2, 2, dtype=torch.bool)
    dense, blocked = BlockLayout.from_dense(mask, block=2), BlockLayout.from_blocks(blocks, block=2)
    mask.zero_(), blocks.zero_()
    assert dense.to_dense().all(), "from_dense kept a reference"
    assert blocked.to_dense().all(), "from_blocks kept a reference"


def test_owned_tensors_are_contiguous():
    strided = torch.full((40, 3, 1), 7, dtype=torch.int32).transpose(0, 2).contiguous().transpose(0, 2)[:1]
    ids = torch.zeros(5, 2, dtype=torch.int32).T[:1], torch.zeros(9, 2, dtype=torch.int32).T[:1]
    layout = BlockLayout(**parts(full=lists(ints(0, 1, 2, 1, 2, 1)[::2].clone(), (0, 2)), rule=ElementRule(segments=ids, bits=strided)))
    strides = [(tuple(t.shape), t.stride()) for t in layout.tensors()]
    assert all(t.is_contiguous() for t in layout.tensors()), f"a kernel would misread shapes and strides {strides}"


@pytest.mark.parametrize("place", range(5))
def test_a_write_to_any_tensor_is_caught(place):
    layout = partial_layout()
    layout.transposed  # noqa: B018  cached before the write: it is stale then
    layout.tensors()[place].add_(1)
    q, kv = torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 9, 4)
    uses = {
        "attention": lambda: attnzoo.attention(q, kv, kv, layout=layout),
        "to_dense": layout.to_dense,
        "to": lambda: layout.to("cpu"),
        "transposed": lambda: layout.transposed,
        "pickle": lambda: pickle.dumps(layout),
        "deepcopy": lambda: copy.deepcopy(layout),
    }
    for name, use in uses.items():
        with pytest.raises(ValueError, match=r"layout.*written in place"):
            raise AssertionError(f"{name} took a tampered layout: {use()}")


@pytest.mark.parametrize("place", range(5))
def test_a_write_between_forward_and_backward_is_caught(place):
    layout = partial_layout()
    q, kv = torch.zeros(1, 1, 5, 4, requires_grad=True), torch.zeros(1, 1, 9, 4)
    o = attnzoo.attention(q, kv, kv, layout=layout, backend="tiled")
    layout.tensors()[place].add_(1)
    with pytest.raises(ValueError, match=r"layout.*written in place"):
        o.sum().backward()


@pytest.mark.parametrize("place", range(5))
def test_a_write_to_the_transposed_lists_is_caught(place):
    layout = partial_layout()
    full, partial, order = layout.transposed
    [full.offsets, full.indices, partial.offsets, partial.indices, order][place].add_(1)
    with pytest.raises(ValueError, match=r"layout.*written in place"):
        layout.check_unmodified()


def test_a_pickle_is_validated_again():
    layout = partial_layout()
    restored = pickle.loads(pickle.dumps(layout))
    assert torch.equal(restored.to_dense(), layout.to_dense()), "pickling changed the layout"
    assert torch.equal(copy.deepcopy(layout).to_dense(), layout.to_dense()), "deepcopy changed the layout"
    make, arguments = layout.__reduce__()[:2]
    forged = [BlockLists(a.offsets, a.indices + 7) if isinstance(a, BlockLists) else a for a in arguments]
    with pytest.raises(ValueError, match=r"full.indices holds"):
        make(*forged)


def test_fields_are_frozen():
    layout = partial_layout()
    for target, name in ((layout, "q_len"), (layout, "full"), (layout.full, "indices"), (layout.rule, "bits")):
        with pytest.raises(AttributeError):
            setattr(target, name, None)


def test_layouts_can_be_made_and_used_in_inference_mode():
    with torch.inference_mode():
        layout = partial_layout()
        layout.check_unmodified()
        assert torch.equal(layout.to_dense()[0, 0], torch.ones(5, 9, dtype=torch.bool).tril(3)), "wrong in inference mode"
        BlockLayout(**parts()).check_unmodified()


def test_to_the_device_where_it_is_gives_the_layout_itself():
    """And with it what was derived from it, which each call would make anew."""
    layout = attnzoo.layouts.causal(24, block=8)
    for device in ("cpu", torch.device("cpu")):
        assert layout.to(device) is layout


def test_to_another_device_keeps_everything():
    layout = partial_layout()
    there = layout.to("meta")
    assert there.device.type == "meta", f"on {there.device}"
    assert there.summary == layout.summary, f"{there.summary} is not {layout.summary}"
    assert {t.device.type for t in there.tensors()} == {"meta"}, "a tensor stayed behind"


# Round trips

shapes = st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 3]), st.integers(0, 13), st.integers(0, 13))
block_sizes = st.tuples(st.integers(1, 40), st.integers(1, 40)) | st.tuples(st.integers(1, 4), st.integers(1, 4))


def random_mask(shape, density, seed):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density


@settings(max_examples=60, deadline=None)
@given(shapes, block_sizes, st.sampled_from([0.0, 0.2, 0.9, 1.0]), st.integers(0, 2**31))
def test_from_dense_and_back(shape, block, density, seed):
    mask = random_mask(shape, density, seed)
    layout = BlockLayout.from_dense(mask, block=block)
    assert torch.equal(layout.to_dense(), mask), f"{shape} in blocks of {block} came back otherwise"
    BlockLayout(
        *(layout.q_len, layout.kv_len, *block, layout.full, layout.partial, layout.rule, layout.batch, layout.heads)
    )  # what the maker trusts must pass the validation
    blocks, _, _ = count_blocks(mask, block)
    assert round(layout.density * len(blocks)) == sum(any_ for any_, _ in blocks.values()), f"density {layout.density}"
    assert len(layout.full.indices) == sum(all_ for _, all_ in blocks.values()), "a block with every pair kept is full"


def count_blocks(mask, block):
    """{(b, h, row, column): (any pair kept, every pair kept)}, by slicing."""
    batch, heads, q_len, kv_len = mask.shape
    rows, columns = range(0, q_len, block[0]), range(0, kv_len, block[1])
    found = {}
    for b, h, i, j in itertools.product(range(batch), range(heads), rows, columns):
        tile = mask[b, h, i : i + block[0], j : j + block[1]]
        found[b, h, i // block[0], j // block[1]] = (bool(tile.any()), bool(tile.all()))
    return found, len(rows), len(columns)


@settings(max_examples=40, deadline=None)
@given(shapes, block_sizes, st.integers(0, 2**31))
def test_from_blocks_is_the_table_blown_up(shape, block, seed):
    *outer, q_len, kv_len = shape
    table = random_mask((*outer, -(-q_len // block[0]), -(-kv_len // block[1])), 0.5, seed)
    layout = BlockLayout.from_blocks(table, block=block, q_len=q_len, kv_len=kv_len)
    expected = table.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)[:, :, :q_len, :kv_len]
    assert torch.equal(layout.to_dense(), expected), f"{shape} in blocks of {block}"
    assert layout.summary.partial_blocks == 0, "from_blocks makes full blocks"


@settings(max_examples=40, deadline=None)
@given(shapes, block_sizes, st.integers(0, 2**31))
def test_transposed_lists_hold_the_same_blocks(shape, block, seed):
    layout = BlockLayout.from_dense(random_mask(shape, 0.7, seed), block=block)
    full, partial, order = layout.transposed
    for name, lists_, transposed in (("full", layout.full, full), ("partial", layout.partial, partial)):
        forward = sorted(blocks_of(lists_, layout.rows))
        backward = sorted((head, row, column) for head, column, row in blocks_of(transposed, layout.columns))
        assert forward == backward, f"{name} blocks differ"
        assert len(transposed.offsets) == layout.batch * layout.heads * layout.columns + 1, f"{name} offsets cover other columns"
        assert transposed.offsets.dtype == transposed.indices.dtype == torch.int32, f"{name} is not int32"
    places = [(head, row, column) for head, column, row in blocks_of(partial, layout.columns)]
    straight = list(blocks_of(layout.partial, layout.rows))
    assert [straight[int(place)] for place in order] == places, "order does not lead to the bits of the block"


def blocks_of(lists_, rows):
    """(head, row, index) of each block, in order; an index out of order is an error."""
    for r in range(len(lists_.offsets) - 1):
        indices = lists_.indices[int(lists_.offsets[r]) : int(lists_.offsets[r + 1])].tolist()
        assert indices == sorted(set(indices)), f"row {r} has {indices}"
        yield from ((r // rows, r % rows, index) for index in indices)


@pytest.mark.parametrize("view", ["transposed", "expanded", "sliced"])
def test_masks_of_any_strides(view):
    views = {
        "transposed": random_mask((8, 6), 0.5, 0).T,
        "expanded": random_mask((6, 1), 0.5, 0).expand(6, 8),
        "sliced": random_mask((12, 16), 0.5, 0)[::2, ::2],
    }
    mask = views[view]
    assert torch.equal(BlockLayout.from_dense(mask, block=(3, 4)).to_dense()[0, 0], mask), f"{view} mask misread"
    assert torch.equal(BlockLayout.from_blocks(mask, block=1).to_dense()[0, 0], mask), f"{view} table misread"


RULES = {
    "band": ElementRule(band=(None, 2, -1)),
    "segments": ElementRule(segments=(ints(0, 0, 1, 1, 1)[None], ints(0, 0, 0, 0, 1, 1, 1, 1, 2)[None])),
    "bits": ElementRule(bits=torch.full((1, 3, 1), 0b101, dtype=torch.int32)),
    "all": ElementRule((1, 2, 0), segments((1, 5), (1, 9)), torch.full((1, 3, 1), 0b111, dtype=torch.int32)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_layout_is_restored_from_its_tensors_and_facts(name):
    layout = BlockLayout(**parts(rule=RULES[name]))
    restored = BlockLayout.restored(layout.tensors(), layout.facts)
    assert torch.equal(restored.to_dense(), layout.to_dense()), f"restored with another meaning, facts {layout.facts!r}"
    assert restored.rule.parts == layout.rule.parts, f"restored with {restored.rule.parts}"
    assert restored.summary == layout.summary, f"restored as {restored.summary}"


def test_more_blocks_than_offsets_can_count(monkeypatch):
    monkeypatch.setattr("attnzoo.layout.MOST_BLOCKS", 3)
    with pytest.raises(ValueError, match="has 4 blocks; it takes at most 3"):
        attnzoo.layouts.topk(torch.rand(2, 2), 2, q_len=8, kv_len=8, block=4)
    assert attnzoo.layouts.causal(8, block=4).density == 0.75


def test_density_of_nothing_is_zero():
    assert BlockLayout.from_dense(torch.ones(0, 5, dtype=torch.bool)).density == 0.0, "no block at all"
    assert BlockLayout.from_dense(torch.zeros(5, 5, dtype=torch.bool), block=2).density == 0.0, "no block kept"
    assert BlockLayout.from_dense(torch.eye(4, dtype=torch.bool), block=2).density == 0.5, "the diagonal of 2 x 2 blocks"


def test_a_layout_can_be_made_under_a_transform():
    def loss(q):
        rows = q.view(4, 4, 8).sum(1)
        layout = attnzoo.layouts.topk(rows @ rows.mT, 2, q_len=16, kv_len=16, block=4)
        return attnzoo.attention(q[None, None], q[None, None], q[None, None], layout=layout, backend="naive").sum()

    q = torch.randn(16, 8)
    leaf = q.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(q), leaf.grad)


def test_a_layout_is_moved_and_not_cast():
    for target in (torch.float32, torch.int64):
        with pytest.raises(TypeError):
            layouts.causal(64, block=16).to(target)


def one_block(length, *, block):
    return BlockLayout.from_blocks(torch.ones(1, 1, dtype=torch.bool), block=block, q_len=length, kv_len=length)


@pytest.mark.parametrize("make", [one_block, layouts.causal])
def test_the_mask_of_a_layout_costs_no_more_than_its_lengths(make):
    layout = make(5, block=2**40)
    assert torch.equal(layout.to_dense(), make(5, block=8).to_dense())
