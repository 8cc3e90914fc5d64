"""The Triton kernels of flash against naive in float64, run by Triton's interpreter; what the launchers decide; refusals."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.backends import flash
from attnzoo.backends.flash import LONGEST, Flash, is_small
from attnzoo.backends.naive import Naive
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "h200"
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed (extra triton)")
interpreted = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="needs triton, in its interpreter (TRITON_INTERPRET=1)"
)

# of numpy, which the interpreter computes with: of lanes that are masked out afterwards, and of what triton takes from an array
pytestmark = [
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

TENSORS = ("mask", "bias", "sinks", "segment_ids", "dropout_seed")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(
    *, batch: int = 1, q_heads: int = 2, kv_heads: int = 1, q_len: int = 70, kv_len: int = 45, dim: int = 16, value_dim: int = 16
) -> list[Tensor]:
    shapes = ((batch, q_heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, value_dim))
    return [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def described(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[AttentionSpec, AttentionInputs]:
    spec = AttentionSpec.of(q, k, v, return_lse=True, **options)
    return spec, AttentionInputs.of(spec, q, k, v, **{name: options[name] for name in TENSORS if name in options})


def results(backend: Any, tensors: list[Tensor], dtype: torch.dtype, wanted: tuple[str, ...], options: dict[str, Any]) -> dict[str, Tensor]:
    """`o`, lse and the gradients of `wanted`, for fixed gradients of o and lse."""
    named = dict(zip("qkv", [tensor.to(dtype) for tensor in tensors]))
    named |= {name: options[name].to(dtype) for name in ("bias", "sinks") if name in options}
    leaves = {name: tensor.detach().requires_grad_(name in wanted) for name, tensor in named.items()}
    extras = {name: leaves[name] for name in ("bias", "sinks") if name in leaves}
    o, lse = backend.attend(*described(leaves["q"], leaves["k"], leaves["v"], **{**options, **extras}))
    upstream = [normal(*o.shape, seed=8).to(o.dtype), normal(*lse.shape, seed=9).to(lse.dtype)]
    outputs = [(out, up) for out, up in zip((o, lse), upstream) if out.requires_grad]
    names = [name for name in leaves if name in wanted]
    grads = torch.autograd.grad([out for out, _ in outputs], [leaves[n] for n in names], [up for _, up in outputs]) if names else ()
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(names, grads))}


def assert_matches_naive(
    tensors: list[Tensor], dtype: torch.dtype = torch.float32, wanted: tuple[str, ...] = ("q", "k", "v", "bias", "sinks"), **options: Any
) -> None:
    """flash in `dtype` and naive in float64, on inputs rounded to `dtype`, agree relative to each result's largest value."""
    rounded = [tensor.to(dtype).double() for tensor in tensors]
    options |= {name: options[name].to(dtype).double() for name in ("bias", "sinks") if name in options}
    found = results(Flash(), rounded, dtype, wanted, options)
    for name, want in results(Naive(), rounded, torch.float64, wanted, options).items():
        got = found[name].double()
        assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        assert torch.equal(got.isneginf(), want.isneginf()), f"{name}: -inf in other places"
        assert got.isfinite().logical_or(got.isneginf()).all(), f"{name} holds a nan or inf"
        if not want.numel():
            continue
        error = (got - want).nan_to_num(0.0).abs().max() / want.nan_to_num(neginf=0.0).abs().max().clamp(min=1e-2)
        assert error <= TOLERANCE[dtype], f"{name}: error {error:.1e} of its largest value, {TOLERANCE[dtype]:.0e} allowed"


