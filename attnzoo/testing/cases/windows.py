"""T20: sliding windows: a bound of 0 is a bound, None is none, W + 1 keys to a side of W."""

from __future__ import annotations

from attnzoo.testing.case import Case
from attnzoo.testing.problem import Problem, Table, short_dtype

DTYPES = ("float16", "bfloat16", "float32")
LENGTH = 34
BOUNDS = (("none", None), ("0", 0), ("1", 1), ("s-1", LENGTH - 1), ("s", LENGTH), ("s+1", LENGTH + 1))

CASES = [
    *[
        Case("T20", f"window-{left}-{right}-{short_dtype(dtype)}", Problem(q_len=LENGTH, window=(before, behind), dtype=dtype))
        for left, before in BOUNDS
        for right, behind in BOUNDS
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Case("T20", f"causal-window-{left}-{short_dtype(dtype)}", Problem(q_len=LENGTH, causal=True, window=(before, behind), dtype=dtype))
        for left, before, behind in [*[(name, bound, None) for name, bound in BOUNDS], ("5-right-3", 5, 3), ("5-right-0", 5, 0)]
        for dtype in DTYPES
    ],
    *[
        Case(
            "T20",
            f"window-{align}-{q_len}x{kv_len}-{name}",
            Problem(q_len=q_len, kv_len=kv_len, window=window, align=align, return_lse=True, loss="o+lse", causal=causal),
        )
        for q_len, kv_len in ((20, 65), (65, 20), (1, 40), (40, 1), (33, 64))
        for align in ("top_left", "bottom_right")
        for name, window, causal in (
            ("3-2", (3, 2), False),
            ("0-0", (0, 0), False),
            ("16-causal", (16, None), True),
            ("none-5", (None, 5), False),
        )
    ],
    # one query against a cache: the last `left + 1` keys
    *[
        Case(
            "T20",
            f"decode-left-{left}-{short_dtype(dtype)}",
            Problem(q_len=1, kv_len=256, window=(left, 0), align="bottom_right", dtype=dtype),
        )
        for left in (0, 1, 127, 128, 255, 256)
        for dtype in DTYPES
    ],
    # v of ones and equal scores: o and lse count the keys of a row
    *[
        Case("T20", f"keys-per-row-{left}-{right}", Problem(q_len=70, window=(left, right), values="zeros", return_lse=True))
        for left, right in ((0, 0), (1, 0), (0, 1), (15, 0), (16, 16), (63, 0), (64, 0))
    ],
    *[
        Case(
            "T20",
            f"window-across-tiles-{left}-{short_dtype(dtype)}",
            Problem(batch=1, q_len=200, window=(left, 0), causal=True, dtype=dtype),
        )
        for left in (1, 31, 32, 63, 64, 65, 128)
        for dtype in DTYPES
    ],
    *[
        Case("T20", f"window-and-mask-{short_dtype(dtype)}", Problem(q_len=70, window=(10, 3), mask=Table("random"), dtype=dtype))
        for dtype in DTYPES
    ],
]
