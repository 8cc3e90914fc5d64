"""tiled against naive in float64, tile boundaries, what is skipped, and memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from attnzoo.backend import Backend
from attnzoo.backends.head_chunks import head_chunks
from attnzoo.backends.naive import Naive
from attnzoo.backends.online_softmax import finish, online_softmax_step, sink_state
from attnzoo.backends.tiled import Tiled
from attnzoo.backends.tiles import Tile, TileSizes, choose_sizes, query_tiles
from attnzoo.inputs import AttentionInputs
from attnzoo.layout import BlockLayout
from attnzoo.spec import AttentionSpec

TINY = TileSizes(rows=4, columns=4, heads=1)
TENSOR_OPTIONS = ("mask", "bias", "segment_ids", "layout", "sinks", "dropout_seed")
RESULTS = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")


def qkv(
    *, batch: int = 2, q_heads: int = 4, kv_heads: int = 2, q_len: int = 9, kv_len: int = 13, dim: int = 4, value_dim: int = 3
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = ((batch, q_heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, value_dim))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def described(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[AttentionSpec, AttentionInputs]:
    spec = AttentionSpec.of(q, k, v, return_lse=True, **options)
    tensors = {name: options[name] for name in TENSOR_OPTIONS if name in options}
    return spec, AttentionInputs.of(spec, q, k, v, **tensors)


def results(backend: Backend, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> dict[str, Tensor]:
    """`o`, lse and the gradients of every differentiable input, for fixed gradients of both outputs."""
    leaves = {"dq": q, "dk": k, "dv": v, "dbias": options.get("bias"), "dsinks": options.get("sinks")}
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items() if leaf is not None}
    options |= {name: leaves[f"d{name}"] for name in ("bias", "sinks") if f"d{name}" in leaves}
    spec, inputs = described(leaves["dq"], leaves["dk"], leaves["dv"], **options)
    o, lse = backend.attend(spec, inputs)
    assert lse is not None, "return_lse=True, but no lse"
    generator = torch.Generator().manual_seed(11)
    grad_o = torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype)
    grad_lse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(lse.dtype)
    grads = torch.autograd.grad([o, lse], list(leaves.values()), [grad_o, grad_lse], materialize_grads=True, allow_unused=True)
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(leaves, grads))}


def assert_agree(found: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float = 1e-11) -> None:
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def checkerboard(rows: int, columns: int) -> Tensor:
    return (torch.arange(rows)[:, None] + torch.arange(columns)) % 3 != 0


def random_bool(*shape: int, share: float = 0.6) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < share


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


IDS = (torch.tensor([[0, 0, 0, 1, 1, 1, 1, -5, -5], [2, 2, 2, 2, 2, 2, 2, 2, 2]]), torch.arange(26).view(2, 13) // 6 - 1)
SCATTERED_IDS = (torch.arange(18).view(2, 9) % 3, torch.arange(26).view(2, 13) % 4)

# for B=2, Hq=4, Hkv=2, Sq=9, Skv=13
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal-top-left": dict(causal=True, align="top_left"),
    "causal-bottom-right": dict(causal=True, align="bottom_right"),
    "window": dict(window=(3, 1), align="bottom_right"),
    "window-left": dict(window=(2, None), align="top_left"),
    "window-right": dict(window=(None, 0), align="bottom_right"),
    "window-causal": dict(window=(5, 2), causal=True, align="top_left"),
    "mask-2-dims": dict(mask=checkerboard(9, 13)),
    "mask-keys": dict(mask=random_bool(2, 1, 1, 13)),
    "mask-full": dict(mask=random_bool(2, 4, 9, 13)),
    "bias-2-dims": dict(bias=normal(9, 13)),
    "bias-head": dict(bias=normal(1, 4, 1, 1)),
    "bias-rows": dict(bias=normal(2, 1, 9, 1)),
    "bias-full": dict(bias=normal(2, 4, 9, 13)),
    "bias-float32": dict(bias=normal(1, 4, 9, 13).float()),
    "bias-infinite": dict(bias=normal(9, 13).masked_fill(~checkerboard(9, 13), -torch.inf)),
    "segments": dict(segment_ids=IDS),
    "segments-scattered": dict(segment_ids=SCATTERED_IDS),
    "segments-uint8": dict(segment_ids=tuple((ids + 7).to(torch.uint8) for ids in IDS)),
    "scale-negative": dict(scale=-0.7),
    "scale-zero": dict(scale=0.0),
    "softcap": dict(softcap=0.8),
    "softcap-bias": dict(softcap=0.8, bias=normal(9, 13)),
    "sinks": dict(sinks=torch.tensor([0.5, -torch.inf, 3.0, -2.0], dtype=torch.float64)),
    "dropout": dict(dropout_p=0.3, dropout_seed=2**63 + 5),
    "layout-shared": dict(layout=BlockLayout.from_dense(random_bool(9, 13, share=0.5), block=(4, 2))),
    "layout-heads": dict(layout=BlockLayout.from_dense(random_bool(1, 4, 9, 13, share=0.3), block=2)),
    "layout-batch": dict(layout=BlockLayout.from_dense(random_bool(2, 1, 9, 13, share=0.3), block=(3, 4))),
    "layout-batch-heads": dict(layout=BlockLayout.from_dense(random_bool(2, 4, 9, 13, share=0.2), block=(2, 1))),
    "layout-wide": dict(layout=BlockLayout.from_dense(checkerboard(9, 13), block=(16, 16))),
    "layout-full-blocks": dict(layout=BlockLayout.from_blocks(random_bool(5, 7), block=2, q_len=9, kv_len=13)),
    "layout-causal-segments": dict(
        layout=BlockLayout.from_blocks(random_bool(1, 4, 5, 7), block=2, q_len=9, kv_len=13),
        segment_ids=SCATTERED_IDS,
        causal=True,
        align="bottom_right",
    ),
    "layout-dropout-bias": dict(
        layout=BlockLayout.from_blocks(random_bool(5, 7), block=2, q_len=9, kv_len=13),
        bias=normal(1, 4, 9, 13),
        dropout_p=0.5,
        dropout_seed=1,
    ),
    "everything": dict(
        causal=True,
        align="bottom_right",
        window=(7, None),
        mask=random_bool(2, 1, 9, 13, share=0.9),
        bias=normal(1, 4, 9, 1),
        segment_ids=IDS,
        layout=BlockLayout.from_dense(random_bool(2, 4, 9, 13, share=0.9), block=(2, 3)),
        scale=0.3,
        softcap=2.0,
        sinks=normal(4),
        dropout_p=0.2,
        dropout_seed=9,
    ),
}

SIZES = {
    "tiny": TINY,
    "ragged": TileSizes(rows=2, columns=5, heads=2),
    "one-key": TileSizes(rows=3, columns=1, heads=3),
    "stacked": TileSizes(rows=4, columns=3, heads=100),
    "chosen": None,
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("options", ARGUMENTS.values(), ids=ARGUMENTS)
def test_agrees_with_naive(options: dict[str, Any], sizes: TileSizes | None) -> None:
    assert_agree(results(Tiled(sizes), *qkv(), **options), results(Naive(), *qkv(), **options))


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("kv_len", [1, 3, 4, 5, 8, 14])
@pytest.mark.parametrize("q_len", [1, 3, 4, 5, 8, 14])
def test_tile_boundaries(q_len: int, kv_len: int, align: str) -> None:
    tensors = qkv(batch=1, q_len=q_len, kv_len=kv_len)
    options = dict(causal=True, align=align, window=(6, None))
    assert_agree(results(Tiled(TINY), *tensors, **options), results(Naive(), *tensors, **options))


@pytest.mark.parametrize("seed", range(40))
def test_random_combinations(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, group = draw.choice([1, 2]), draw.choice([1, 2, 3])
    sizes = dict(batch=draw.choice([1, 2, 3]), q_heads=kv_heads * group, kv_heads=kv_heads, q_len=draw.choice([1, 5, 17]))
    sizes |= dict(kv_len=draw.choice([1, 4, 21]), dim=draw.choice([1, 8]), value_dim=draw.choice([1, 4]))
    full = (sizes["batch"], sizes["q_heads"], sizes["q_len"], sizes["kv_len"])

    def some() -> tuple[int, ...]:
        return tuple([draw.choice([1, size]) for size in full])

    layout_shape = (draw.choice([1, full[0]]), draw.choice([1, full[1]]), *full[2:])
    layout = BlockLayout.from_dense(random_bool(*layout_shape, share=0.5), block=(draw.choice([1, 3, 8]), draw.choice([1, 4, 16])))
    possible = dict(
        causal=True,
        window=(draw.choice([None, 0, 3]), draw.choice([None, 0, 2])),
        mask=random_bool(*some(), share=0.7),
        bias=normal(*some()),
        segment_ids=(torch.arange(full[0] * full[2]).view(full[0], -1) % 2, torch.arange(full[0] * full[3]).view(full[0], -1) % 3),
        layout=layout,
        sinks=normal(full[1]),
        softcap=1.5,
        scale=draw.choice([0.0, -1.0, 2.0]),
    )
    options: dict[str, Any] = {name: value for name, value in possible.items() if draw.random() < 0.35}
    if draw.random() < 0.3:
        options |= dict(dropout_p=0.3, dropout_seed=seed)
    options["align"] = draw.choice(["top_left", "bottom_right"])
    backend = Tiled(TileSizes(rows=draw.choice([1, 4, 100]), columns=draw.choice([1, 3, 100]), heads=draw.choice([1, 2, 100])))
    assert_agree(results(backend, *qkv(**sizes), **options), results(Naive(), *qkv(**sizes), **options))


@pytest.mark.parametrize("size", ["batch", "heads", "q_len", "kv_len", "dim", "value_dim"])
@pytest.mark.parametrize("options", [{}, dict(causal=True, align="bottom_right", sinks=normal(4))], ids=["plain", "causal-sinks"])
def test_empty_sizes(size: str, options: dict[str, Any]) -> None:
    zero = dict(q_heads=0, kv_heads=0) if size == "heads" else {size: 0}
    if size == "heads" and options:
        options = options | dict(sinks=normal(0))
    assert_agree(results(Tiled(TINY), *qkv(**zero), **options), results(Naive(), *qkv(**zero), **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision_is_as_good_as_naive(dtype: torch.dtype) -> None:
    tensors = [t.to(dtype) for t in qkv(q_len=70, kv_len=90, dim=16, value_dim=16)]
    options = dict(bias=normal(1, 4, 70, 90).to(dtype), sinks=normal(4).to(dtype), causal=True, align="bottom_right")
    doubled = [t.double() for t in tensors]
    truth = results(Naive(), *doubled, **(options | dict(bias=options["bias"].double(), sinks=options["sinks"].double())))
    found, naive = results(Tiled(TileSizes(16, 32, 3)), *tensors, **options), results(Naive(), *tensors, **options)
    for name in RESULTS:
        assert found[name].dtype == naive[name].dtype, name
        error, allowed = ((x[name].double() - truth[name]).abs().max() for x in (found, naive))
        allowed = 2 * allowed + 4 * torch.finfo(torch.float32).eps * truth[name].abs().max()
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


# Values at the edges


def test_rows_with_no_key() -> None:
    q, k, v = qkv(batch=1, q_heads=2, kv_heads=1)
    found = results(Tiled(TINY), q, k, v, mask=torch.zeros(9, 13, dtype=torch.bool))
    assert torch.equal(found["lse"], torch.full((1, 2, 9), -torch.inf, dtype=torch.float64))
    for name in ("o", "dq", "dk", "dv"):
        assert not found[name].any(), f"{name} of rows with no key is not 0"
    sinks = torch.tensor([1.5, -2.0], dtype=torch.float64)
    found = results(Tiled(TINY), q, k, v, mask=torch.zeros(9, 13, dtype=torch.bool), sinks=sinks)
    assert torch.equal(found["lse"], sinks[None, :, None].expand(1, 2, 9))
    assert not found["o"].any(), "the output of rows with no key is not 0"


@pytest.mark.parametrize("shift", [1e4, -1e4, 1e30])
def test_a_shift_of_the_scores_changes_nothing(shift: float) -> None:
    q, k, v = (t.float() for t in qkv())
    bias = torch.full((9, 13), shift)
    found = results(Tiled(TINY), q, k, v, bias=bias)
    truth = results(Naive(), q.double(), k.double(), v.double(), bias=bias.double())
    # what adding the shift in fp32 rounds away from every score
    lost = torch.finfo(torch.float32).eps * abs(shift)
    if lost < 1.0:
        torch.testing.assert_close(found["o"].double(), truth["o"], rtol=0, atol=4 * lost)
    assert found["o"].isfinite().all(), "a shift made the output infinite or nan"


def test_a_row_of_lowest_biases_is_the_mean_of_the_values() -> None:
    q, k, v = (t.float() for t in qkv(q_heads=2))
    bias = torch.full((9, 13), torch.finfo(torch.float32).min)
    found, truth = results(Tiled(TINY), q, k, v, bias=bias), results(Naive(), q, k, v, bias=bias)
    torch.testing.assert_close(found["o"], v.mean(2, keepdim=True).expand(2, 2, 9, 3))
    assert_agree(found, truth, tolerance=1e-5)


def test_first_tile_with_no_key_changes_nothing() -> None:
    q, k, v = qkv(kv_len=12)
    mask = torch.ones(9, 12, dtype=torch.bool)
    mask[:, :4] = False
    with_empty_tile, without = results(Tiled(TINY), q, k, v, mask=mask), results(Tiled(TINY), q, k[:, :, 4:], v[:, :, 4:])
    for name in ("o", "lse", "dq"):
        assert torch.equal(with_empty_tile[name], without[name]), name


# What is skipped


def tiles_of(options: dict[str, Any], length: int = 16, sizes: TileSizes = TINY) -> list[Tile]:
    spec, inputs = described(*qkv(batch=1, q_heads=1, kv_heads=1, q_len=length, kv_len=length), **options)
    return [tile for _, tiles in query_tiles(spec, inputs, sizes) for tile in tiles]


def two_blocks_a_row(rows: int) -> Tensor:
    return torch.eye(rows, dtype=torch.bool) | torch.eye(rows, dtype=torch.bool).roll(2, 1)


@pytest.mark.parametrize(
    ("options", "computed", "masked"),
    [
        ({}, 16, 0),
        (dict(causal=True), 10, 4),
        (dict(window=(0, 0)), 4, 4),
        (dict(window=(4, 0)), 7, 7),
        (dict(segment_ids=(torch.arange(16) // 4)[None]), 4, 0),
        (dict(segment_ids=(torch.arange(16) // 8)[None]), 8, 0),
        (dict(segment_ids=(torch.arange(16) // 8)[None], causal=True), 6, 4),
        (dict(segment_ids=(torch.arange(16) // 6)[None]), 8, 3),
        (dict(segment_ids=torch.tensor([[5] * 4 + [1] * 4 + [5] * 4 + [1] * 4])), 8, 0),
        (dict(layout=BlockLayout.from_blocks(two_blocks_a_row(4), block=4)), 8, 0),
        (dict(layout=BlockLayout.from_blocks(two_blocks_a_row(4), block=4), causal=True), 6, 4),
        (dict(layout=BlockLayout.from_dense(torch.ones(16, 16, dtype=torch.bool).tril(), block=4)), 10, 4),
        (dict(mask=torch.ones(16, 16, dtype=torch.bool)), 16, 0),
    ],
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else str(value),
)
def test_tiles_left_out_and_tiles_masked(options: dict[str, Any], computed: int, masked: int) -> None:
    tiles = tiles_of(options)
    assert len(tiles) == computed
    assert sum([tile.crosses_band or tile.crosses_segments or tile.partial is not None for tile in tiles]) == masked


def test_small_blocks_share_a_tile() -> None:
    layout = BlockLayout.from_blocks(two_blocks_a_row(8), block=2)
    tiles = tiles_of(dict(layout=layout), sizes=TileSizes(rows=4, columns=8, heads=1))
    assert len(tiles) == 8, "the two blocks of a row fit one tile"
    assert isinstance(tiles[0].columns, Tensor)
    assert tiles[0].columns.tolist() == [0, 1, 4, 5]


POISONED: dict[str, tuple[dict[str, Any], slice]] = {
    # the options, and the keys of 16 that queries 0 to 3 don't reach
    "causal": (dict(causal=True), slice(4, 16)),
    "window": (dict(window=(4, 1)), slice(8, 16)),
    "segments": (dict(segment_ids=(torch.arange(16) // 4)[None]), slice(4, 16)),
    "segments-scattered": (dict(segment_ids=torch.tensor([[5] * 4 + [1] * 4 + [5] * 4 + [1] * 4])), slice(4, 8)),
    "layout": (dict(layout=BlockLayout.from_blocks(two_blocks_a_row(4), block=4)), slice(4, 8)),
    "layout-small": (dict(layout=BlockLayout.from_blocks(two_blocks_a_row(8), block=2)), slice(8, 16)),
}


@pytest.mark.parametrize(("options", "poisoned"), POISONED.values(), ids=POISONED)
def test_nan_in_skipped_tiles_reaches_nothing(options: dict[str, Any], poisoned: slice) -> None:
    q, k, v = qkv(batch=1, q_heads=1, kv_heads=1, q_len=16, kv_len=16)
    clean = results(Tiled(TINY), q, k, v, **options)
    k[:, :, poisoned], v[:, :, poisoned] = torch.nan, torch.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    spec, inputs = described(*leaves, **options)
    o, lse = Tiled(TINY).attend(spec, inputs)
    assert lse is not None
    assert torch.equal(o[:, :, :4], clean["o"][:, :, :4])
    assert torch.equal(lse[:, :, :4], clean["lse"][:, :, :4])
    assert o[:, :, 4:].isnan().any(), "the poison was seen by nobody, so the test shows nothing"


def test_nan_of_another_head_reaches_nothing_where_layouts_differ() -> None:
    q, k, v = qkv(batch=1, q_heads=2, kv_heads=2, q_len=8, kv_len=8)
    blocks = torch.tensor([[[True, False], [True, False]], [[True, True], [True, True]]])[None]
    k[:, 0, 4:], v[:, 0, 4:] = torch.nan, torch.nan
    found = results(Tiled(TileSizes(4, 4, 8)), q, k, v, layout=BlockLayout.from_blocks(blocks, block=4))
    assert all([found[name].isfinite().all() for name in ("o", "lse", "dq", "dk", "dv")])


def test_no_segment_id_is_read_off_the_cpu() -> None:
    q, k, v = (t.to("meta") for t in qkv(q_len=8, kv_len=8))
    ids = torch.empty(2, 8, dtype=torch.int64, device="meta")
    spec, inputs = described(q, k, v, segment_ids=ids)
    tiles = [tile for _, tiles in query_tiles(spec, inputs, TINY) for tile in tiles]
    assert len(tiles) == 4
    assert all([tile.crosses_segments for tile in tiles])


# Memory and sizes


def peak_bytes(backend: Backend, length: int) -> int:
    """Most bytes held at once by a forward and a backward, beyond the inputs."""
    q, k, v = (torch.randn(1, 1, length, 16).requires_grad_() for _ in range(3))
    spec, inputs = described(q, k, v, causal=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        o, _ = backend.attend(spec, inputs)
        torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def test_memory_is_linear_in_the_length() -> None:
    tiled = Tiled(TileSizes(rows=64, columns=64, heads=1))
    short, long = peak_bytes(tiled, 512), peak_bytes(tiled, 2048)
    assert short > 0
    assert long <= 4 * short
    naive = 16 * peak_bytes(Naive(), 512)  # quadratic
    assert long < 0.03 * naive, f"tiled holds {long} bytes at length 2048, naive {naive}"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kv_heads", [1, 32])
@pytest.mark.parametrize("length", [0, 1, 100, 4096, 2**20])
def test_chosen_tiles_are_bounded(length: int, kv_heads: int, device: str) -> None:
    q, k, v = (torch.empty(1, 1, 1, 1, device=device).expand(2, heads, length, 64) for heads in (32, kv_heads, kv_heads))
    sizes = choose_sizes(AttentionSpec.of(q, k, v))
    assert sizes.rows >= 1
    assert sizes.columns >= 1
    assert sizes.heads >= 1
    assert sizes.rows * sizes.columns * max(sizes.heads, 32 // kv_heads) <= 2**24


def test_grouped_heads_read_keys_where_they_lie() -> None:
    q, k, v = qkv()
    spec, inputs = described(q, k, v)
    for chunk in head_chunks(spec, inputs, heads=2):
        assert chunk.group == 2
        assert chunk.keys(k).data_ptr() == k[chunk.batch, chunk.kv_heads].data_ptr()


# Gradients asked for, inputs left alone, equal bits


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("bias",), ("sinks",), ("q", "v", "sinks")], ids="-".join)
def test_only_the_gradients_asked_for(wanted: tuple[str, ...]) -> None:
    q, k, v = qkv()
    named = dict(q=q, k=k, v=v, bias=normal(1, 4, 9, 13), sinks=normal(4))
    expected = results(Naive(), q, k, v, bias=named["bias"], sinks=named["sinks"])
    for name in wanted:
        named[name] = named[name].detach().requires_grad_()
    spec, inputs = described(**named)
    with torch.no_grad():
        o, lse = Tiled(TINY).forward(spec, inputs)
        generator = torch.Generator().manual_seed(11)
        upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (o, lse)]
        grads = Tiled(TINY).backward(spec, inputs, o, lse, *upstream)
    for name in named:
        grad = getattr(grads, name)
        if name not in wanted:
            assert grad is None, f"a gradient of {name} that nobody asked for"
        else:
            torch.testing.assert_close(grad, expected[f"d{name}"])


def test_inputs_are_not_written() -> None:
    q, k, v = qkv()
    options = ARGUMENTS["everything"]
    tensors = [q, k, v, *[value for value in options.values() if isinstance(value, Tensor)], *options["segment_ids"]]
    before = [t.clone() for t in tensors]
    results(Tiled(TINY), q, k, v, **options)
    assert all([torch.equal(t, saved) for t, saved in zip(tensors, before)])


def test_equal_calls_give_equal_bits() -> None:
    tensors, options = [t.float() for t in qkv(q_len=100, kv_len=100)], dict(causal=True, dropout_p=0.1, dropout_seed=4)
    first, second = (results(Tiled(TileSizes(16, 32, 2)), *tensors, **options) for _ in range(2))
    assert all([torch.equal(first[name], second[name]) for name in first])


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 1, 0, 3), (0, 1, 3, 2)], ids=str)
def test_any_strides(order: tuple[int, ...]) -> None:
    tensors = qkv()
    inverse = [order.index(dim) for dim in range(4)]
    strided = [t.permute(order).contiguous().permute(inverse) for t in tensors]
    assert_agree(results(Tiled(TINY), *strided), results(Naive(), *tensors))


# The recurrence


def test_online_softmax_step_by_hand() -> None:
    ln2 = torch.tensor(2.0, dtype=torch.float64).log()
    values = torch.tensor([[[1.0], [10.0]]], dtype=torch.float64)
    state, rescale = online_softmax_step(None, torch.stack([torch.zeros_like(ln2), ln2]).view(1, 1, 2), values)
    assert rescale is None
    torch.testing.assert_close([t.item() for t in state], [ln2.item(), 1.5, 10.5])
    state, rescale = online_softmax_step(state, torch.stack([2 * ln2, -torch.inf * ln2]).view(1, 1, 2), values)
    assert rescale is not None
    torch.testing.assert_close([rescale.item(), *[t.item() for t in state]], [0.5, 2 * ln2.item(), 1.75, 6.25])
    o, lse = finish(state)
    torch.testing.assert_close([o.item(), lse.item()], [6.25 / 1.75, (7 * torch.ones(1).double()).log().item()])


def test_a_tile_with_no_key_leaves_the_state_alone() -> None:
    values, empty = normal(1, 2, 3), torch.full((1, 1, 2), -torch.inf, dtype=torch.float64)
    state, _ = online_softmax_step(None, normal(1, 1, 2), values)
    after, rescale = online_softmax_step(state, empty.clone(), values)
    assert rescale is not None
    assert rescale.item() == 1.0
    assert all([torch.equal(a, b) for a, b in zip(after, state)])
    nothing, _ = online_softmax_step(None, empty.clone(), values)
    assert nothing.m.item() == -torch.inf
    assert nothing.l.item() == 0.0


def test_a_sink_is_a_key_without_value() -> None:
    sinks = torch.tensor([[[0.25]]], dtype=torch.float64)
    o, lse = finish(sink_state(sinks, 3))
    assert not o.any()
    assert torch.equal(lse, sinks)