def random_bool(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.6


IDS = torch.tensor([[0] * 30 + [1] * 50 + [-7] * 20])
SHUFFLED = (torch.arange(30)[None] % 4, (torch.arange(150)[None] // 40) % 4)

# qkv's arguments, then attention's
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal-top-left": ({}, {"causal": True, "align": "top_left"}),
    "causal-bottom-right-rows-without-keys": ({}, {"causal": True, "align": "bottom_right"}),
    "causal-bottom-right-longer-keys": ({"q_len": 40, "kv_len": 75}, {"causal": True, "align": "bottom_right"}),
    "window": ({"q_len": 100, "kv_len": 100}, {"window": (20, 7)}),
    "window-left-alone": ({"q_len": 66, "kv_len": 90}, {"window": (5, None), "align": "bottom_right"}),
    "window-causal": ({"q_len": 100, "kv_len": 100}, {"window": (30, None), "causal": True}),
    "mask": ({}, {"mask": random_bool(1, 2, 70, 45)}),
    "mask-of-keys": ({}, {"mask": random_bool(1, 1, 1, 45)}),
    "mask-transposed": ({}, {"mask": random_bool(1, 2, 45, 70).mT}),
    "bias": ({}, {"bias": normal(1, 2, 70, 45, seed=4)}),
    "bias-of-all-batches": ({"batch": 2}, {"bias": normal(1, 2, 70, 45, seed=4), "causal": True, "align": "top_left"}),
    "bias-of-keys": ({"batch": 2, "q_len": 40}, {"bias": normal(2, 1, 1, 45, seed=4)}),
    "bias-of-queries": ({"batch": 2, "q_len": 40}, {"bias": normal(1, 2, 40, 1, seed=4)}),
    "bias-of-everything": ({}, {"bias": normal(1, 1, 1, 1, seed=4)}),
    "segments-sorted": ({"q_heads": 1, "q_len": 100, "kv_len": 100}, {"segment_ids": IDS}),
    "segments-shuffled": ({"q_len": 30, "kv_len": 150}, {"segment_ids": SHUFFLED}),
    "scale-zero": ({}, {"scale": 0.0}),
    "scale-negative": ({}, {"scale": -0.4}),
    "softcap": ({}, {"softcap": 1.5, "bias": normal(70, 45, seed=4)}),
    "sinks": ({}, {"sinks": torch.tensor([0.7, -torch.inf])}),
    "sinks-of-rows-without-keys": ({}, {"sinks": torch.tensor([0.7, -0.3]), "causal": True, "align": "bottom_right"}),
    "dropout": ({"batch": 2, "q_len": 40, "kv_len": 25}, {"dropout_p": 0.3, "dropout_seed": -(2**40) - 77}),
    "grouped-heads": ({"q_heads": 6, "kv_heads": 2, "q_len": 33}, {"causal": True, "align": "top_left"}),
    "dims-24-40": ({"dim": 24, "value_dim": 40}, {}),
    "dims-5-1": ({"dim": 5, "value_dim": 1}, {}),
    "dims-33-17": ({"dim": 33, "value_dim": 17}, {"bias": normal(1, 2, 70, 45, seed=4)}),
    "dims-17-33": ({"dim": 17, "value_dim": 33}, {}),
    "dim-0": ({"dim": 0}, {}),
    "no-keys": ({"kv_len": 0}, {"sinks": torch.tensor([0.7, -0.3])}),
    "no-queries": ({"q_len": 0}, {"bias": normal(1, 2, 1, 45, seed=4)}),
    "no-values": ({"value_dim": 0}, {}),
    "one-query-split": ({"q_heads": 4, "kv_heads": 2, "q_len": 1, "kv_len": 150}, {"sinks": normal(4, seed=6)}),
    "few-queries-split": ({"q_len": 5, "kv_len": 140}, {"causal": True, "align": "bottom_right"}),
    "few-queries-split-dropout": ({"q_len": 3, "kv_len": 140}, {"dropout_p": 0.5, "dropout_seed": 3, "bias": normal(1, 2, 3, 140, seed=4)}),
    "few-queries-split-window": ({"q_len": 3, "kv_len": 150}, {"window": (40, 2), "align": "bottom_right"}),
}


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_matches_naive(name: str) -> None:
    sizes, options = CASES[name]
    assert_matches_naive(qkv(**sizes), **options)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_matches_naive_in_half_precision(dtype: torch.dtype) -> None:
    assert_matches_naive(qkv(), dtype, causal=True, align="top_left", bias=normal(1, 1, 70, 45, seed=4))


@interpreted
@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("bias",), ("sinks",), ()], ids=" ".join)
def test_only_the_gradients_asked_for(wanted: tuple[str, ...]) -> None:
    assert_matches_naive(qkv(), wanted=wanted, bias=normal(70, 45, seed=4), sinks=normal(2, seed=6))


