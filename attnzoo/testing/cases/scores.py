"""T03: extreme scores, and scores shifted as a whole. T14: scale, overflow, dtypes, precision."""

from __future__ import annotations

from attnzoo.testing.case import Case
from attnzoo.testing.problem import DTYPES, Blocks, Problem, Sinks, Table, short_dtype

HALF_AND_SINGLE = ("float16", "bfloat16", "float32")
SHIFTS = (1e2, -1e2, 1e3, -1e3, 1e4, -1e4)
WITH_BIAS = ("q", "k", "v", "bias")


def _sign(number: float) -> str:
    return f"{'plus' if number > 0 else 'minus'}{abs(number):g}"


CASES = [
    *[
        Case(
            "T03",
            f"shift-by-bias-{_sign(shift)}-{short_dtype(dtype)}",
            Problem(q_len=40, kv_len=100, bias=Table("constant", "qk", size=shift), dtype=dtype, return_lse=True, grads=WITH_BIAS),
        )
        for shift in SHIFTS
        for dtype in HALF_AND_SINGLE
    ],
    *[
        Case("T03", f"shift-by-channel-{_sign(shift)}-{short_dtype(dtype)}", Problem(q_len=70, shift=shift, dtype=dtype, causal=True))
        for shift in SHIFTS
        for dtype in HALF_AND_SINGLE
    ],
    *[
        Case("T03", f"shift-and-empty-tile-{_sign(shift)}-{short_dtype(dtype)}", problem)
        for shift in (1e4, -1e4)
        for dtype in HALF_AND_SINGLE
        for problem in [Problem(q_len=20, kv_len=150, shift=shift, dtype=dtype, mask=Table("empty_prefix", "1k", size=70))]
    ],
    *[
        Case("T03", f"lse-below-minus-90-{short_dtype(dtype)}", Problem(q_len=40, shift=-100.0, dtype=dtype, return_lse=True, loss="o+lse"))
        for dtype in HALF_AND_SINGLE
    ],
    *[Case("T03", f"outliers-{short_dtype(dtype)}", Problem(q_len=65, values="outliers", dtype=dtype)) for dtype in HALF_AND_SINGLE],
    *[Case("T03", f"large-{short_dtype(dtype)}", Problem(q_len=65, values="large", dtype=dtype, causal=True)) for dtype in HALF_AND_SINGLE],
    # the running maximum was seeded with a finite number that real scores can be below
    *[
        Case("T03", f"below-any-sentinel-{name}-{short_dtype(dtype)}", problem)
        for dtype in ("bfloat16", "float32")
        for name, problem in (
            ("scores-2e5", Problem(q_len=9, kv_len=40, head_dim=128, shift=-2e5, dtype=dtype)),
            ("bias-1e6", Problem(q_len=9, kv_len=40, bias=Table("constant", "qk", size=-1e6, dtype="float32"), dtype=dtype)),
            ("bias-1e30", Problem(q_len=9, kv_len=40, bias=Table("constant", "qk", size=-1e30, dtype="float32"), dtype=dtype)),
        )
    ],
    *[
        Case(
            "T03",
            f"grouped-far-below-{short_dtype(dtype)}",
            Problem(q_heads=7, kv_heads=1, q_len=88, kv_len=112, values="far", dtype=dtype, causal=True, align="bottom_right"),
        )
        for dtype in HALF_AND_SINGLE
    ],
    *[
        Case(
            "T03",
            f"sinks-{kind}-{short_dtype(dtype)}",
            Problem(q_len=40, sinks=Sinks(kind), dtype=dtype, return_lse=True, loss="o+lse", grads=("q", "k", "v", "sinks")),
        )
        for kind in ("large", "far_above", "far_below", "some_minus_inf", "zeros")
        for dtype in HALF_AND_SINGLE
    ],
    # v and the gradient are of one sign: no row cancels another, and a sink's own error shows
    *[
        Case(
            "T03",
            f"sinks-uncancelled-{kind}-of-{short_dtype(of_sinks)}-{short_dtype(dtype)}",
            Problem(
                q_len=40,
                values="ones_of_v",  # equal scores would all round alike
                sinks=Sinks(kind, of_sinks),
                dtype=dtype,
                grad_storage="sum",
                grads=("q", "k", "v", "sinks"),
            ),
        )
        for kind in ("random", "above")
        for of_sinks, dtype in (("float32", "float16"), ("float32", "bfloat16"), ("float32", "float32"))
    ],
    # a parameter, so in fp32 under half precision, and maybe a part of another one
    *[
        Case(
            "T03",
            f"sinks-of-{short_dtype(of_sinks)}-stored-{storage}-{short_dtype(dtype)}",
            Problem(
                q_heads=6,
                kv_heads=2,
                q_len=40,
                sinks=Sinks("random", of_sinks, storage),
                dtype=dtype,
                return_lse=True,
                loss="o+lse",
                grads=("q", "k", "v", "sinks"),
            ),
        )
        for of_sinks, dtype in (
            ("float32", "float16"),
            ("float32", "bfloat16"),
            ("float64", "float32"),
            ("bfloat16", "float16"),
            ("float16", "float32"),
        )
        for storage in ("contiguous", "step_dim")
    ],
    *[
        Case("T03", "relation-shift", Problem(q_len=40, kv_len=70, head_dim=16), check="shift_of_scores"),
        Case("T03", "relation-shift-fp64", Problem(q_len=40, kv_len=70, head_dim=16, dtype="float64"), check="shift_of_scores"),
        Case("T03", "relation-shift-bf16", Problem(q_len=40, kv_len=70, head_dim=16, dtype="bfloat16"), check="shift_of_scores"),
    ],
    *[
        Case("T14", f"scale-{name}-{short_dtype(dtype)}", Problem(q_len=50, scale=scale, dtype=dtype, return_lse=True, loss="o+lse"))
        for name, scale in (("none", None), ("one", 1.0), ("zero", 0.0), ("negative", -0.125), ("tiny", 1e-6))
        for dtype in DTYPES
    ],
    *[
        Case(
            "T14",
            f"scale-negative-causal-{short_dtype(dtype)}",
            Problem(q_len=70, scale=-0.3, causal=True, dtype=dtype, mask=Table("padding")),
        )
        for dtype in HALF_AND_SINGLE
    ],
    *[
        Case(
            "T14",
            f"scale-negative-large-{short_dtype(dtype)}",
            Problem(q_len=50, scale=-0.5, values="large", dtype=dtype, return_lse=True, loss="o+lse"),
        )
        for dtype in DTYPES
    ],
    *[
        Case(
            "T14",
            f"softcap-{cap:g}-{short_dtype(dtype)}",
            Problem(q_len=50, softcap=cap, dtype=dtype, values="large", return_lse=True, loss="o+lse"),
        )
        for cap in (0.5, 5.0, 50.0)
        for dtype in DTYPES
    ],
    *[
        Case("T14", f"softcap-and-{name}-{short_dtype(dtype)}", Problem(q_len=50, softcap=3.0, dtype=dtype, **options))
        for name, options in (
            ("bias", {"bias": Table(), "grads": WITH_BIAS}),
            ("negative-scale", {"scale": -0.5}),
            ("causal", {"causal": True}),
        )
        for dtype in HALF_AND_SINGLE
    ],
    # scores beyond fp16 before they are scaled
    *[
        Case(
            "T14",
            f"scores-beyond-fp16-{short_dtype(dtype)}",
            Problem(q_len=40, head_dim=64, values="fp16_overflow", dtype=dtype, scale=scale),
        )
        for dtype, scale in (("float16", 2**-20), ("float16", None), ("bfloat16", None), ("float32", None))
        if not (dtype == "float16" and scale is None)
    ],
    Case("T14", "scores-beyond-fp16-default-scale-fp16", Problem(q_len=40, head_dim=64, values="fp16_overflow", dtype="float16")),
    *[
        Case(
            "T14",
            f"precision-{name}-{short_dtype(dtype)}",
            Problem(
                q_len=q_len,
                kv_len=kv_len,
                head_dim=head_dim,
                dtype=dtype,
                values=values,
                grad_storage="sum" if values == "equal" else "contiguous",
            ),
        )
        for name, q_len, kv_len, head_dim, values in (
            ("long-rows", 16, 600, 64, "normal"),
            ("long-columns", 300, 16, 64, "normal"),
            ("wide", 40, 40, 192, "normal"),
            ("small-values", 65, 65, 64, "small"),
            ("ones", 33, 65, 32, "ones"),
            ("long-ones", 16, 600, 32, "ones"),  # nothing cancels: a sum in half precision shows
            ("long-columns-equal", 600, 16, 32, "equal"),  # nor do dk and dv, under a gradient of ones
            ("zeros", 33, 65, 32, "zeros"),
        )
        for dtype in DTYPES
        # sums of equal terms round alike, all in one direction: in fp64 no half-precision term leaves room for that
        if not (values in ("ones", "equal") and dtype == "float64")
    ],
    *[
        Case(
            "T14",
            f"relation-{relation}-{short_dtype(dtype)}",
            Problem(q_len=40, kv_len=70, dtype=dtype, mask=Table("random"), bias=Table("random")),
            check=relation,
        )
        for relation in ("permutation_of_keys", "value_is_linear")
        for dtype in HALF_AND_SINGLE
    ],
    *[
        Case("T14", f"tf32-{name}", problem, check="tf32", device="cuda")
        for name, problem in (
            ("plain", Problem(q_len=130, head_dim=128)),
            ("causal", Problem(q_len=130, causal=True)),
            ("layout", Problem(q_len=130, head_dim=128, layout=Blocks("pairs", (64, 64)))),
        )
    ],
]
