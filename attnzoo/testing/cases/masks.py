"""T17: what a mask may look like. T18: mask, causal, window, layout, segments and bias together."""

from __future__ import annotations

from itertools import product
from typing import Any

from attnzoo.testing.case import Case
from attnzoo.testing.problem import BROADCASTS, Blocks, Problem, Segments, Table, short_dtype

DTYPES = ("float16", "bfloat16", "float32")
KINDS = ("random", "sparse", "all", "none", "padding", "left_padding", "triangle", "anti_triangle", "checker", "one_key")
STORAGES = ("expand_batch", "expand_heads", "expand_length", "expand_all", "slack", "odd_rows", "step", "step_dim", "last_dim", "bshd")
LSE: dict[str, Any] = {"return_lse": True, "loss": "o+lse"}

PARTS: dict[str, dict[str, object]] = {
    "causal": {"causal": True},
    "window": {"window": (9, 4)},
    "mask": {"mask": Table("random")},
    "bias": {"bias": Table("minus_inf", "1hqk"), "grads": ("q", "k", "v", "bias")},
    "segments": {"segments": Segments()},
    "layout": {"layout": Blocks("random")},
}


def _together(names: tuple[str, ...], **sizes: object) -> Problem:
    options: dict[str, object] = {}
    for name in names:
        options |= PARTS[name]
    return Problem(**{**sizes, **options})  # type: ignore[arg-type]


COMBINATIONS = [tuple(name for name, is_in in zip(PARTS, chosen) if is_in) for chosen in product((False, True), repeat=len(PARTS))]

CASES = [
    *[
        Case(
            "T17",
            f"mask-{dims}-{short_dtype(dtype)}",
            Problem(batch=3, q_heads=4, kv_heads=2, q_len=17, kv_len=33, mask=Table("random", dims), dtype=dtype),
        )
        for dims in BROADCASTS
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Case(
            "T17",
            f"mask-{kind}-{short_dtype(dtype)}",
            Problem(q_len=65, kv_len=97, mask=Table(kind), dtype=dtype, return_lse=True, loss="o+lse"),
        )
        for kind in KINDS
        for dtype in DTYPES
    ],
    *[
        Case(
            "T17",
            f"mask-stored-{storage}-ragged-{kv_len}",
            Problem(batch=3, q_len=33, kv_len=kv_len, mask=Table("random", storage=storage)),
        )
        for storage in STORAGES
        for kv_len in (15, 65)
    ],
    *[
        Case("T17", f"mask-decode-{dims}", Problem(q_heads=4, kv_heads=1, q_len=1, kv_len=40, mask=Table("random", dims)))
        for dims in ("bhqk", "1h1k", "b11k", "bh1k", "qk")
    ],
    *[
        Case("T17", f"segments-{kind}-{short_dtype(dtype)}", Problem(q_len=40, kv_len=65, segments=Segments(kind), dtype=dtype, **LSE))
        for kind in ("single", "negative", "interleaved", "some_empty", "wide")
        for dtype in DTYPES
    ],
    # neighbours that fp32 and fp64 can't tell apart
    *[
        Case("T17", f"segments-{kind}-{ids}", Problem(q_len=40, kv_len=65, segments=Segments(kind, ids), **LSE))
        for kind, ids in (("beyond_fp32", "int32"), ("beyond_fp32", "int64"), ("beyond_fp64", "int64"))
    ],
    *[
        Case(
            "T17",
            f"segments-stored-{storage}-{kv_len}",
            Problem(batch=3, q_len=40, kv_len=kv_len, segments=Segments("documents", storage=storage), **LSE),
        )
        for storage in ("expand_batch", "step", "slack", "overlap")
        for kv_len in (40, 65)
    ],
    Case("T17", "segments-interleaved-uint8", Problem(q_len=40, kv_len=65, segments=Segments("interleaved", "uint8"), **LSE)),
    *[Case("T17", f"segments-negative-{ids}", Problem(q_len=40, segments=Segments("negative", ids))) for ids in ("int8", "int16", "int32")],
    *[
        Case(
            "T17",
            f"two-float-masks-{kind}-{short_dtype(dtype)}",
            Problem(q_len=33, bias=Table(kind, "bhqk"), mask=Table("empty_rows", "qk"), dtype=dtype, grads=("q", "k", "v", "bias")),
        )
        for kind in ("min", "minus_inf", "min_rows")
        for dtype in DTYPES
    ],
    *[
        Case("T17", f"relation-{relation}-{name}-{short_dtype(dtype)}", problem, check=relation)
        for dtype in DTYPES
        for relation, name, problem in (
            ("future_changes_nothing", "causal", Problem(q_len=40, causal=True, dtype=dtype)),
            ("future_changes_nothing", "causal-and-mask", Problem(q_len=40, causal=True, mask=Table("random", "b11k"), dtype=dtype)),
            ("future_changes_nothing", "causal-and-layout", Problem(q_len=64, causal=True, layout=Blocks("all"), dtype=dtype)),
            ("future_changes_nothing", "causal-and-dropout", Problem(q_len=40, causal=True, dropout_p=0.2, dropout_seed=4, dtype=dtype)),
            ("future_changes_nothing", "causal-and-lse", Problem(q_len=40, causal=True, return_lse=True, dtype=dtype)),
            ("future_changes_nothing", "causal-and-window", Problem(q_len=40, causal=True, window=(12, None), dtype=dtype)),
            ("padding_is_ignored", "padding", Problem(q_len=40, kv_len=65, mask=Table("padding", "b11k"), dtype=dtype)),
            ("padding_is_ignored", "left-padding", Problem(q_len=40, kv_len=65, mask=Table("left_padding", "b11k"), dtype=dtype)),
            ("padding_is_ignored", "prefix", Problem(q_len=40, kv_len=65, mask=Table("empty_prefix", "qk", 33), dtype=dtype)),
        )
    ],
    *[
        Case("T18", f"{'-'.join(names) or 'nothing'}-{short_dtype(dtype)}", _together(names, q_len=50, dtype=dtype))
        for names in COMBINATIONS
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Case("T18", f"{'-'.join(names)}-{align}", _together(names, q_len=35, kv_len=70, align=align, return_lse=True))
        for names in COMBINATIONS
        if len(names) >= 3 and ("causal" in names or "window" in names)
        for align in ("top_left", "bottom_right")
    ],
    # an explicit triangle beside the flag, over every length up to two tiles of 16
    *[
        Case("T18", f"triangle-and-causal-{length}", Problem(batch=1, q_len=length, causal=True, mask=Table("triangle", "qk")))
        for length in (*range(1, 34), 63, 64, 65, 127, 128, 129)
    ],
    *[
        Case(
            "T18",
            f"causal-and-layout-{kind}-{short_dtype(dtype)}",
            Problem(q_len=100, causal=True, layout=Blocks(kind, (32, 32)), dtype=dtype),
        )
        for kind in ("all", "random", "causal", "diagonal", "band_rule")
        for dtype in DTYPES
    ],
]