@interpreted
def test_any_strides() -> None:
    packed = normal(2, 20, 3, 4, 24)
    q, k, v = [packed[:, :, n, :, 3:19].transpose(1, 2) for n in range(3)]
    assert_matches_naive([q, k[:, :1].expand(2, 4, 20, 16), v.flip(0)])


@interpreted
def test_gradient_of_o_with_any_strides() -> None:
    tensors = [tensor.float().requires_grad_() for tensor in qkv(q_heads=1, q_len=40)]
    o, _ = Flash().attend(*described(*tensors))
    upstream = normal(1, 1, 16, 40).float()
    one = torch.autograd.grad(o, tensors, upstream.mT, retain_graph=True)
    other = torch.autograd.grad(o, tensors, upstream.mT.contiguous())
    assert all(map(torch.equal, one, other)), "the strides of grad_o change the gradients"


@interpreted
@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_shifted_scores(shift: float) -> None:
    tensors = [tensor.float() for tensor in qkv()]
    plain, _ = Flash().attend(*described(*tensors))
    shifted, _ = Flash().attend(*described(*tensors, bias=torch.full((70, 45), shift)))
    assert (plain - shifted).abs().max() < 4e-3, f"a shift of all scores by {shift} changes o by {(plain - shifted).abs().max():.1e}"


@interpreted
def test_bias_of_the_lowest_number_gives_the_mean() -> None:
    q, k, v = [tensor.float() for tensor in qkv()]
    o, _ = Flash().attend(*described(q, k, v, bias=torch.full((70, 45), torch.finfo(torch.float32).min)))
    assert (o - v.mean(2, keepdim=True)).abs().max() < 1e-5, "a row of finfo.min is not the mean of v"


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("q_len", [1, 4])
def test_bias_of_the_lowest_number_over_split_keys(q_len: int, dtype: torch.dtype) -> None:
    """Each share counts by the keys that it saw, of which the first has a few: their number is lost in an lse of finfo.min."""
    mask = torch.ones(1, 1, 1, 300, dtype=torch.bool)
    mask[..., 1:80] = False
    bias = torch.full((1, 1, q_len, 300), torch.finfo(torch.float32).min, dtype=torch.float64)
    if dtype == torch.float32:
        assert_matches_naive(qkv(q_len=q_len, kv_len=300), mask=mask, bias=bias)
        return
    q, k, v = [tensor.to(dtype) for tensor in qkv(q_len=q_len, kv_len=300)]
    o, _ = Flash().attend(*described(q, k, v, mask=mask, bias=bias.float()))
    assert (o - v[:, :, mask[0, 0, 0]].mean(2, keepdim=True)).abs().max() < 1e-3


@interpreted
@pytest.mark.parametrize("scale", [1e-50, 1e-42, 3e38, 1e39])
def test_scales_at_the_ends_of_fp32(scale: float) -> None:
    """A score of -inf times a scale that became 0, or 0 times one that became infinite, is not a number."""
    q, k, v = qkv()
    tensors = [q * (0.0 if scale > 3.4e38 else 1e-38 if scale > 1 else 1.0), k, v]
    assert_matches_naive(tensors, wanted=("v",), scale=scale)
    assert_matches_naive(tensors, wanted=("v",), scale=scale, causal=True, align="top_left")


