"""Long and wide calls of T06, T08, T10, T11, T16 to T20, T22 and T23: lengths, batches and bounds beyond those of any one tile or walk.

Kernels clamp, wrap and split at 256, 512 or 1024, and index few heads at a time. Where a length is long the heads are few
and, but for T11, narrow, so that the float64 truth stays small.
"""

from __future__ import annotations

from typing import Any

from attnzoo.testing.case import Case
from attnzoo.testing.problem import Blocks, Problem, Segments, Sinks, Table, short_dtype

ONE: dict[str, Any] = {"batch": 1, "q_heads": 1, "head_dim": 16}
TWO: dict[str, Any] = {"batch": 1, "q_heads": 2, "head_dim": 16}
WIDE: dict[str, Any] = {"batch": 9, "q_heads": 12, "kv_heads": 4, "head_dim": 8}
LSE: dict[str, Any] = {"return_lse": True, "loss": "o+lse"}
WITH_BIAS = ("q", "k", "v", "bias")
LENGTHS = ((513, "bfloat16"), (513, "float32"), (1025, "float16"), (1025, "float32"), (2049, "float32"))

CASES = [
    *[
        Case(family, f"long-{name}-{length}-{short_dtype(dtype)}", Problem(**ONE, q_len=length, dtype=dtype, causal=name == "causal"))
        for family, name in (("T10", "full"), ("T06", "causal"))
        for length, dtype in LENGTHS
    ],
    *[
        Case("T10", f"long-lengths-{q_len}x{kv_len}-{short_dtype(dtype)}", Problem(**TWO, q_len=q_len, kv_len=kv_len, dtype=dtype, **LSE))
        for q_len, kv_len, dtype in ((9, 1025, "float32"), (1025, 9, "float32"), (70, 2049, "float16"), (513, 1025, "float32"))
    ],
    *[
        Case("T10", f"batch-of-9-{name}-{short_dtype(dtype)}", Problem(**WIDE, q_len=17, kv_len=17, dtype=dtype, causal=name == "causal"))
        for name in ("full", "causal")
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Case("T06", f"long-causal-{align}-{q_len}x{kv_len}", Problem(**ONE, q_len=q_len, kv_len=kv_len, causal=True, align=align, **LSE))
        for q_len, kv_len in ((513, 1025), (1025, 513))
        for align in ("top_left", "bottom_right")
    ],
    *[
        Case(
            "T06",
            f"long-decode-{q_len}x{kv_len}-group{group}-{short_dtype(dtype)}",
            Problem(
                batch=1,
                q_heads=2 * group,
                kv_heads=2,
                head_dim=16,
                q_len=q_len,
                kv_len=kv_len,
                causal=True,
                align="bottom_right",
                dtype=dtype,
            ),
        )
        for q_len, kv_len, group in ((1, 2049, 7), (5, 1025, 4))
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Case(
            "T20",
            f"long-window-{left}-{right}-of-{length}-{short_dtype(dtype)}",
            Problem(**ONE, q_len=length, window=(left, right), dtype=dtype),
        )
        for length, left, right, dtype in (
            (513, 300, 0, "bfloat16"),
            (513, 300, None, "float32"),
            (513, None, 300, "float32"),
            (1025, 256, 256, "float16"),
            (1025, 256, 256, "float32"),
            (2049, 1000, 300, "float32"),
        )
    ],
    *[
        Case("T20", f"long-causal-window-{left}-of-{length}", Problem(**ONE, q_len=length, window=(left, None), causal=True))
        for length, left in ((513, 256), (1025, 300), (2049, 1000))
    ],
    *[
        Case(
            "T20",
            f"long-decode-left-{left}-{short_dtype(dtype)}",
            Problem(**TWO, q_len=1, kv_len=2049, window=(left, 0), align="bottom_right", dtype=dtype),
        )
        for left in (300, 1000)
        for dtype in ("float16", "float32")
    ],
    *[
        Case(
            "T17",
            f"long-mask-{kind}-{q_len}x{kv_len}-{short_dtype(dtype)}",
            Problem(**TWO, q_len=q_len, kv_len=kv_len, mask=mask, dtype=dtype),
        )
        for kind, q_len, kv_len, mask, dtype in (
            ("random", 513, 1025, Table("random"), "float32"),
            ("sparse", 1025, 513, Table("sparse", "11qk"), "float16"),
            ("padding", 9, 2049, Table("padding", "b11k"), "float32"),
            ("empty_prefix", 33, 2049, Table("empty_prefix", "1k", 1030), "float32"),
        )
    ],
    *[
        Case(
            "T17",
            f"wide-mask-{dims}-{short_dtype(dtype)}",
            Problem(**WIDE, q_len=5, kv_len=20, mask=Table("random", dims), dtype=dtype),
        )
        for dims in ("bhqk", "b1qk", "b11k", "1hqk")
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Case("T16", f"long-bias-{q_len}x{kv_len}", Problem(**TWO, q_len=q_len, kv_len=kv_len, bias=Table("random", dims), grads=WITH_BIAS))
        for q_len, kv_len, dims in ((513, 1025, "qk"), (1, 1025, "bhqk"), (8, 600, "1hqk"), (3, 2049, "1h1k"))
    ],
    *[
        Case("T16", f"wide-bias-{dims}", Problem(**WIDE, q_len=5, kv_len=20, bias=Table("random", dims), grads=WITH_BIAS))
        for dims in ("bhqk", "b1qk", "1hqk")
    ],
    *[
        Case(
            "T22",
            f"long-dropout-{q_len}x{kv_len}-{short_dtype(dtype)}",
            Problem(**TWO, q_len=q_len, kv_len=kv_len, dropout_p=0.3, dropout_seed=77, dtype=dtype),
        )
        for q_len, kv_len, dtype in ((513, 600, "float32"), (40, 1025, "float16"), (1025, 40, "float32"))
    ],
    Case("T22", "wide-dropout", Problem(**WIDE, q_len=17, dropout_p=0.3, dropout_seed=77)),
    *[
        Case("T23", f"long-{kind}-{block}-{short_dtype(dtype)}", Problem(**TWO, q_len=513, kv_len=1025, layout=layout, dtype=dtype))
        for kind, block, dtype in (
            ("random", 64, "float32"),
            ("pairs", 64, "float16"),
            ("causal_end", 128, "float32"),
            ("band_rule", 32, "float32"),
        )
        for layout in [Blocks(kind, (block, block), "1h")]
    ],
    *[
        Case("T18", f"long-{name}", Problem(**ONE, q_len=513, **options))
        for name, options in (
            ("causal-mask-dropout", {"causal": True, "mask": Table("random"), "dropout_p": 0.3, "dropout_seed": 4}),
            ("causal-segments-lse", {"causal": True, "segments": Segments("interleaved"), **LSE}),
            ("window-bias-softcap", {"window": (300, 256), "bias": Table("random", "qk"), "softcap": 3.0, "grads": WITH_BIAS}),
            ("causal-layout-dropout", {"causal": True, "layout": Blocks("random", (64, 64)), "dropout_p": 0.3, "dropout_seed": 4}),
        )
    ],
    *[
        Case(
            "T19",
            f"long-heads-4-2-{name}-{short_dtype(dtype)}",
            Problem(batch=2, q_heads=4, kv_heads=2, q_len=513, head_dim=16, dtype=dtype, **options),
        )
        for name, dtype, options in (
            ("full", "float32", {}),
            ("causal", "float32", {"causal": True}),
            ("causal", "float16", {"causal": True}),
            ("window", "float32", {"window": (300, 20)}),
            ("mask", "float32", {"mask": Table("random", "bhqk")}),
            ("bias", "float32", {"bias": Table("random", "1hqk"), "grads": WITH_BIAS}),
            ("dropout", "float32", {"dropout_p": 0.3, "dropout_seed": 4}),
            ("sinks-lse", "float32", {"sinks": Sinks(), "grads": ("q", "k", "v", "sinks"), **LSE}),
            ("softcap", "float32", {"softcap": 2.0}),
            ("segments", "float16", {"segments": Segments("interleaved")}),
            ("value-dim", "float32", {"value_dim": 24, "causal": True}),
        )
    ],
    *[
        Case(
            "T11",
            f"long-head-dim-{head_dim}-{short_dtype(dtype)}",
            Problem(batch=1, q_heads=2, kv_heads=1, q_len=513, head_dim=head_dim, causal=True, dtype=dtype),
        )
        for head_dim, dtype in ((64, "float16"), (96, "float32"), (128, "bfloat16"), (128, "float16"))
    ],
    *[
        Case(
            "T08",
            f"long-all-{storage}-{short_dtype(dtype)}",
            Problem(batch=2, q_heads=2, q_len=513, kv_len=600, head_dim=16, storage=(storage,) * 3, grad_storage=storage, dtype=dtype),
        )
        for storage, dtype in (("bshd", "float32"), ("bshd", "float16"), ("slack", "float32"))
    ],
]
