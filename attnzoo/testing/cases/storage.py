"""T08: how q, k and v lie in memory. T09: how the gradient of o does."""

from __future__ import annotations

from attnzoo.testing.case import Case
from attnzoo.testing.problem import Problem, Table, short_dtype

DTYPES = ("float16", "bfloat16", "float32")
LAYOUTS = (
    "bshd",
    "sbhd",
    "hbsd",
    "packed",
    "packed_dim",
    "slack",
    "odd_rows",
    "step",
    "step_heads",
    "last_dim",
    "step_dim",
    "expand_batch",
    "expand_heads",
    "expand_length",
    "expand_all",
    "overlap",
)
MIXED = (
    ("bshd", "contiguous", "sbhd"),
    ("contiguous", "last_dim", "bshd"),
    ("packed", "packed", "packed_dim"),
    ("expand_heads", "step", "contiguous"),
    ("sbhd", "expand_batch", "expand_length"),
    ("last_dim", "step_dim", "odd_rows"),
    ("contiguous", "contiguous", "last_dim"),
)
GRADIENTS = (
    "sum",
    "mean",
    "zeros",
    "row",
    "column",
    "transpose",
    "bshd",
    "sbhd",
    "slack",
    "step",
    "last_dim",
    "step_dim",
    "odd_rows",
    "expand_batch",
    "packed",
    "overlap",
)

CASES = [
    *[
        Case("T08", f"all-{storage}-{short_dtype(dtype)}", Problem(q_len=45, storage=(storage,) * 3, dtype=dtype, causal=True))
        for storage in LAYOUTS
        for dtype in DTYPES
    ],
    *[
        Case("T08", f"{tensor}-{storage}", Problem(q_len=45, kv_len=65, storage=where, mask=Table("random")))
        for storage in LAYOUTS
        for tensor, where in (
            ("q", (storage, "contiguous", "contiguous")),
            ("k", ("contiguous", storage, "contiguous")),
            ("v", ("contiguous", "contiguous", storage)),
        )
    ],
    *[
        Case(
            "T08",
            f"mixed-{'-'.join(where)}-{short_dtype(dtype)}",
            Problem(q_heads=4, kv_heads=2, q_len=45, kv_len=65, storage=where, dtype=dtype),
        )
        for where in MIXED
        for dtype in ("bfloat16", "float32")
    ],
    # expanded k and v with a mask, a wide head and one key more than whole tiles
    *[
        Case(
            "T08",
            f"expanded-kv-mask-{short_dtype(dtype)}",
            Problem(
                batch=1,
                q_len=33,
                kv_len=129,
                head_dim=256,
                storage=("contiguous", "expand_heads", "expand_heads"),
                mask=Table("random", "11qk"),
                dtype=dtype,
            ),
        )
        for dtype in ("float16", "bfloat16")
    ],
    *[
        Case("T09", f"gradient-{gradient}-{short_dtype(dtype)}", Problem(q_len=45, kv_len=33, grad_storage=gradient, dtype=dtype))
        for gradient in GRADIENTS
        for dtype in DTYPES
    ],
    *[
        Case(
            "T09",
            f"gradient-{gradient}-of-{storage}",
            Problem(q_heads=4, kv_heads=2, q_len=45, storage=(storage,) * 3, grad_storage=gradient, causal=True),
        )
        for gradient in ("contiguous", "bshd", "sbhd", "last_dim", "sum")
        for storage in ("bshd", "sbhd", "last_dim", "packed", "expand_all")
    ],
    *[
        Case(
            "T09",
            f"gradient-{gradient}-grouped-{short_dtype(dtype)}",
            Problem(q_heads=6, kv_heads=2, q_len=45, kv_len=33, grad_storage=gradient, dtype=dtype),
        )
        for gradient in ("bshd", "sbhd", "last_dim", "transpose", "sum")
        for dtype in ("float16", "float32")
    ],
    *[
        Case("T09", f"gradient-offset-{offset}-{short_dtype(dtype)}", Problem(q_len=45, grad_storage="bshd", offset=offset, dtype=dtype))
        for offset in (1, 3)
        for dtype in DTYPES
    ],
]