@interpreted
@pytest.mark.parametrize("softcap", [1e-50, 1e39])
def test_soft_caps_beyond_the_ends_of_fp32(softcap: float) -> None:
    q, k, v = qkv(q_len=20)
    assert_matches_naive([q * (normal(1, 2, 20, 1, seed=5) > 0), k, v], softcap=softcap)


@interpreted
@pytest.mark.parametrize("sink", [1e300, -1e300])
def test_sinks_of_float64_beyond_fp32(sink: float) -> None:
    q, k, v = [tensor.float() for tensor in qkv(q_len=20, kv_len=12)]
    options = {"sinks": torch.tensor([sink, 0.5], dtype=torch.float64), "causal": True, "align": "bottom_right"}
    for found, expected in zip(Flash().attend(*described(q, k, v, **options)), Naive().attend(*described(q, k, v, **options))):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("sink", [-1.0, torch.finfo(torch.float32).min], ids=str)
def test_gradients_where_the_lse_can_not_count_the_keys(sink: float) -> None:
    lowest = torch.full((1, 2, 70, 45), torch.finfo(torch.float32).min)
    lowest[:, 1, ::2] = 0.0  # rows of both kinds in one tile
    assert_matches_naive(qkv(), bias=lowest, sinks=torch.tensor([sink, sink]), causal=True, align="bottom_right")
    assert_matches_naive(qkv(), bias=lowest, mask=random_bool(1, 1, 70, 45))


def spread(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def swapped(tensor: Tensor) -> Tensor:
    return tensor.mT.clone(memory_format=torch.contiguous_format).mT if tensor.ndim > 1 else tensor.clone()


@interpreted
@pytest.mark.parametrize(("hook", "is_packed"), [(torch.clone, True), (spread, False), (swapped, False)], ids=["rows", "spread", "swapped"])
def test_hooks_on_saved_tensors_may_change_their_strides(hook: Callable[[Tensor], Tensor], is_packed: bool) -> None:
    packed = normal(1, 24, 3, 2, 16).float()
    q, k, v = [packed[:, :, n].transpose(1, 2) if is_packed else normal(1, 2, 24, 16, seed=n).float() for n in range(3)]
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, normal(2, seed=6).float())]
    upstream = normal(1, 2, 24, 16).float()
    options: dict[str, Any] = {"segment_ids": torch.arange(24)[None] // 15, "mask": random_bool(1, 2, 24, 24), "dropout_p": 0.2}

    def gradients() -> tuple[Tensor, ...]:
        o, _ = Flash().attend(*described(q, k, v, sinks=leaves[3], dropout_seed=3, **options))
        return torch.autograd.grad(o, leaves, upstream)

    plain = gradients()
    with torch.autograd.graph.saved_tensors_hooks(hook, lambda saved: saved):
        hooked = gradients()
    assert all([torch.equal(one, other) for one, other in zip(plain, hooked)]), "a copy of the saved tensors changes the gradients"


@interpreted
@pytest.mark.parametrize(
    "name", ["q", "k", "v", "o", "the lse", "mask", "bias", "q's segment_ids", "k's segment_ids", "sinks", "dropout_seed"]
)
@pytest.mark.parametrize("change", ["dtype", "shape", "device"])
def test_a_hook_on_saved_tensors_that_does_not_give_back_what_it_got(name: str, change: str) -> None:
    """A kernel would read the bits of another type, or beyond the end, without a word."""
    order = ("q", "k", "v", "mask", "bias", "q's segment_ids", "k's segment_ids", "sinks", "dropout_seed", "o", "the lse")
    changed = {
        "dtype": lambda saved: saved.double() if saved.is_floating_point() else saved.short(),
        "shape": lambda saved: torch.cat([saved, saved], -1),
        "device": lambda saved: saved.to("meta"),
    }[change]
    q, k, v = [tensor.float().requires_grad_() for tensor in qkv(q_len=20, kv_len=24)]
    ids = (torch.arange(20)[None] // 15, torch.arange(24)[None] // 15)
    tables = {"mask": random_bool(1, 2, 20, 24), "bias": normal(1, 2, 20, 24).float(), "sinks": normal(2).float()}
    count = iter(range(len(order)))
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: (next(count), saved), lambda packed: take(*packed)):
        o, _ = Flash().attend(*described(q, k, v, segment_ids=ids, dropout_p=0.2, dropout_seed=3, **tables))

    def take(place: int, saved: Tensor) -> Tensor:
        return changed(saved) if order[place] == name else saved

    if change == "dtype" and "segment_ids" in name:
        o.sum().backward()  # their dtype is the tensors' own affair
        return
    with pytest.raises(TypeError, match=f"a hook on saved tensors gave {name} back as"):
        o.sum().backward()


@interpreted
def test_segment_ids_of_two_dtypes() -> None:
    ids = (torch.full((1, 70), 200, dtype=torch.uint8), torch.full((1, 45), -56, dtype=torch.int8))  # the same bits
    o, lse = Flash().attend(*described(*[tensor.float() for tensor in qkv()], segment_ids=ids))
    assert lse is not None
    assert lse.isneginf().all(), "200 and -56 are taken for one segment"
    assert not o.any()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # raised while torch loads its forward-mode rules
@interpreted
def test_transforms_and_tangents_are_refused() -> None:
    q, k, v = [tensor.float() for tensor in qkv()]
    with pytest.raises(NotImplementedError, match="name backend='naive'"):
        torch.func.vmap(lambda q: Flash().attend(*described(q, k, v))[0])(torch.stack([q, q]))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="q carries a tangent"):
            Flash().attend(*described(dual, k, v))


