"""T22: dropout by counter."""

from __future__ import annotations

from dataclasses import replace

from attnzoo.testing.case import Case
from attnzoo.testing.problem import Blocks, Problem, Sinks, Table, short_dtype

DTYPES = ("float16", "bfloat16", "float32")
SEEDS = (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63))

WITH: dict[str, Problem] = {
    "plain": Problem(q_len=50, kv_len=37),
    "causal": Problem(q_len=70, causal=True),
    "mask": Problem(q_len=50, mask=Table("random")),
    "bias": Problem(q_len=50, bias=Table("random"), grads=("q", "k", "v", "bias")),
    "sinks": Problem(q_len=50, sinks=Sinks(), grads=("q", "k", "v", "sinks")),
    "grouped": Problem(q_heads=6, kv_heads=2, q_len=50),
    "layout": Problem(q_len=70, layout=Blocks("pairs", (32, 32))),
    "lse": Problem(q_len=50, return_lse=True, loss="o+lse"),
    "batch-and-heads": Problem(batch=5, q_heads=3, q_len=20),
    "long": Problem(batch=1, q_len=40, kv_len=260),
}

CASES = [
    *[
        Case("T22", f"dropout-{name}-{short_dtype(dtype)}", replace(problem, dropout_p=0.3, dropout_seed=77, dtype=dtype))
        for name, problem in WITH.items()
        for dtype in DTYPES
    ],
    *[Case("T22", f"p-{p:g}", Problem(q_len=50, dropout_p=p, dropout_seed=3)) for p in (1e-6, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1 - 2**-20)],
    *[Case("T22", f"seed-{seed}", Problem(q_len=40, dropout_p=0.5, dropout_seed=seed)) for seed in SEEDS],
    *[
        Case("T22", f"kept-elements-p{p:g}-{q_len}x{length}-seed{seed}", problem, check="kept_elements")
        for p, q_len, length, seed in ((0.5, 30, 30, 1), (0.1, 65, 64, 2**40 + 5), (0.9, 17, 129, 3), (0.3, 130, 5, 2**63 + 1))
        for problem in [
            Problem(batch=2, q_heads=3, q_len=q_len, kv_len=length, head_dim=8, value_dim=length, dropout_p=p, dropout_seed=seed, grads=())
        ]
    ],
    *[
        Case("T22", f"{check}-{short_dtype(dtype)}", Problem(q_len=40, dropout_p=0.4, dropout_seed=12, dtype=dtype), check=check)
        for check in ("seed_from_generator", "seed_of_either_type", "checkpointed")
        for dtype in DTYPES
    ],
    *[
        Case("T22", f"draws_nothing_at_zero-{short_dtype(dtype)}", Problem(q_len=40, dtype=dtype), check="draws_nothing_at_zero")
        for dtype in DTYPES
    ],
    *[
        Case(
            "T22",
            f"draws_nothing_with_seed-{short_dtype(dtype)}",
            Problem(q_len=40, dropout_p=0.4, dropout_seed=12, dtype=dtype),
            check="draws_nothing_with_seed",
        )
        for dtype in DTYPES
    ],
    Case("T22", "checkpointed-causal", Problem(q_heads=4, kv_heads=2, q_len=40, causal=True, dropout_p=0.4), check="checkpointed"),
    *[
        Case(
            "T22",
            f"backward-twice-{short_dtype(dtype)}",
            Problem(q_len=40, dropout_p=0.4, dropout_seed=1, dtype=dtype),
            check="backward_twice",
        )
        for dtype in DTYPES
    ],
    *[
        Case("T22", f"tensor-seed-{seed}", Problem(q_len=40, dropout_p=0.5, dropout_seed=seed, as_tensor_seed=True))
        for seed in (0, 2**62, -5)
    ],
]
