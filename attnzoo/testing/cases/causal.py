"""T06: causal rectangles, both alignments; decoding; more queries than keys."""

from __future__ import annotations

from attnzoo.testing.case import Case
from attnzoo.testing.problem import Problem, short_dtype

RECTANGLES = ((1, 5), (2, 5), (5, 2), (64, 65), (65, 64), (1, 129), (129, 1), (33, 97), (97, 33), (16, 48), (3, 300))
DTYPES = ("float16", "bfloat16", "float32")

CASES = [
    *[
        Case(
            "T06",
            f"causal-{align}-{q_len}x{kv_len}-{short_dtype(dtype)}",
            Problem(q_len=q_len, kv_len=kv_len, causal=True, align=align, dtype=dtype, return_lse=True, loss="o+lse"),
        )
        for q_len, kv_len in RECTANGLES
        for align in ("top_left", "bottom_right")
        for dtype in DTYPES
    ],
    *[
        Case(
            "T06",
            f"causal-square-{length}-{short_dtype(dtype)}",
            Problem(q_len=length, causal=True, dtype=dtype),
        )
        for length in (1, 2, 16, 63, 64, 65, 130)
        for dtype in DTYPES
    ],
    *[
        Case(
            "T06",
            f"decode-{align}-{kv_len}-group{group}-{short_dtype(dtype)}",
            Problem(batch=1, q_heads=2 * group, kv_heads=2, q_len=1, kv_len=kv_len, causal=True, align=align, dtype=dtype),
        )
        for kv_len in (20, 128, 257)
        for align in ("top_left", "bottom_right")
        for group in (1, 7)
        for dtype in ("bfloat16", "float32")
    ],
    # the fp32 output alone, in a call with equal lengths where the alignment is given and has no effect
    *[Case("T06", f"align-unneeded-{align}", Problem(q_len=40, causal=True, align=align)) for align in ("top_left", "bottom_right")],
]