@interpreted
def test_views_that_stand_for_their_negative() -> None:
    q, k, v = [tensor.float() for tensor in qkv()]
    found, _ = Flash().attend(*described(torch._neg_view(q), k, v))
    assert torch.equal(found, Flash().attend(*described(-q, k, v))[0])
    wide, bias, sinks = normal(1, 2, 70, 32, seed=3).float(), normal(70, 45, seed=4).float(), normal(2, seed=5).float()
    found, _ = Flash().attend(*described(torch._neg_view(wide)[..., :16], k, v, bias=torch._neg_view(bias), sinks=torch._neg_view(sinks)))
    assert torch.equal(found, Flash().attend(*described(-wide[..., :16], k, v, bias=-bias, sinks=-sinks))[0])


@interpreted
def test_gradients_that_stand_for_their_negative() -> None:
    tensors = [tensor.float().requires_grad_() for tensor in qkv()]
    outputs = Flash().attend(*described(*tensors))
    upstream = [torch.ones_like(output) for output in outputs if output is not None]
    found = torch.autograd.grad(outputs, tensors, [torch._neg_view(grad) for grad in upstream], retain_graph=True)
    assert all(map(torch.equal, found, torch.autograd.grad(outputs, tensors, [-grad for grad in upstream])))


@interpreted
def test_sinks_of_any_stride() -> None:
    assert_matches_naive(qkv(q_heads=4), sinks=normal(4, 3, seed=6)[:, 1])
    assert_matches_naive(qkv(q_heads=4), sinks=normal(1, seed=6).expand(4))


@needs_triton
def test_a_binary_is_loaded_before_another_thread_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnzoo.backends.triton import launch
    from attnzoo.backends.triton.table import Tile

    class Binary:
        is_loaded = False

        @property
        def run(self) -> None:
            self.is_loaded = True

    monkeypatch.setattr(launch.triton, "compile", lambda *parts, **options: Binary())
    monkeypatch.setattr(launch.Kernel, "source", lambda *parts: None)
    kernel = launch.Kernel(None)
    plan = launch.Plan(kernel, Tile(64, 64, 4, 1), {}, (), 1, (), (9, 0), torch.device("cuda", 0))
    assert kernel._binary(plan, (), (), ()).is_loaded, "the module would be loaded outside of the lock"


