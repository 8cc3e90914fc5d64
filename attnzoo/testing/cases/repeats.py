"""T29: caches, threads, processes. T30: import. T34: determinism."""

from __future__ import annotations

from dataclasses import replace

from attnzoo.testing.case import Case
from attnzoo.testing.problem import Blocks, Problem, Segments, Sinks, Table, short_dtype

DTYPES = ("float16", "bfloat16", "float32")

CASES = [
    *[
        Case("T29", f"a-b-a-{name}-{short_dtype(dtype)}", problem, check="a_b_a")
        for dtype in DTYPES
        for name, problem in (
            ("plain", Problem(q_len=32, dtype=dtype)),
            ("grouped", Problem(q_heads=4, kv_heads=2, q_len=33, dtype=dtype)),
            ("mask", Problem(q_len=33, mask=Table("padding"), dtype=dtype)),
            ("layout", Problem(q_len=33, layout=Blocks("causal"), dtype=dtype)),
        )
    ],
    *[
        Case("T29", f"changed_in_place-{name}-{short_dtype(dtype)}", replace(problem, dtype=dtype), check="changed_in_place")
        for name, problem in (
            ("plain", Problem(q_len=33)),
            ("grouped", Problem(q_heads=4, kv_heads=2, q_len=33)),
            ("mask", Problem(q_len=33, mask=Table("random"))),
            ("mask-of-keys", Problem(q_len=33, mask=Table("random", "b11k"))),
            ("bias", Problem(q_len=33, bias=Table("random", "1hqk"), grads=("q", "k", "v", "bias"))),
            ("segments", Problem(q_len=33, segments=Segments())),
            ("sinks", Problem(q_len=33, sinks=Sinks(), grads=("q", "k", "v", "sinks"))),
            ("layout", Problem(q_len=33, layout=Blocks("causal"))),  # the same for every seed
            ("tensor-seed", Problem(q_len=33, dropout_p=0.4, dropout_seed=5, as_tensor_seed=True)),
        )
        for dtype in ("float16", "float32")
    ],
    *[
        Case("T29", f"threads-{name}", problem, check="threads")
        for name, problem in (
            ("plain", Problem(q_len=33)),
            ("half", Problem(q_len=33, dtype="float16")),
            ("layout", Problem(q_len=33, layout=Blocks("pairs"))),
        )
    ],
    Case("T29", "cold-caches-in-processes", Problem(q_len=33, dtype="bfloat16"), check="cold_caches", device="cuda"),
    Case(
        "T29",
        "cold-caches-in-processes-layout",
        Problem(q_len=33, dtype="bfloat16", layout=Blocks("pairs", (64, 64))),
        check="cold_caches",
        device="cuda",
    ),
    Case("T30", "named-without-gpu", Problem(q_len=4), check="named_without_gpu"),
    Case("T30", "without-triton", Problem(q_len=4), check="without_triton"),
    *[
        Case("T34", f"equal-bits-{name}-{short_dtype(dtype)}", problem, check="equal_bits")
        for dtype in ("bfloat16", "float32")
        for name, problem in (
            ("plain", Problem(batch=1, q_len=40, dtype=dtype)),
            ("grouped", Problem(batch=1, q_heads=4, kv_heads=1, q_len=20, kv_len=70, dtype=dtype)),
            (
                "bias",
                Problem(
                    batch=2, q_len=20, bias=Table("random", "11qk"), sinks=Sinks(), grads=("q", "k", "v", "bias", "sinks"), dtype=dtype
                ),
            ),
        )
    ],
    *[
        Case(
            "T34",
            f"equal-bits-layout-{short_dtype(dtype)}",
            Problem(batch=1, q_heads=2, kv_heads=1, q_len=40, dtype=dtype, layout=Blocks("pairs")),
            check="equal_bits",
        )
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Case("T34", f"relation-repetition-{name}-{short_dtype(dtype)}", problem, check="repetition")
        for dtype in DTYPES
        for name, problem in (
            ("causal", Problem(q_len=130, causal=True, dtype=dtype)),
            ("dropout", Problem(q_len=70, dropout_p=0.3, dropout_seed=5, dtype=dtype)),
            ("layout", Problem(q_len=130, layout=Blocks("empty_columns", (32, 32)), dtype=dtype)),
            ("lse", Problem(q_len=70, return_lse=True, loss="o+lse", dtype=dtype)),
        )
    ],
]
