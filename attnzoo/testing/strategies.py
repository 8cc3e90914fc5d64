"""Hypothesis strategies of whole problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from attnzoo.testing.blocks import LAYOUTS
from attnzoo.testing.problem import DTYPES, Blocks, Problem, Segments, Sinks, Table

__all__ = ["ALL_FEATURES", "problems", "problems_of_variant"]

LENGTHS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 80, 97, 127, 128, 129, 150)
LONG = ((513, 513), (8, 1030), (97, 1030), (1030, 65))
WIDE = ((1, 4), (1, 8), (9, 1), (9, 2))
HEAD_DIMS = (1, 2, 5, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 120, 128)
BLOCKS = ((16, 16), (32, 16), (16, 32), (64, 64), (128, 128), (256, 256), (20, 24))
BOUNDS = (0, 1, 5, 16, 64, 200, 300)
STORAGES = (
    "contiguous",
    "bshd",
    "sbhd",
    "packed",
    "slack",
    "odd_rows",
    "step",
    "step_heads",
    "last_dim",
    "expand_batch",
    "expand_heads",
    "expand_length",
)
TABLE_STORAGES = ("contiguous", "slack", "odd_rows", "last_dim", "expand_batch", "expand_heads")
GRAD_STORAGES = ("contiguous", "bshd", "slack", "last_dim", "expand_batch", "sum", "row", "transpose")
LSE_GRAD_STORAGES = ("contiguous", "bshd", "step", "sum", "mean", "expand_heads")
ID_STORAGES = ("contiguous", "step", "expand_batch")
SINK_STORAGES = ("contiguous", "step_dim")
MASK_KINDS = ("random", "sparse", "all", "none", "empty_rows", "padding", "left_padding", "triangle", "one_key", "checker")
BIAS_KINDS = ("random", "zeros", "alibi", "minus_inf", "minus_inf_rows", "min")
BANDS = ("causal", "top_left", "bottom_right", "window")
EXTRAS = ("mask", "bias", "bias_grad", "segments", "layout", "softcap", "sinks", "dropout", "lse", "deterministic")
ALL_FEATURES = frozenset((*BANDS, *EXTRAS, "grouped_heads", "value_dim"))

# Hypothesis puts constants of whatever local modules are loaded among its integers, from 100 on: with choices of fewer
# than that, the problems are the same in every process and installation.
SEEDS = st.integers(0, 99)
DROPOUT_SEEDS = (0, 1, 2, 17, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40 + 5, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    features: frozenset[str] = ALL_FEATURES,
    dtypes: tuple[str, ...] = DTYPES,
    head_dims: tuple[int, int] = (1, 128),
    head_dim_multiple: int = 1,
    block_multiple: int = 1,
    has_grads: bool = True,
) -> Problem:
    """Problems that need no feature beyond those given; simpler ones come first when shrinking.

    Args:
        head_dims, head_dim_multiple, block_multiple: as in `Capabilities`.
        has_grads: whether inputs may need a gradient.
    """

    def wants(feature: str) -> bool:
        return feature in features and draw(st.booleans())

    dtype = draw(st.sampled_from(dtypes))
    dims = [dim for dim in HEAD_DIMS if head_dims[0] <= dim <= head_dims[1] and dim % head_dim_multiple == 0] or [head_dims[0]]
    sizes = _sizes(draw, features, dims, dtype)
    is_skewed = sizes["kv_len"] != sizes["q_len"]
    made: dict[str, Any] = {**sizes, "dtype": dtype}
    made |= _band(draw, features, is_skewed)
    if wants("mask"):
        made["mask"] = Table(draw(st.sampled_from(MASK_KINDS)), draw(_dims()), storage=draw(st.sampled_from(TABLE_STORAGES)))
    if wants("bias"):
        of_bias = draw(st.sampled_from((None, "float32")))
        made["bias"] = Table(draw(st.sampled_from(BIAS_KINDS)), draw(_dims()), storage=draw(st.sampled_from(TABLE_STORAGES)), dtype=of_bias)
    if wants("segments"):
        kind = draw(st.sampled_from(("documents", "single", "disjoint", "negative", "interleaved", "some_empty")))
        made["segments"] = Segments(kind, storage=draw(st.sampled_from(ID_STORAGES)))
    if wants("layout"):
        multiples = [block for block in BLOCKS if not any(side % block_multiple for side in block)]
        block = draw(st.sampled_from(multiples or [(block_multiple, block_multiple)]))
        made["layout"] = Blocks(draw(st.sampled_from(tuple(LAYOUTS))), block, draw(st.sampled_from(("11", "b1", "1h", "bh"))))
    if wants("softcap"):
        made["softcap"] = draw(st.sampled_from((0.5, 5.0, 50.0)))
    if wants("sinks"):
        kind = draw(st.sampled_from(("random", "zeros", "minus_inf", "some_minus_inf", "large")))
        made["sinks"] = Sinks(kind, draw(st.sampled_from((None, "float32"))), draw(st.sampled_from(SINK_STORAGES)))
    if wants("dropout"):
        made |= {"dropout_p": draw(st.sampled_from((0.1, 0.5, 0.9))), "dropout_seed": draw(st.sampled_from(DROPOUT_SEEDS))}
    made["scale"] = draw(st.sampled_from((None, 1.0, 0.0, -0.125, 0.3)))
    made["deterministic"] = wants("deterministic")
    made["storage"] = tuple(draw(st.sampled_from(STORAGES)) for _ in range(3))
    made["offset"] = draw(st.sampled_from((0, 1, 3, 8)))
    made |= _gradients(draw, features, made, has_grads)
    return Problem(**made, seed=draw(SEEDS))


def _sizes(draw: st.DrawFn, features: frozenset[str], dims: list[int], dtype: str) -> dict[str, int]:
    head_dim = draw(st.sampled_from(dims))
    extent = _extent(draw, dtype)
    group = draw(st.sampled_from((1, 2, 3))) if "grouped_heads" in features else 1
    return {
        **extent,
        "q_heads": extent["kv_heads"] * group,
        "head_dim": head_dim,
        "value_dim": draw(st.one_of(st.just(head_dim), st.sampled_from(dims))) if "value_dim" in features else head_dim,
    }


def _extent(draw: st.DrawFn, dtype: str, *, is_skewed: bool | None = None) -> dict[str, int]:
    """Batch, kv heads and lengths; of sixteen problems about one is long, with a head or two, and one has many heads or batch entries.

    None is long in fp64, where the rule of accuracy has no room for a long sum of equal terms, which rounds in one direction.

    Args:
        is_skewed: whether the lengths differ; None for either.
    """
    kind = draw(st.sampled_from((*("usual",) * 14, "wide", "wide" if dtype == "float64" else "long")))
    if kind == "long":
        pairs = [pair for pair in LONG if is_skewed is None or (pair[0] != pair[1]) is is_skewed]
        q_len, kv_len = draw(st.sampled_from(pairs))
        return {"batch": 1, "kv_heads": draw(st.integers(1, 2)), "q_len": q_len, "kv_len": kv_len}
    batch, kv_heads = draw(st.sampled_from(WIDE)) if kind == "wide" else (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    q_len = draw(st.sampled_from(LENGTHS))
    same, other = st.just(q_len), st.sampled_from([length for length in LENGTHS if not is_skewed or length != q_len])
    kv_len = draw(st.one_of(same, other) if is_skewed is None else other if is_skewed else same)
    return {"batch": batch, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}


def _band(draw: st.DrawFn, features: frozenset[str], is_skewed: bool) -> dict[str, Any]:
    """causal, window and align, as far as they are served."""
    aligns = [align for align in ("top_left", "bottom_right") if align in features]
    if is_skewed and not aligns:
        return {}
    made: dict[str, Any] = {"align": draw(st.sampled_from(aligns)) if is_skewed else None}
    if ("causal" in features or is_skewed) and draw(st.booleans()):
        made["causal"] = True
    if "window" in features and draw(st.booleans()):
        bound = st.one_of(st.none(), st.sampled_from(BOUNDS))
        made["window"] = (draw(bound), draw(bound))
    return made


def _dims() -> st.SearchStrategy[str]:
    full = st.tuples(*[st.sampled_from((letter, "1")) for letter in "bhqk"]).map("".join)
    return st.one_of(st.just("bhqk"), full, st.sampled_from(("qk", "1k", "q1")))


def _gradients(draw: st.DrawFn, features: frozenset[str], made: dict[str, Any], has_grads: bool) -> dict[str, Any]:
    """Which inputs need a gradient, what the loss reads, and how the gradient of o lies in memory."""
    inputs = ["q", "k", "v"]
    if "bias" in made and "bias_grad" in features:
        inputs.append("bias")
    if "sinks" in made:
        inputs.append("sinks")
    grads = tuple(name for name in inputs if has_grads and draw(st.booleans()))
    has_lse = "lse" in features and draw(st.booleans())
    return {
        "grads": grads,
        "return_lse": has_lse,
        "loss": draw(st.sampled_from(("o", "lse", "o+lse"))) if has_lse and grads else "o",
        "grad_storage": draw(st.sampled_from(GRAD_STORAGES)) if grads else "contiguous",
        "lse_grad_storage": draw(st.sampled_from(LSE_GRAD_STORAGES)) if grads and has_lse else "contiguous",
    }


@st.composite
def problems_of_variant(draw: st.DrawFn, variant: Mapping[str, str]) -> Problem:
    """Problems of one kernel variant, a value of `variants.VARIANTS`: sizes, kinds and seeds are drawn."""
    head_dim = int(variant["head_dim"])
    extent = _extent(draw, variant["dtype"], is_skewed=variant["band"] in ("top_left", "bottom_right"))
    made: dict[str, Any] = {
        **extent,
        "q_heads": extent["kv_heads"] * int(variant["group"]),
        "head_dim": head_dim,
        "value_dim": {"same": head_dim, "narrow": max(1, head_dim // 2), "wide": min(256, head_dim + 24)}[variant["value_dim"]],
        "dtype": variant["dtype"],
        "storage": (variant["storage"],) * 3,
        "offset": draw(st.sampled_from((0, 1, 8))),
        "scale": draw(st.sampled_from((None, 1.0, -0.125))),
        "deterministic": variant["deterministic"] == "on",
        "seed": draw(SEEDS),
    }
    made |= _band_of_variant(draw, variant["band"]) | _inputs_of_variant(draw, variant)
    grads = {"none": (), "all": ("q", "k", "v"), "q": ("q",), "kv": ("k", "v"), "v": ("v",)}[variant["grads"]]
    if grads:
        grads += ("bias",) * (variant["bias"] in ("full", "heads")) + ("sinks",) * (variant["sinks"] == "on")
        made["grad_storage"] = draw(st.sampled_from(GRAD_STORAGES))
    if variant["lse"] == "o+lse":
        made |= {"return_lse": True, "loss": "o+lse" if grads else "o"}
    return Problem(**made, grads=grads)


def _band_of_variant(draw: st.DrawFn, band: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if band in ("top_left", "bottom_right"):
        made |= {"align": band, "causal": True}
    if band.startswith("causal"):
        made["causal"] = True
    if band.endswith("window"):
        bound = st.one_of(st.none(), st.sampled_from(BOUNDS))
        made["window"] = (draw(st.sampled_from(BOUNDS)), draw(bound))
    return made


def _inputs_of_variant(draw: st.DrawFn, variant: Mapping[str, str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if variant["mask"] != "none":
        made["mask"] = Table(draw(st.sampled_from(MASK_KINDS)), {"full": "bhqk", "keys": "b11k"}[variant["mask"]])
    if variant["bias"] != "none":
        made["bias"] = Table(draw(st.sampled_from(BIAS_KINDS)), {"fixed": "11qk", "full": "bhqk", "heads": "1hqk"}[variant["bias"]])
    if variant["segments"] != "none":
        made["segments"] = Segments(draw(st.sampled_from(("documents", "single", "disjoint", "interleaved"))))
    if variant["layout"] != "none":
        block = draw(st.sampled_from(((16, 16), (32, 64), (64, 64), (128, 128))))
        made["layout"] = Blocks(variant["layout"], block, draw(st.sampled_from(("11", "1h", "bh"))))
    if variant["softcap"] == "on":
        made["softcap"] = draw(st.sampled_from((0.5, 5.0, 50.0)))
    if variant["sinks"] == "on":
        made["sinks"] = Sinks(draw(st.sampled_from(("random", "minus_inf", "some_minus_inf", "large"))))
    if variant["dropout"] == "on":
        made |= {"dropout_p": 0.3, "dropout_seed": draw(st.sampled_from(DROPOUT_SEEDS))}
    return made