@interpreted
def test_threads_take_turns_in_the_interpreter() -> None:
    """It turns triton's functions into its own for as long as a kernel runs, and back again under another thread's feet."""
    tensors = [[tensor.float() for tensor in qkv(q_len=length)] for length in (5, 9, 17, 33)]
    expected = [Flash().attend(*described(*each))[0] for each in tensors]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: [Flash().attend(*described(*each))[0] for _ in range(4)], tensors))
    assert all([torch.equal(one, truth) for ones, truth in zip(found, expected) for one in ones])


@interpreted
def test_equal_calls_give_equal_bits() -> None:
    one, other = [results(Flash(), qkv(), torch.float32, ("q", "k", "v"), {"deterministic": True}) for _ in range(2)]
    assert all([torch.equal(one[name], other[name]) for name in one]), "two equal calls differ"


@interpreted
def test_rows_far_apart() -> None:
    from attnzoo.backends.triton import problem

    q, k, v = [tensor.float() for tensor in qkv()]
    near = Flash().attend(*described(q, k, v))[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problem, "LARGEST_TILE", 2**31)
        problem.facts_of.cache_clear()
        assert problem.is_wide(problem.strided(q)), "the test does not reach 64-bit offsets"
        far = Flash().attend(*described(q, k, v))[0]
    problem.facts_of.cache_clear()
    assert torch.equal(near, far), "64-bit offsets within a tile change the result"


# What the launchers decide


@needs_triton
@pytest.mark.parametrize(("tiles", "most", "splits"), [(8, 128, 29), (264, 128, 1), (1, 4, 4), (64, 128, 4), (8, 1, 1), (0, 4, 1)])
def test_splits_fill_the_card(tiles: int, most: int, splits: int) -> None:
    from attnzoo.backends.triton.launchers import best_splits

    assert best_splits(tiles, most, 264) == splits


@needs_triton
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_table_has_a_tile_for_every_head_dim(capability: tuple[int, int], dtype: torch.dtype) -> None:
    from attnzoo.backends.triton.table import FEATURED, tile_for

    for kernel in FEATURED:
        for dim in (0, 1, 64, 65, 256):
            for is_featured in (False, True) if kernel != "backward_bias" else (True,):
                tile = tile_for(kernel, dim, 1, dtype, capability, is_featured)
                assert min(tile.block_m, tile.block_n) >= 16, f"{kernel} at {dim}: tl.dot needs 16 rows, {tile}"
                assert max(tile.block_m, tile.block_n) <= 128, f"{kernel} at {dim}: rows are padded to 128, {tile}"


@needs_triton
def test_the_table_is_what_tuning_found() -> None:
    """Committed results of `flash_gpu.py tune`: the tile that is best with and without causal together."""
    from attnzoo.backends.triton.table import HOPPER, Tile

    tuned = json.loads((RESULTS / "flash.json").read_text())["tune"]
    rates: dict[tuple[str, int], dict[Tile, float]] = {}
    for kernel, dim, _, found in tuned:
        for rate, tile in found:
            known = rates.setdefault((kernel, dim), {})
            known[Tile(*tile)] = known.get(Tile(*tile), 1.0) * rate
    for (kernel, dim), tiles in rates.items():
        assert HOPPER[kernel][dim] == max(tiles, key=tiles.__getitem__), f"{kernel} at {dim}: another tile was faster"


@pytest.mark.parametrize(
    ("batch", "length", "dim", "expected"),
    [
        (1, 64, 128, True),
        (1, 512, 64, True),
        (4, 256, 64, True),
        (32, 512, 64, False),
        (1, 2048, 64, False),
        (1, 128, 128, False),
        (1, 2048, 128, False),
    ],
)
def test_small_forwards_stay_off_the_hopper_kernels(batch: int, length: int, dim: int, expected: bool, processors: None) -> None:
    q = torch.empty(batch, 16, length, dim, dtype=torch.bfloat16)
    assert is_small(AttentionSpec.of(q, q, q)) is expected


