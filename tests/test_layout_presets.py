"""Presets stand for the masks they name, classify their blocks as `from_dense` does, and are valid."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from attnzoo import BlockLayout, layouts
from attnzoo.layouts.validation import validate

BLOCKS = (1, 3, 4, 8, 16, 100)
ALIGNMENTS = ("top_left", "bottom_right")


def indices(q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    return torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]


def check(layout: BlockLayout, mask: Tensor, *, exact: bool = True) -> None:
    """The layout is valid and equals the mask; `exact`: with the very blocks that `from_dense` finds."""
    validate(layout)
    assert torch.equal(layout.to_dense().expand(mask.expand_as(layout.to_dense()).shape), mask.expand_as(layout.to_dense())), layout.facts
    rebuilt = BlockLayout(
        layout.q_len, layout.kv_len, layout.block_q, layout.block_kv, layout.full, layout.partial, layout.rule, layout.batch, layout.heads
    )
    for mine, sorted_ in zip(layout.transposed[:2], rebuilt.transposed[:2]):
        assert torch.equal(mine.offsets, sorted_.offsets)
        assert torch.equal(mine.indices, sorted_.indices)
    if exact:
        dense = BlockLayout.from_dense(mask.expand(layout.batch, layout.heads, *mask.shape[-2:]), block=(layout.block_q, layout.block_kv))
        for mine, theirs in ((layout.full, dense.full), (layout.partial, dense.partial)):
            assert torch.equal(mine.offsets, theirs.offsets), layout.facts
            assert torch.equal(mine.indices, theirs.indices), layout.facts


def draws(count: int):
    rng = random.Random(0)
    for _ in range(count):
        yield rng, rng.randint(1, 70), rng.randint(1, 70), (rng.choice(BLOCKS), rng.choice(BLOCKS)), rng.choice(ALIGNMENTS)


def test_bands():
    for rng, q_len, kv_len, block, align in draws(200):
        left, right = (rng.choice([None, 0, 1, 5, 20, 90]) for _ in range(2))
        i, j = indices(q_len, kv_len)
        p = i + (kv_len - q_len if align == "bottom_right" else 0)
        mask = (j >= p - (1000 if left is None else left)) & (j <= p + (1000 if right is None else right))
        check(layouts.sliding_window(q_len, kv_len, window=(left, right), block=block, align=align), mask)
        check(layouts.causal(q_len, kv_len, block=block, align=align), j <= p)


def test_prefix_lm():
    for rng, q_len, kv_len, block, align in draws(100):
        prefix = rng.randint(0, 80)
        i, j = indices(q_len, kv_len)
        p = i + (kv_len - q_len if align == "bottom_right" else 0)
        check(layouts.prefix_lm(q_len, kv_len, prefix=prefix, block=block, align=align), (j < prefix) | (j <= p), exact=False)


@pytest.mark.parametrize("is_causal", [False, True])
def test_documents(is_causal):
    for rng, _, _, (block, _), _ in draws(60):
        lengths = [rng.randint(0, 20) for _ in range(rng.randint(1, 6))] + [1]
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        batched = torch.stack([ids, torch.randint(-3, 4, ids.shape).sort().values])
        i, j = indices(len(ids), len(ids))
        order = (j <= i) | torch.tensor(not is_causal)
        check(layouts.documents(lengths, causal=is_causal, block=block), (ids[:, None] == ids) & order)
        mask = (batched[:, None, :, None] == batched[:, None, None, :]) & order
        check(layouts.documents(batched, causal=is_causal, block=block), mask)


def test_mask_mod():
    for rng, q_len, kv_len, block, _ in draws(40):
        table = torch.rand(2, 3, q_len, kv_len) > rng.choice([0.0, 0.1, 0.9, 1.0])
        table[:, :, : q_len // 2, : kv_len // 2] = True
        made = layouts.from_mask_mod(lambda b, h, i, j, t=table: t[b, h, i, j], q_len, kv_len, batch=2, heads=3, block=block)
        check(made, table)


@pytest.mark.parametrize(("q_len", "kv_len"), [(64, 96), (50, 70), (0, 16), (16, 0)])
def test_what_a_mask_mod_may_return(q_len, kv_len):
    storage = torch.rand(q_len * kv_len + 1) < 0.5
    table = storage[1:].view(q_len, kv_len)  # contiguous, at an odd address
    rows, columns = torch.arange(q_len) < q_len // 2, torch.arange(kv_len) < kv_len // 2
    returned = {
        "a view": (lambda b, h, i, j: table[: len(i), : j.shape[1]] if len(i) == q_len else table[i, j], table),
        "a transposed view": (lambda b, h, i, j: table.mT.contiguous().mT[i, j], table),
        "of the query alone": (lambda b, h, i, j: i < q_len // 2, rows[:, None].expand(q_len, kv_len)),
        "of the key alone": (lambda b, h, i, j: j < kv_len // 2, columns.expand(q_len, kv_len)),
        "one answer": (lambda b, h, i, j: torch.tensor(True), torch.ones(q_len, kv_len, dtype=torch.bool)),
    }
    for block in (16, 20, (32, 8)):
        for name, (mask_mod, expected) in returned.items():
            if name == "a view" and (block == 20 or (q_len, kv_len) == (50, 70)):
                continue  # the function is asked for whole blocks there, beyond this table
            made = layouts.from_mask_mod(mask_mod, q_len, kv_len, block=block)
            assert torch.equal(made.to_dense()[0, 0], expected), f"{name}, blocks of {block}"


def test_documents_with_ids_far_apart():
    for ids in (torch.tensor([-100, 100, 100], dtype=torch.int8), torch.tensor([-(2**63), 2**63 - 1, 2**63 - 1])):
        assert torch.equal(layouts.documents(ids, block=2).to_dense()[0, 0], ids[:, None] == ids[None, :])


def test_topk_takes_the_best_blocks():
    scores = torch.tensor([[0.1, 0.9, 0.5], [0.7, -1.0, 0.8]])
    made = layouts.topk(scores, 2, q_len=30, kv_len=40, block=16)
    validate(made)
    assert made.full.indices.tolist() == [1, 2, 0, 2]
    assert made.full.offsets.tolist() == [0, 2, 4]


# Patterns, by hand: rows of blocks, "#" for one that exists
BUTTERFLY_8 = ["###.#...", "####.#..", "#####.#.", ".#####.#", "#.#####.", ".#.#####", "..#.####", "...#.###"]
STRIDED_8 = ["##..#...", "###..#..", ".###..#.", "..###..#", "#..###..", ".#..###.", "..#..###", "...#..##"]
FIXED_8 = ["####...#"] * 4 + ["...#####"] * 4
LONGFORMER_6 = ["######", "###...", "####..", "#.###.", "#..###", "#...##"]
DILATED_6 = ["#.#...", ".#.#..", "#.#.#.", ".#.#.#", "..#.#.", "...#.#"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_topk_takes_scores_of_any_float_dtype(dtype):
    scores = torch.tensor([[1.0, 3.0, 2.0], [0.5, -1.0, 4.0]]).to(dtype)
    assert layouts.topk(scores, 2, q_len=2, kv_len=3, block=1).full.indices.tolist() == [1, 2, 0, 2]


@pytest.mark.parametrize(
    ("made", "rows"),
    [
        (layouts.butterfly(64, block=8), BUTTERFLY_8),
        (layouts.strided(64, stride=4, reach=1, block=8), STRIDED_8),
        (layouts.fixed(64, stride=4, block=8), FIXED_8),
        (layouts.longformer(48, reach=1, block=8), LONGFORMER_6),
        (layouts.dilated(48, reach=1, step=2, block=8), DILATED_6),
    ],
    ids=["butterfly", "strided", "fixed", "longformer", "dilated"],
)
def test_patterns_by_hand(made, rows):
    validate(made)
    blocks = torch.tensor([[block == "#" for block in row] for row in rows])
    assert torch.equal(made.to_dense()[0, 0, ::8, ::8], blocks)


@pytest.mark.parametrize("make", [layouts.bigbird, lambda n, **o: layouts.random(n, density=0.25, **o)], ids=["bigbird", "random"])
def test_drawn_patterns_follow_their_seed(make):
    first, again, other = make(512, seed=3, block=16), make(512, seed=3, block=16), make(512, seed=4, block=16)
    validate(first)
    assert torch.equal(first.full.indices, again.full.indices)
    assert not torch.equal(first.full.indices, other.full.indices)
    assert first.to_dense()[0, 0].diagonal().all()


def test_long_patterns_cost_what_they_hold():
    """A number for each of their 2^30 blocks would take gigabytes and a minute."""
    for made, most in ((layouts.longformer(2**21, reach=1, block=64), 6), (layouts.bigbird(2**21, block=64), 9)):
        assert len(made.full.indices) <= most * made.rows
        assert made.full.offsets.diff().min() >= 3


@pytest.mark.parametrize("far", [40, 10**9, 2**70])
def test_what_reaches_beyond_the_ends_costs_nothing(far):
    """And means the same as what reaches them."""
    for lengths in ((160, 80), (80, 160), (100, 100)):
        every, (rows, columns) = torch.ones(lengths, dtype=torch.bool), [torch.arange(n) // 16 for n in lengths]
        own = rows[:, None] == columns
        wanted = {
            layouts.dilated(*lengths, reach=far, step=1, block=16): every,
            layouts.dilated(*lengths, reach=far, step=3, block=16): (rows[:, None] - columns) % 3 == 0,
            layouts.dilated(*lengths, reach=3, step=far, block=16): own,
            layouts.strided(*lengths, stride=far, block=16): own,
            layouts.strided(*lengths, stride=far, reach=far, block=16): every,
            layouts.fixed(*lengths, stride=far, block=16): every,
            layouts.fixed(*lengths, stride=far, summary=far, block=16): every,
            layouts.butterfly(*lengths, reach=far, block=16): every,
            layouts.longformer(*lengths, reach=far, block=16): every,
            layouts.longformer(*lengths, reach=0, global_blocks=far, block=16): every,
            layouts.bigbird(*lengths, reach=far, random_blocks=0, block=16): every,
            layouts.bigbird(*lengths, random_blocks=far, block=16): every,
        }
        for made, mask in wanted.items():
            check(made, mask)


def test_random_blocks_of_a_row_are_different():
    table = layouts.bigbird(40 * 16, reach=0, global_blocks=0, random_blocks=40, block=16)
    assert table.density == 1.0
    counts = layouts.bigbird(4096, 640, reach=0, global_blocks=0, random_blocks=3, block=16).full.offsets.diff()
    assert set(counts[40:].tolist()) == {3}  # the rows without a diagonal block
    drawn = layouts.bigbird(2**18, 640, reach=0, global_blocks=0, random_blocks=3, block=16).full.indices[1000:]
    shares = torch.bincount(drawn.long(), minlength=40) / len(drawn)
    assert shares.min() > 0.8 / 40, f"some columns are drawn less than others: {shares}"
    assert shares.max() < 1.2 / 40, f"some columns are drawn more than others: {shares}"


def test_random_has_its_density():
    assert layouts.random(64 * 16, density=0.25, block=16).density == pytest.approx(0.25)
    assert layouts.random(640, 320, density=0.0, diagonal=False, block=16).density == 0.0


def test_nothing_to_attend_to():
    made = [maker(0, kv_len, **{"align": "top_left"} | options) for kv_len in (0, 40) for maker, options in BANDS]
    made += [maker(*lengths, **options) for lengths in ((0, 0), (0, 40), (40, 0)) for maker, options in PATTERNS]
    made += [layouts.documents([]), layouts.documents(torch.zeros(0, dtype=torch.int64)), layouts.documents(torch.zeros(2, 0).int())]
    made += [layouts.documents(torch.zeros(0, 5).int()), layouts.from_mask_mod(lambda b, h, i, j: i >= j, 0, 40)]
    for layout in made:
        validate(layout)
        assert str(layout) == "(no blocks)"
        assert not layout.to_dense().any()


BANDS = [(layouts.causal, {}), (layouts.sliding_window, {"window": 3}), (layouts.prefix_lm, {"prefix": 3})]
PATTERNS = [
    (layouts.butterfly, {}),
    (layouts.bigbird, {}),
    (layouts.longformer, {"reach": 1}),
    (layouts.strided, {"stride": 2}),
    (layouts.fixed, {"stride": 2}),
    (layouts.dilated, {"reach": 1}),
    (layouts.random, {"density": 0.5}),
]


def test_a_window_beyond_any_length():
    """It must not leave what a layout is rebuilt from, or what int64 holds."""
    for bound in (2**31, 2**40, 2**70):
        made = layouts.sliding_window(40, window=(bound, bound), block=16)
        validate(made)
        assert made.to_dense().all()
    assert layouts.sliding_window(40, window=(None, None), block=16).to_dense().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layouts.causal(4, 8), "align"),
        (lambda: layouts.sliding_window(8, window=(-1, 0)), "window"),
        (lambda: layouts.strided(8, stride=0), "stride"),
        (lambda: layouts.random(8, density=1.5), "density"),
        (lambda: layouts.sliding_window(8, window=(5,)), r"window is \(5,\)"),
        (lambda: layouts.causal(2**22, block=16), "has 34359607296 blocks"),
        (
            lambda: layouts.topk(torch.zeros(1).expand(2, 2**15, 2**10, 64), 64, q_len=2**14, kv_len=2**10, block=16),
            "has 4294967296 blocks",
        ),
        (lambda: layouts.prefix_lm(8, prefix=-1), "prefix"),
        (lambda: layouts.documents([3, -1]), "documents"),
        (lambda: layouts.documents(torch.tensor([1, 0])), "documents"),
        (lambda: layouts.documents(torch.tensor([0.5])), "documents"),
        (lambda: layouts.documents(torch.tensor([3, 1], dtype=torch.uint8)), "decrease"),
        (lambda: layouts.documents(torch.tensor([100, -100], dtype=torch.int8)), "decrease"),
        (lambda: layouts.topk(torch.rand(2, 2), 3, q_len=2, kv_len=2, block=1), "k is 3"),
        (lambda: layouts.topk(torch.rand(2, 2), 1, q_len=9, kv_len=2, block=1), "scores"),
        (lambda: layouts.topk(torch.ones(2, 2, dtype=torch.int32), 1, q_len=2, kv_len=2, block=1), "scores"),
        (lambda: layouts.from_mask_mod(lambda b, h, i, j: i - j, 4, 4), "mask_mod"),
        (lambda: layouts.butterfly(8, block=0), "block"),
        (lambda: layouts.butterfly(-8), "q_len is -8"),
        (lambda: layouts.butterfly(8, 8.0), "kv_len is 8.0"),
        (lambda: layouts.butterfly(8, reach=-1), "reach is -1"),
        (lambda: layouts.dilated(8, reach=1, step=0), "step is 0"),
        (lambda: layouts.strided(8, stride=2.0), "stride is 2.0"),
        (lambda: layouts.fixed(8, stride=2, summary=-1), "summary is -1"),
        (lambda: layouts.longformer(8, reach=1, global_blocks=-1), "global_blocks is -1"),
        (lambda: layouts.bigbird(8, random_blocks=-1), "random_blocks is -1"),
        (lambda: layouts.bigbird(8, seed=0.5), "seed is 0.5"),
        (lambda: layouts.random(8, density=0.5, seed=2**64), "seed is 18446744073709551616"),
        (lambda: layouts.random(8, density="1"), "density is '1'"),
        (lambda: layouts.causal(True), "q_len is True"),
        (lambda: layouts.sliding_window(8, -1, window=2, align="top_left"), "kv_len is -1"),
        (lambda: layouts.prefix_lm(8, prefix=2.5), "prefix is 2.5"),
        (lambda: layouts.documents([3, 1.5]), "a length of documents is 1.5"),
        (lambda: layouts.documents([3], block=(4, 4)), "block is"),
        (lambda: layouts.documents(torch.zeros(4, dtype=torch.uint16)), "documents has dtype torch.uint16"),
        (lambda: layouts.topk(torch.rand(2, 2).to_sparse(), 1, q_len=2, kv_len=2, block=1), "scores is a sparse"),
        (lambda: layouts.topk(torch.rand(2, 2), 1.0, q_len=2, kv_len=2, block=1), "k is 1.0"),
        (lambda: layouts.topk(torch.rand(2, 2), 1, q_len=2.0, kv_len=2, block=1), "q_len is 2.0"),
        (lambda: layouts.from_mask_mod(lambda b, h, i, j: i >= j, -4, 4), "q_len is -4"),
        (lambda: layouts.from_mask_mod(lambda b, h, i, j: i >= j, 4, 4, heads=1.5), "heads is 1.5"),
        (lambda: layouts.from_mask_mod(lambda b, h, i, j: i >= j, 4, 4, batch=-1), "batch is -1"),
    ],
)
def test_malformed_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


MADE = {
    "causal": lambda **o: layouts.causal(64, block=16, **o),
    "sliding_window": lambda **o: layouts.sliding_window(64, window=9, block=16, **o),
    "dilated": lambda **o: layouts.dilated(64, reach=2, block=16, **o),
    "strided": lambda **o: layouts.strided(64, stride=2, block=16, **o),
    "fixed": lambda **o: layouts.fixed(64, stride=2, block=16, **o),
    "butterfly": lambda **o: layouts.butterfly(64, block=16, **o),
    "bigbird": lambda **o: layouts.bigbird(64, block=16, **o),
    "longformer": lambda **o: layouts.longformer(64, reach=1, block=16, **o),
    "prefix_lm": lambda **o: layouts.prefix_lm(64, prefix=9, block=16, **o),
    "documents": lambda **o: layouts.documents([30, 34], block=16, **o),
    "random": lambda **o: layouts.random(64, density=0.5, block=16, **o),
    "from_mask_mod": lambda **o: layouts.from_mask_mod(lambda b, h, i, j: j <= i, 64, 64, block=16, **o),
}


@pytest.mark.parametrize("name", MADE)
def test_a_default_device_is_not_where_a_layout_of_the_cpu_is_made_or_drawn(name):
    """ "meta" stands for a GPU: what strays there can't be read."""
    expected = MADE[name]()
    with torch.device("meta"):
        made = MADE[name](device="cpu")
        assert str(made) == str(expected)
        made.transposed  # noqa: B018 (nothing of it may stray either)
    assert torch.equal(made.to_dense(), expected.to_dense())


