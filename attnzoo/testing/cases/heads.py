"""T19: grouped heads."""

from __future__ import annotations

from attnzoo.testing.case import Case
from attnzoo.testing.problem import Blocks, Problem, Sinks, Table, short_dtype

DTYPES = ("float16", "bfloat16", "float32")
HEADS = (
    (1, 1),
    (2, 2),
    (2, 1),
    (4, 2),
    (6, 2),
    (6, 3),
    (12, 3),
    (8, 2),
    (6, 1),
    (7, 1),
    (8, 1),
    (12, 2),
    (9, 9),
    (16, 1),
    (32, 8),
    (40, 8),
)

CASES = [
    *[
        Case(
            "T19",
            f"heads-{q_heads}-{kv_heads}-{mode}-{short_dtype(dtype)}",
            Problem(q_heads=q_heads, kv_heads=kv_heads, q_len=20, kv_len=33, dtype=dtype, causal=mode == "causal", align="bottom_right"),
        )
        for q_heads, kv_heads in HEADS
        for mode in ("full", "causal")
        for dtype in DTYPES
    ],
    *[
        Case(
            "T19",
            f"heads-{q_heads}-{kv_heads}-with-{name}-{short_dtype(dtype)}",
            Problem(q_heads=q_heads, kv_heads=kv_heads, q_len=34, dtype=dtype, **options),
        )
        for q_heads, kv_heads in ((6, 2), (12, 4))
        for name, options in (
            ("mask", {"mask": Table("random")}),
            ("bias", {"bias": Table("random", "1hqk"), "grads": ("q", "k", "v", "bias")}),
            ("sinks", {"sinks": Sinks(), "grads": ("q", "k", "v", "sinks")}),
            ("layout", {"layout": Blocks("random", dims="1h")}),
            ("dropout", {"dropout_p": 0.3, "dropout_seed": 2}),
            ("long-keys", {"kv_len": 130}),
            ("value-dim", {"value_dim": 16}),
            ("bshd", {"storage": ("bshd",) * 3, "grad_storage": "bshd"}),
        )
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Case(
            "T19",
            f"relation-repeated-heads-{q_heads}-{kv_heads}-{short_dtype(dtype)}",
            Problem(q_heads=q_heads, kv_heads=kv_heads, q_len=33, dtype=dtype, causal=True),
            check="repeated_heads",
        )
        for q_heads, kv_heads in ((4, 2), (12, 3), (6, 1))
        for dtype in DTYPES
    ],
]