def test_the_choice_is_the_one_that_was_measured(processors: None) -> None:
    """The rule counts in tiles: another tile for other calls must not move it."""
    moved = []
    for call in json.loads((RESULTS / "flash.json").read_text())["route"]:
        dim, batch, heads, q_len, kv_len = call["sizes"]
        q, k = (torch.empty(batch, heads, length, dim, dtype=torch.bfloat16, device="meta") for length in (q_len, kv_len))
        chosen = "portable" if is_small(AttentionSpec.of(q, k, k, causal=call["causal"])) else "hopper"
        if chosen != call["chosen"]:
            moved.append(f"{call['sizes']} causal={call['causal']}: {chosen}, measured with {call['chosen']}")
    assert not moved, "\n".join(moved)


def test_the_page_says_how_often_the_choice_is_the_slower_kernel() -> None:
    measured = json.loads((RESULTS / "flash.json").read_text())["route"]
    losses = [call[call["chosen"]] / min(call["hopper"], call["portable"]) - 1 for call in measured]
    slower = [loss for loss in losses if loss > 0]
    said = f"both on {len(measured)} small calls; the choice is the slower one in {len(slower)}, by {max(slower):.0%} at most"
    first = measured[0]
    page = " ".join((RESULTS.parents[2] / "docs" / "flash.md").read_text().split())
    assert said in page, f"docs/flash.md does not say: {said}"
    assert f"({first['portable']:.1f} against {first['hopper']:.1f} us)" in page


def test_notes_say_which_kernel_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _ = described(*[tensor.half().requires_grad_() for tensor in qkv()], softcap=3.0)
    spec = dataclasses.replace(spec, device=torch.device("cuda", 0))
    monkeypatch.setattr(flash, "machine_reasons", lambda device: [])
    monkeypatch.setattr(flash.support, "machine_reasons", lambda device: [])
    forward, backward = Flash(is_interpreted=False).notes(spec)
    assert forward.startswith("forward: portable kernel: ")
    assert "softcap" in forward
    assert backward.startswith("backward: portable kernel: ")
    assert Flash(is_interpreted=False, kernels="portable").notes(spec)[0] == 'forward: portable kernel: Flash(kernels="portable")'


# Refusals


def reasons(backend: Flash, **facts: Any) -> list[str]:
    spec, _ = described(*[tensor.half() for tensor in qkv()])
    return backend.unsupported_reasons(dataclasses.replace(spec, **facts))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_a_reason() -> None:
    assert reasons(Flash(is_interpreted=False), device=torch.device("cuda", 7)), "no reason against cuda:7"


def test_refuses_the_cpu_unless_interpreted() -> None:
    assert any("device is cpu, it takes cuda" in reason for reason in reasons(Flash(is_interpreted=False)))


@needs_triton
@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"dtype": torch.float64}, "dtype is float64, it takes bfloat16, float16, float32"),
        ({"head_dim": 257}, "head_dim is 257, it takes 1 to 256"),
        ({"kv_len": LONGEST + 1}, f"a length is {LONGEST + 1}, it takes at most {LONGEST}"),
    ],
)
def test_refusals_name_what_was_found_and_what_is_allowed(facts: dict[str, Any], reason: str) -> None:
    assert reason in reasons(Flash(is_interpreted=True), **facts)
    assert reasons(Flash(is_interpreted=True)) == [], "refuses a plain call"


@interpreted
@pytest.mark.parametrize(("columns", "first"), [(16, 0), (32, 0), (32, 4), (64, 2**20)])
def test_dropout_serves_four_keys_or_one_with_the_same_elements(columns: int, first: int) -> None:
    """Tiles with a side below 32 ask Philox once a pair, wider ones once for four keys."""
    from dropout_tiles import kept_elements

    narrow, wide, truth = kept_elements(rows=32, columns=columns, first=first, seed=2**40 + 7, p=0.3)
    assert torch.equal(narrow, truth), "one call a pair keeps other elements"
    assert torch.equal(wide, truth), "one call for four keys keeps other elements"