def test_bands_are_made_on_the_default_device():
    with torch.device("meta"), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        layouts.causal(64, block=16)  # reads back how many blocks there are


ANCHORS = torch.tensor([3, 40])


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, i, j: (i == ANCHORS).any() | (j <= i),
        lambda b, h, i, j: (i == ANCHORS).any(-1) | (j <= i),
        lambda b, h, i, j: (j == ANCHORS[:1]).any() & (j <= i),
        lambda b, h, i, j: (i != ANCHORS).all() & (i - j < 8) & (j <= i),
        lambda b, h, i, j: (j <= i) & (i > i.min()),
        lambda b, h, i, j: (j <= i).flip(0),
    ],
)
@pytest.mark.parametrize("heads", [1, 3])
def test_a_mask_mod_whose_answer_for_a_pair_depends_on_others_is_refused(mask_mod, heads):
    with pytest.raises((ValueError, RuntimeError), match=r"mask_mod says .* of query .* among others|size of tensor"):
        layouts.from_mask_mod(mask_mod, 64, 64, heads=heads, block=16)


def test_a_mask_mod_may_reduce_over_a_dim_of_its_own():
    made = layouts.from_mask_mod(lambda b, h, i, j: (i[..., None] == ANCHORS).any(-1) | (j <= i), 64, 64, block=16)
    i, j = indices(64, 64)
    check(made, torch.isin(i, ANCHORS) | (j <= i))
