"""T07: empty sizes. T10: ragged lengths. T11: head dims."""

from __future__ import annotations

from typing import Any

from attnzoo.testing.case import Case
from attnzoo.testing.problem import DTYPES, Blocks, Problem, Segments, Sinks, Table, short_dtype

HALF_AND_SINGLE = ("float16", "bfloat16", "float32")
LSE: dict[str, Any] = {"return_lse": True, "loss": "o+lse"}

EMPTY: dict[str, dict[str, int]] = {
    "batch": {"batch": 0},
    "heads": {"q_heads": 0},
    "queries": {"q_len": 0, "kv_len": 20},
    "keys": {"q_len": 20, "kv_len": 0},
    "both-lengths": {"q_len": 0},
    "value-dim": {"q_len": 20, "value_dim": 0},
    "head-dim": {"q_len": 20, "head_dim": 0, "value_dim": 16},
    "both-dims": {"q_len": 20, "head_dim": 0},
}

EMPTY_WITH: dict[str, Problem] = {
    "mask": Problem(q_len=20, kv_len=0, mask=Table("random"), **LSE),
    "bias": Problem(q_len=20, kv_len=0, bias=Table("random"), grads=("q", "k", "v", "bias"), **LSE),
    "bias-no-queries": Problem(q_len=0, kv_len=20, bias=Table("random", "1h1k"), grads=("q", "k", "v", "bias"), **LSE),
    "sinks": Problem(q_len=20, kv_len=0, sinks=Sinks(), grads=("q", "k", "v", "sinks"), **LSE),
    "sinks-no-queries": Problem(q_len=0, kv_len=20, sinks=Sinks(), grads=("sinks",), **LSE),
    "segments": Problem(q_len=20, kv_len=0, segments=Segments(), **LSE),
    "dropout": Problem(q_len=20, kv_len=0, dropout_p=0.5, dropout_seed=1),
    "layout": Problem(q_len=20, kv_len=0, layout=Blocks("all")),
    "grouped": Problem(q_heads=4, kv_heads=2, q_len=20, kv_len=0, **LSE),
    "window": Problem(q_len=0, kv_len=20, window=(2, 2), align="top_left"),
    "softcap-head-dim": Problem(q_len=20, head_dim=0, value_dim=8, softcap=3.0, mask=Table("empty_rows"), **LSE),
}

LENGTHS = (1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 128, 129, 257)
PAIRS = (
    (1, 2),
    (2, 1),
    (7, 65),
    (65, 7),
    (16, 17),
    (17, 16),
    (31, 97),
    (97, 31),
    (63, 129),
    (129, 63),
    (128, 15),
    (15, 128),
    (1, 257),
    (257, 1),
    (64, 128),
)
HEAD_DIMS = (1, 2, 4, 8, 16, 24, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 160, 192, 256)
VALUE_DIMS = ((64, 32), (32, 64), (128, 64), (64, 128), (16, 8), (8, 16), (40, 72), (72, 40), (192, 128), (96, 1), (1, 96), (33, 17))

CASES = [
    *[
        Case("T07", f"no-{name}-{mode}-{short_dtype(dtype)}", Problem(**sizes, dtype=dtype, **options, **LSE))  # type: ignore[arg-type]
        for name, sizes in EMPTY.items()
        for mode, options in (
            ("full", {}),
            ("causal-top-left", {"causal": True, "align": "top_left"}),
            ("causal-bottom-right", {"causal": True, "align": "bottom_right"}),
        )
        for dtype in ("bfloat16", "float32")
    ],
    *[Case("T07", f"no-{name}-forward-only", Problem(**sizes, grads=())) for name, sizes in EMPTY.items()],  # type: ignore[arg-type]
    *[Case("T07", f"no-keys-or-queries-with-{name}", problem) for name, problem in EMPTY_WITH.items()],
    *[
        Case("T10", f"length-{length}-{mode}-{short_dtype(dtype)}", Problem(q_len=length, dtype=dtype, causal=mode == "causal"))
        for length in LENGTHS
        for mode in ("full", "causal")
        for dtype in HALF_AND_SINGLE
    ],
    *[
        Case("T10", f"lengths-{q_len}x{kv_len}-{short_dtype(dtype)}", Problem(q_len=q_len, kv_len=kv_len, dtype=dtype, **LSE))
        for q_len, kv_len in PAIRS
        for dtype in HALF_AND_SINGLE
    ],
    *[
        Case(
            "T10",
            f"short-{length}",
            Problem(q_len=length, kv_len=16 - length, mask=Table("random"), bias=Table("random"), grads=("q", "k", "v", "bias")),
        )
        for length in range(1, 16)
    ],
    *[
        Case("T10", f"tiniest-{short_dtype(dtype)}", Problem(batch=1, q_heads=1, q_len=1, head_dim=16, dtype=dtype, values="large"))
        for dtype in DTYPES
    ],
    *[
        Case(
            "T10",
            f"relation-batch-of-one-{short_dtype(dtype)}",
            Problem(batch=3, q_len=37, kv_len=65, dtype=dtype, mask=Table("random")),
            check="batch_of_one",
        )
        for dtype in HALF_AND_SINGLE
    ],
    *[
        Case("T11", f"head-dim-{head_dim}-{short_dtype(dtype)}", Problem(q_len=40, kv_len=65, head_dim=head_dim, dtype=dtype))
        for head_dim in HEAD_DIMS
        for dtype in HALF_AND_SINGLE
    ],
    *[
        Case(
            "T11",
            f"head-dim-{head_dim}-causal-long-{short_dtype(dtype)}",
            Problem(batch=1, q_len=130, head_dim=head_dim, dtype=dtype, causal=True),
        )
        for head_dim in (40, 64, 72, 104, 128, 256)
        for dtype in ("float16", "bfloat16")
    ],
    *[
        Case(
            "T11",
            f"value-dim-{head_dim}-{value_dim}-{short_dtype(dtype)}",
            Problem(q_len=40, kv_len=33, head_dim=head_dim, value_dim=value_dim, dtype=dtype, **LSE),
        )
        for head_dim, value_dim in VALUE_DIMS
        for dtype in HALF_AND_SINGLE
    ],
    *[
        Case("T11", f"odd-dim-{head_dim}", Problem(q_len=20, head_dim=head_dim, grad_storage="bshd"))
        for head_dim in (3, 5, 7, 15, 17, 31, 33, 63, 65, 100, 127)
    ],
]
