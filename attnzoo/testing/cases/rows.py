"""T01: rows that see no key. T02: tiles that hold no key for a row, in front, in the middle and behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attnzoo.testing.case import Case
from attnzoo.testing.problem import Blocks, Problem, Segments, Sinks, Table, short_dtype

DTYPES = ("float16", "bfloat16", "float32")
WITH_BIAS = ("q", "k", "v", "bias")
LSE: dict[str, Any] = {"return_lse": True, "loss": "o+lse"}

EMPTY_ROWS: dict[str, Problem] = {
    "bool": Problem(q_len=40, mask=Table("empty_rows"), **LSE),
    "bool-shared": Problem(q_len=40, mask=Table("empty_rows", "qk"), **LSE),
    "bool-all": Problem(q_len=20, mask=Table("none", "qk"), **LSE),
    "bool-last-half": Problem(q_len=8, mask=Table("last_rows", "11q1"), **LSE),
    "minus-inf": Problem(q_len=40, bias=Table("minus_inf_rows"), grads=WITH_BIAS, **LSE),
    "minus-inf-all": Problem(q_len=20, bias=Table("minus_inf_all", "1hqk"), grads=WITH_BIAS, **LSE),
    "min": Problem(q_len=40, bias=Table("min_rows"), grads=WITH_BIAS, **LSE),
    "bool-and-minus-inf": Problem(q_len=40, mask=Table("checker", "qk"), bias=Table("minus_inf"), grads=WITH_BIAS, **LSE),
    "padding-and-window": Problem(q_len=40, mask=Table("left_padding", "b11k"), window=(0, 0), **LSE),
    "left-padding-causal": Problem(q_len=40, mask=Table("left_padding", "b11k"), causal=True, **LSE),
    "segments-disjoint": Problem(q_len=20, segments=Segments("disjoint"), **LSE),
    "segments-some": Problem(q_len=40, segments=Segments("some_empty"), **LSE),
    "layout": Problem(q_len=70, layout=Blocks("empty_rows"), **LSE),
    "layout-none": Problem(q_len=40, layout=Blocks("none"), **LSE),
    "bottom-right": Problem(q_len=40, kv_len=17, causal=True, align="bottom_right", **LSE),
    "sinks": Problem(q_len=40, mask=Table("empty_rows"), sinks=Sinks(), grads=("q", "k", "v", "sinks"), **LSE),
    "sinks-minus-inf": Problem(q_len=40, mask=Table("empty_rows"), sinks=Sinks("some_minus_inf"), grads=("q", "k", "v", "sinks"), **LSE),
    "dropout": Problem(q_len=40, mask=Table("empty_rows"), dropout_p=0.5, dropout_seed=3),
    "softcap": Problem(q_len=40, mask=Table("empty_rows"), softcap=2.0),
    "one-key": Problem(q_len=40, mask=Table("one_key", "qk"), **LSE),
}


def _cut(kind: str, keys: int, dtype: str, how: str) -> Problem:
    """A problem whose tiles of keys hold none for any row in front, behind or in the middle."""
    sizes = {"batch": 1, "q_len": 70, "kv_len": 270, "head_dim": 32, "dtype": dtype, "return_lse": True, "loss": "o+lse"}
    if how == "bias":
        return Problem(**sizes, bias=Table(f"minus_inf_{kind}", "qk", size=keys))  # type: ignore[arg-type]
    if how == "min":
        return Problem(**sizes, bias=Table(f"min_{kind}", "qk", size=keys))  # type: ignore[arg-type]
    return Problem(**sizes, mask=Table(f"empty_{kind}", "qk", size=keys))  # type: ignore[arg-type]


def _in(dtype: str, problem: Problem) -> Problem:
    return replace(problem, dtype=dtype)


CASES = [
    *[Case("T01", f"{name}-{short_dtype(dtype)}", _in(dtype, problem)) for name, problem in EMPTY_ROWS.items() for dtype in DTYPES],
    *[
        Case("T01", f"row-deleted-{how}-{short_dtype(dtype)}", _in(dtype, problem), check="row_deleted")
        for how, problem in (
            ("mask", Problem(q_len=40, mask=Table("last_rows", "q1"))),
            ("bias", Problem(q_len=40, bias=Table("minus_inf_rows", "qk"))),
        )
        for dtype in DTYPES
    ],
    *[
        Case("T01", f"row-outside-loss-{name}", _in("float32", problem), check="row_outside_loss")
        for name, problem in (
            ("mask", Problem(batch=2, q_len=4, mask=Table("empty_rows"))),
            ("mask-and-window", Problem(q_len=40, mask=Table("left_padding", "b11k"), window=(0, 0))),
            ("minus-inf", Problem(q_len=40, bias=Table("minus_inf_rows"), grads=WITH_BIAS)),
        )
    ],
    *[
        Case("T01", f"stacked-{name}-{short_dtype(dtype)}", _in(dtype, problem), check="stacked")
        for name, problem in (
            ("left-padding-causal", Problem(q_len=24, mask=Table("left_padding", "b11k"), causal=True)),
            ("padding-window", Problem(q_len=24, mask=Table("padding", "b11k"), window=(0, 0))),
        )
        for dtype in DTYPES
    ],
    *[
        Case(
            "T01",
            f"mean-of-values-{short_dtype(dtype)}-bias-{short_dtype(bias)}",
            Problem(q_len=40, dtype=dtype, bias=Table("min_rows", dims, dtype=bias), grads=WITH_BIAS),
            check="mean_of_values",
        )
        for dtype, bias, dims in (
            ("float32", "float32", "bhqk"),
            ("float16", "float32", "qk"),
            ("bfloat16", "bfloat16", "1hqk"),
            ("bfloat16", "float32", "bhqk"),
        )
    ],
    *[
        Case(
            "T01",
            f"mean-of-values-over-many-keys-{short_dtype(dtype)}",
            Problem(q_len=5, kv_len=1030, dtype=dtype, bias=Table("min_rows", dtype="float32"), grads=WITH_BIAS),
            check="mean_of_values",
        )
        for dtype in DTYPES
    ],
    *[  # keys that are cut into shares, of which padding leaves each another number
        Case("T01", f"min-over-padded-keys-{name}-{short_dtype(dtype)}", _in(dtype, problem))
        for name, problem in (
            ("one-query", Problem(q_len=1, kv_len=1030, mask=Table("padding", "b11k"), bias=Table("min_all", "11qk", dtype="float32"))),
            (
                "few-queries",
                Problem(q_len=9, kv_len=300, mask=Table("left_padding", "b11k"), bias=Table("min_all", "11qk", dtype="float32")),
            ),
            (
                "more-queries",
                Problem(batch=1, q_len=66, kv_len=1030, mask=Table("padding", "b11k"), bias=Table("min_rows", dtype="float32")),
            ),
        )
        for dtype in DTYPES
    ],
    *[
        Case("T02", f"{kind}-{keys}-{how}-{short_dtype(dtype)}", _cut(kind, keys, dtype, how))
        for kind, how in (("prefix", "mask"), ("prefix", "bias"), ("prefix", "min"), ("suffix", "mask"), ("middle", "mask"))
        for keys in (16, 64, 128, 192)
        for dtype in DTYPES
    ],
    *[
        Case("T02", f"last-key-{keys}-{short_dtype(dtype)}", Problem(q_len=9, kv_len=keys, mask=Table("last_key", "1k"), dtype=dtype))
        for keys in (17, 65, 129, 257)
        for dtype in DTYPES
    ],
    *[
        Case("T02", f"layout-{kind}-{dtype}", Problem(q_len=130, layout=Blocks(kind, (32, 32)), dtype=dtype, **LSE))
        for kind in ("last_column", "diagonal")
        for dtype in DTYPES
    ],
    # the reports' own sizes, scaled to fit: a long blocked prefix; more keys than queries with padding
    *[
        Case("T02", f"reported-{name}-{short_dtype(dtype)}", _in(dtype, problem))
        for name, problem in (
            ("prefix-of-finfo-min", Problem(batch=1, q_heads=2, q_len=441, head_dim=64, bias=Table("min_prefix", "11qk", size=128))),
            ("eight-by-sixteen", Problem(q_len=8, kv_len=16, mask=Table("padding", "b11k"))),
            ("sixteen-invalid-keys", Problem(q_len=3, kv_len=20, mask=Table("empty_prefix", "1k", size=16))),
        )
        for dtype in DTYPES
    ],
    # the first visited tile has no key, and every real score is far below 0
    *[
        Case(
            "T02",
            f"far-below-{how}-{short_dtype(dtype)}",
            Problem(
                batch=1,
                q_heads=7,
                kv_heads=1,
                q_len=88,
                kv_len=150,
                values="far",
                dtype=dtype,
                return_lse=True,
                causal=True,
                align="bottom_right",
                mask=Table(*how_mask),
            ),
        )
        for how, how_mask in (("prefix", ("empty_prefix", "qk", 64)), ("suffix", ("empty_suffix", "qk", 80)))
        for dtype in DTYPES
    ],
]
