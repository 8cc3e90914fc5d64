"""T15: which inputs need a gradient. T16: the gradient of a bias. T24: the autograd contract."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from attnzoo.testing.case import Case
from attnzoo.testing.problem import BROADCASTS, Blocks, Problem, Segments, Sinks, Table, short_dtype

DTYPES = ("float16", "bfloat16", "float32")
INPUTS = ("q", "k", "v", "bias", "sinks")
SUBSETS = [subset for size in range(len(INPUTS) + 1) for subset in combinations(INPUTS, size)]
WITH_BIAS = ("q", "k", "v", "bias")

FLAGS: dict[str, Problem] = {
    "plain": Problem(q_len=40),
    "causal": Problem(q_len=40, causal=True),
    "top-left": Problem(q_len=40, kv_len=60, causal=True, align="top_left"),
    "bottom-right": Problem(q_len=40, kv_len=60, causal=True, align="bottom_right"),
    "window": Problem(q_len=40, window=(4, 2)),
    "mask": Problem(q_len=40, mask=Table("random")),
    "bias": Problem(q_len=40, bias=Table("random"), grads=WITH_BIAS),
    "segments": Problem(q_len=40, segments=Segments()),
    "layout": Problem(q_len=64, layout=Blocks("pairs", (32, 32))),
    "softcap": Problem(q_len=40, softcap=2.0),
    "sinks": Problem(q_len=40, sinks=Sinks(), grads=("q", "k", "v", "sinks")),
    "dropout": Problem(q_len=40, dropout_p=0.3, dropout_seed=5),
    "grouped": Problem(q_heads=6, kv_heads=2, q_len=40),
    "value-dim": Problem(q_len=40, head_dim=32, value_dim=48),
    "scale": Problem(q_len=40, scale=-0.4),
}

TOGETHER: dict[str, Problem] = {
    "softcap-grouped": Problem(q_heads=6, kv_heads=2, q_len=40, softcap=2.0),
    "softcap-causal": Problem(q_len=40, softcap=2.0, causal=True),
    "sinks-causal-lse": Problem(q_len=40, causal=True, sinks=Sinks(), return_lse=True, loss="o+lse", grads=("q", "k", "v", "sinks")),
    "sinks-grouped": Problem(q_heads=6, kv_heads=2, q_len=40, sinks=Sinks(), grads=("q", "k", "v", "sinks")),
    "window-lse": Problem(q_len=40, window=(4, 2), return_lse=True, loss="o+lse"),
    "window-grouped": Problem(q_heads=6, kv_heads=2, q_len=40, window=(4, 2)),
    "bias-grouped": Problem(q_heads=6, kv_heads=2, q_len=40, bias=Table("random"), grads=WITH_BIAS),
    "dropout-grouped-causal": Problem(q_heads=6, kv_heads=2, q_len=40, causal=True, dropout_p=0.3, dropout_seed=5),
    "value-dim-grouped": Problem(q_heads=6, kv_heads=2, q_len=40, head_dim=32, value_dim=48),
}


def _with(problem: Problem, **changes: object) -> Problem:
    return replace(problem, **changes)  # type: ignore[arg-type]


CASES = [
    *[
        Case(
            "T15",
            f"grads-{'-'.join(subset) or 'none'}-{short_dtype(dtype)}",
            Problem(q_len=33, kv_len=45, bias=Table("random", "1hqk"), sinks=Sinks(), grads=subset, dtype=dtype),
        )
        for subset in SUBSETS
        for dtype in ("float32", "bfloat16")
    ],
    *[
        Case("T15", f"grads-{'-'.join(subset)}-causal-{short_dtype(dtype)}", Problem(q_len=70, causal=True, grads=subset, dtype=dtype))
        for size in (1, 2)
        for subset in combinations(("q", "k", "v"), size)
        for dtype in DTYPES
    ],
    *[
        Case("T15", f"grads-{'-'.join(subset)}-of-lse", Problem(q_len=33, return_lse=True, loss="lse", bias=Table("random"), grads=subset))
        for subset in (("q",), ("k",), ("v",), ("bias",), ("q", "v"), WITH_BIAS)
    ],
    *[Case("T15", f"{check}-{name}", problem, check=check) for check in ("no_grad", "inference_mode") for name, problem in FLAGS.items()],
    *[
        Case(
            "T16",
            f"bias-{dims}-{short_dtype(dtype)}",
            Problem(batch=3, q_len=17, kv_len=33, bias=Table("random", dims), grads=WITH_BIAS, dtype=dtype),
        )
        for dims in BROADCASTS
        for dtype in DTYPES
    ],
    *[
        Case(
            "T16",
            f"bias-of-{short_dtype(bias)}-in-{short_dtype(dtype)}",
            Problem(q_len=33, bias=Table("random", "1hqk", dtype=bias), grads=WITH_BIAS, dtype=dtype),
        )
        for dtype in DTYPES
        for bias in ("float16", "bfloat16", "float32", "float64")
        if bias != dtype
    ],
    *[
        Case(
            "T16",
            f"bias-stored-{storage}-{short_dtype(dtype)}",
            Problem(batch=3, q_len=33, kv_len=40, bias=Table("random", storage=storage), grads=WITH_BIAS, dtype=dtype),
        )
        for storage in ("expand_batch", "expand_heads", "expand_length", "expand_all", "last_dim", "slack", "odd_rows", "step", "bshd")
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Case(
            "T16",
            f"bias-{kind}-{name}",
            Problem(q_heads=4, kv_heads=2, q_len=33, kv_len=kv_len, bias=Table(kind, dims), grads=grads, **options),
        )
        for kind, dims in (("alibi", "1hqk"), ("minus_inf", "b1qk"), ("random", "1h1k"))
        for name, kv_len, grads, options in (
            ("alone", 33, ("bias",), {}),
            ("causal", 33, WITH_BIAS, {"causal": True}),
            ("decode", 65, WITH_BIAS, {"window": (20, 0), "align": "bottom_right"}),
            ("dropout", 33, WITH_BIAS, {"dropout_p": 0.3, "dropout_seed": 4}),
            ("no-gradient", 33, ("q", "k", "v"), {}),
        )
    ],
    # 64 equal terms to an element: summed in half precision, they lose what a few don't
    *[
        Case(
            "T16",
            f"bias-summed-over-{dims}-{short_dtype(dtype)}",
            Problem(
                batch=64,
                q_len=5,
                kv_len=9,
                head_dim=16,
                values="equal",
                storage=("contiguous", "contiguous", "expand_batch"),
                grad_storage="sum",
                bias=Table("random", dims),
                grads=("bias",),
                dtype=dtype,
            ),
        )
        for dims in ("1hqk", "11qk", "1h1k")
        for dtype in DTYPES
    ],
    Case(
        "T16",
        "bias-single-query-per-head",
        Problem(q_heads=4, kv_heads=1, q_len=1, kv_len=40, bias=Table("random", "1h1k"), grads=WITH_BIAS),
    ),
    *[
        Case("T24", f"{check}-{name}", problem, check=check)
        for check in ("backward_twice", "two_backwards", "accumulates")
        for name, problem in FLAGS.items()
    ],
    *[
        Case("T24", f"linear-in-gradient-{name}-{short_dtype(dtype)}", _with(problem, dtype=dtype), check="linear_in_gradient")
        for name, problem in FLAGS.items()
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Case("T24", f"backward-parity-{name}-{short_dtype(dtype)}", _with(problem, dtype=dtype, seed=8))
        for name, problem in {**FLAGS, **TOGETHER}.items()
        for dtype in DTYPES
    ],
    *[
        Case("T24", f"shared_inputs-{name}-{short_dtype(dtype)}", _with(problem, dtype=dtype), check="shared_inputs")
        for name, problem in (("plain", Problem(q_len=40)), ("causal", Problem(q_len=40, causal=True)))
        for dtype in DTYPES
    ],
    # calls that a backend may answer with v itself
    *[
        Case("T24", f"outputs_are_own-{name}-{short_dtype(dtype)}", _with(problem, dtype=dtype, grads=()), check="outputs_are_own")
        for name, problem in (
            ("plain", Problem(q_len=33, return_lse=True)),
            ("own-key", Problem(q_len=33, window=(0, 0))),
            ("one-key", Problem(q_len=33, kv_len=1)),
            ("one-by-one", Problem(q_len=1)),
            ("first-keys-alone", Problem(q_len=33, mask=Table("one_key", "qk"))),
        )
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Case(
            "T24",
            f"backward-twice-deterministic-{short_dtype(dtype)}",
            Problem(q_heads=4, kv_heads=2, q_len=70, deterministic=True, dtype=dtype),
            check="backward_twice",
        )
        for dtype in DTYPES
    ],
    *[
        Case("T24", f"double-backward-{name}", problem, check="double_backward")
        for name, problem in (
            ("plain-fp32", Problem(q_len=12, kv_len=17, head_dim=8)),
            ("plain-fp64", Problem(q_len=12, kv_len=17, head_dim=8, dtype="float64")),
            ("causal-fp32", Problem(q_len=17, head_dim=8, causal=True)),
            ("causal-fp64", Problem(q_len=17, head_dim=8, causal=True, dtype="float64", scale=0.7)),
        )
    ],
    *[
        Case("T24", f"double-backward-{name}-{short_dtype(dtype)}", _with(problem, head_dim=8, dtype=dtype), check="double_backward")
        for name, problem in {**FLAGS, "lse": Problem(q_len=40, return_lse=True, loss="o+lse")}.items()
        if name not in ("plain", "causal")
        for dtype in ("float32", "float64")
    ],
    *[
        Case("T24", f"written_in_between-{name}", problem, check="written_in_between")
        for name, problem in {
            **FLAGS,
            "lse": Problem(q_len=40, return_lse=True, loss="o+lse"),
            "tensor-seed": Problem(q_len=40, dropout_p=0.3, dropout_seed=5, as_tensor_seed=True),
        }.items()
        if name != "layout"  # frozen, and watched by itself
    ],
]
