"""T21: the log-sum-exp: natural log, dtype, -inf, gradient, and merging by it."""

from __future__ import annotations

from dataclasses import replace

from attnzoo.testing.case import Case
from attnzoo.testing.problem import DTYPES, Blocks, Problem, Sinks, Table, short_dtype

WITH_SINKS = ("q", "k", "v", "sinks")

KINDS: dict[str, Problem] = {
    "plain": Problem(q_len=40, kv_len=65),
    "causal": Problem(q_len=65, causal=True),
    "mask": Problem(q_len=40, kv_len=65, mask=Table("empty_rows")),
    "window": Problem(q_len=65, window=(9, 4)),
    "bias": Problem(q_len=40, kv_len=65, bias=Table("random"), grads=("q", "k", "v", "bias")),
    "sinks": Problem(q_len=40, kv_len=65, sinks=Sinks(), grads=WITH_SINKS),
    "sinks-causal": Problem(q_len=65, causal=True, sinks=Sinks(), grads=WITH_SINKS),
    "softcap": Problem(q_len=40, kv_len=65, softcap=2.0),
    "dropout": Problem(q_len=40, kv_len=65, dropout_p=0.5, dropout_seed=8),
    "layout": Problem(q_len=100, layout=Blocks("pairs", (32, 32))),
    "layout-longer-than-keys": Problem(q_len=70, kv_len=70, layout=Blocks("random", (64, 64))),
    "grouped": Problem(q_heads=6, kv_heads=2, q_len=40, kv_len=65),
    "scale-zero": Problem(q_len=40, kv_len=65, scale=0.0),
    "one-query": Problem(q_len=1, kv_len=130),
}


def _with(problem: Problem, **changes: object) -> Problem:
    return replace(problem, **changes)  # type: ignore[arg-type]


CASES = [
    *[
        Case("T21", f"lse-{name}-loss-{loss}-{short_dtype(dtype)}", _with(problem, dtype=dtype, return_lse=True, loss=loss))
        for name, problem in KINDS.items()
        for loss in ("o+lse", "lse")
        for dtype in DTYPES
    ],
    *[
        Case(
            "T21",
            f"lse-gradient-{storage}-{short_dtype(dtype)}",
            Problem(batch=3, q_heads=4, kv_heads=2, q_len=40, kv_len=65, return_lse=True, loss=loss, lse_grad_storage=storage, dtype=dtype),
        )
        for storage, loss in (
            ("sum", "o+lse"),
            ("mean", "lse"),
            ("bshd", "o+lse"),
            ("sbhd", "lse"),
            ("step", "o+lse"),
            ("expand_heads", "lse"),
        )
        for dtype in ("bfloat16", "float32")
    ],
    *[Case("T21", f"lse-unread-{name}", _with(problem, return_lse=True)) for name, problem in KINDS.items()],
    *[
        Case("T21", f"lse-forward-{name}-{short_dtype(dtype)}", _with(problem, return_lse=True, grads=(), dtype=dtype))
        for name, problem in KINDS.items()
        for dtype in ("float16", "float32")
    ],
    *[
        Case("T21", f"relation-merge-{name}-{short_dtype(dtype)}", _with(problem, dtype=dtype), check="split_and_merge")
        for name, problem in (
            ("plain", Problem(q_len=33, kv_len=70)),
            ("mask", Problem(q_len=33, kv_len=70, mask=Table("random"))),
            ("empty-part", Problem(q_len=33, kv_len=70, mask=Table("empty_prefix", "qk", 24))),
            ("empty-parts", Problem(q_len=33, kv_len=70, mask=Table("last_rows", "q1"))),
            ("bias", Problem(q_len=33, kv_len=70, bias=Table("random", "1hqk"))),
            ("shifted", Problem(q_len=33, kv_len=70, shift=-1000.0, grads=())),
        )
        for dtype in ("float16", "bfloat16", "float32")
    ],
]
