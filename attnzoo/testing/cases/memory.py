"""T04: poison in the slack. T05: poison in what the allocator returns. T12: 2^31 and grids. T13: alignment."""

from __future__ import annotations

from dataclasses import replace

from attnzoo.testing.case import Case
from attnzoo.testing.problem import Blocks, Problem, Sinks, Table, short_dtype

DTYPES = ("float16", "bfloat16", "float32")
EVERYTHING = Problem(
    q_heads=4,
    kv_heads=2,
    q_len=50,
    kv_len=70,
    value_dim=24,
    causal=True,
    align="bottom_right",
    mask=Table("random"),
    bias=Table("random"),
    sinks=Sinks(),
    return_lse=True,
    loss="o+lse",
    grads=("q", "k", "v", "bias", "sinks"),
)

ALLOCATED: dict[str, Problem] = {
    "plain": Problem(q_len=33),
    "tail": Problem(q_len=65, kv_len=129, head_dim=40),
    "head-dim-72": Problem(q_len=40, head_dim=72),
    "head-dim-104": Problem(q_len=40, head_dim=104),
    "value-dim": Problem(q_len=33, head_dim=48, value_dim=16),
    "one-query": Problem(q_len=1, kv_len=20, return_lse=True, loss="o+lse"),
    "grouped": Problem(q_heads=6, kv_heads=2, q_len=33),
    "one-key-head": Problem(q_heads=5, kv_heads=1, q_len=33),
    "empty-rows": Problem(q_len=40, mask=Table("empty_rows"), return_lse=True, loss="o+lse"),
    "bottom-right": Problem(q_len=70, kv_len=30, causal=True, align="bottom_right", return_lse=True, loss="o+lse"),
    "unseen-keys": Problem(q_len=20, kv_len=90, causal=True, align="top_left"),
    "window": Problem(q_len=70, window=(3, 0)),
    "bias": Problem(q_len=33, bias=Table("random", "1h1k"), grads=("q", "k", "v", "bias")),
    "sinks": Problem(q_len=33, sinks=Sinks(), grads=("sinks",)),
    "layout": Problem(q_len=70, layout=Blocks("empty_columns")),
    "layout-none": Problem(q_len=40, layout=Blocks("none"), return_lse=True, loss="o+lse"),
    "dropout": Problem(q_len=40, dropout_p=0.4, dropout_seed=9),
    "no-keys": Problem(q_len=20, kv_len=0, return_lse=True, loss="o+lse"),
}


def _with(problem: Problem, **changes: object) -> Problem:
    return replace(problem, **changes)  # type: ignore[arg-type]


def _only(place: int, storage: str) -> tuple[str, str, str]:
    """One of q, k and v stored so, the others contiguous."""
    where = ["contiguous"] * 3
    where[place] = storage
    return where[0], where[1], where[2]


CASES = [
    *[
        Case(
            "T04",
            f"slack-{storage}-{short_dtype(dtype)}",
            Problem(q_len=45, kv_len=45, storage=(storage,) * 3, grad_storage=storage, dtype=dtype),
            check="poisoned_slack",
        )
        for storage in ("slack", "odd_rows", "packed", "packed_dim", "step", "step_heads")
        for dtype in DTYPES
    ],
    *[
        Case("T04", f"slack-{name}", problem, check="poisoned_slack")
        for name, problem in (
            ("of-mask", Problem(q_len=45, kv_len=70, mask=Table("random", storage="slack"))),
            ("of-mask-rows", Problem(q_len=45, kv_len=70, mask=Table("random", "11qk", storage="odd_rows"))),
            ("of-bias", Problem(q_len=45, kv_len=70, bias=Table("random", storage="slack"), grads=("q", "k", "v", "bias"))),
            ("of-bias-rows", Problem(q_len=45, kv_len=70, bias=Table("random", "1hqk", storage="odd_rows"), grads=("bias",))),
            ("of-everything", _with(EVERYTHING, storage=("slack", "odd_rows", "packed"), grad_storage="slack")),
            ("head-dim-40", Problem(q_len=20, head_dim=40, storage=("packed_dim",) * 3)),
            ("head-dim-1", Problem(q_len=20, head_dim=1, storage=("odd_rows",) * 3)),
            ("decode", Problem(q_len=1, kv_len=67, storage=("slack",) * 3, causal=True, align="bottom_right")),
            ("layout", Problem(q_len=70, layout=Blocks("pairs", (32, 32)), storage=("slack",) * 3)),
            ("cut-block", Problem(batch=1, q_len=200, kv_len=384, layout=Blocks("pairs", (256, 256)), storage=("slack",) * 3)),
        )
    ],
    *[Case("T05", f"freed-blocks-{name}", problem, check="poisoned_free_blocks") for name, problem in ALLOCATED.items()],
    *[
        Case("T05", f"canaries-{name}-{short_dtype(dtype)}", _with(problem, dtype=dtype), check="poisoned_allocations")
        for name, problem in {**ALLOCATED, "everything": EVERYTHING}.items()
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Case(
            "T12",
            f"{far.removeprefix('far_')}-2-to-31-apart-in-{name}-{short_dtype(dtype)}",
            Problem(batch=2 if far == "far_batches" else 1, q_len=45, storage=_only(place, far), dtype=dtype),
            check="huge_strides",
        )
        for far in ("far_batches", "far_rows")
        for place, name in enumerate("qkv")
        for dtype in ("float16", "bfloat16")
    ],
    # blocks are walked by kernels of their own
    *[
        Case(
            "T12",
            f"{far.removeprefix('far_')}-2-to-31-apart-in-{name}-layout-bf16",
            Problem(
                batch=2 if far == "far_batches" else 1,
                q_len=45,
                storage=_only(place, far),
                dtype="bfloat16",
                layout=Blocks("pairs", (16, 16)),
            ),
            check="huge_strides",
        )
        for far in ("far_batches", "far_rows")
        for place, name in enumerate("qkv")
    ],
    Case(
        "T12", "grid-batch-65536-layout", Problem(batch=65536, q_heads=1, q_len=2, head_dim=8, grads=("v",), layout=Blocks("all", (16, 16)))
    ),
    Case("T12", "grid-many-keys-layout", Problem(batch=1, q_heads=1, q_len=3, kv_len=70000, head_dim=8, layout=Blocks("all", (16, 64)))),
    Case("T12", "grid-batch-65536", Problem(batch=65536, q_heads=1, q_len=4, head_dim=16)),
    Case("T12", "grid-heads-65536", Problem(batch=1, q_heads=65536, q_len=4, head_dim=16)),
    Case("T12", "grid-batch-and-heads", Problem(batch=300, q_heads=300, kv_heads=100, q_len=2, head_dim=8, causal=True)),
    Case("T12", "grid-many-queries", Problem(batch=1, q_heads=1, q_len=70000, kv_len=3, head_dim=8)),
    Case("T12", "grid-many-keys", Problem(batch=1, q_heads=1, q_len=3, kv_len=70000, head_dim=8)),
    Case(
        "T12", "mask-65537-rows", Problem(batch=1, q_heads=1, q_len=65537, head_dim=64, dtype="bfloat16"), check="last_rows", device="cuda"
    ),
    Case(
        "T12",
        "mask-of-three-heads",
        Problem(batch=1, q_heads=3, q_len=33000, head_dim=64, dtype="float16"),
        check="last_rows",
        device="cuda",
    ),
    *[
        Case(
            "T12",
            f"expanded-{dims}",
            Problem(
                batch=3,
                q_heads=2,
                q_len=40,
                mask=Table("random", storage=storage),
                bias=Table("random", storage=storage),
                grads=("q", "bias"),
            ),
        )
        for dims, storage in (("batch", "expand_batch"), ("heads", "expand_heads"), ("all", "expand_all"))
    ],
    *[
        Case(
            "T13",
            f"offset-{offset}-{short_dtype(dtype)}",
            Problem(q_len=40, offset=offset, dtype=dtype, mask=Table("random")),
            check="aligned_then_offset",
        )
        for offset in range(1, 9)
        for dtype in DTYPES
    ],
    *[
        Case(
            "T13",
            f"offset-{offset}-layout-{short_dtype(dtype)}",
            Problem(q_len=40, offset=offset, dtype=dtype, layout=Blocks("pairs")),
            check="aligned_then_offset",
        )
        for offset, dtype in ((1, "bfloat16"), (2, "float32"), (4, "float16"))
    ],
    *[
        Case(
            "T13",
            f"offset-{offset}-{storage}-{short_dtype(dtype)}",
            Problem(q_len=40, kv_len=65, offset=offset, storage=(storage,) * 3, grad_storage=storage, dtype=dtype),
        )
        for storage in ("odd_rows", "bshd", "slack")
        for offset in (0, 1, 2, 4)
        for dtype in ("float16", "float32")
    ],
    *[
        Case(
            "T13",
            f"odd-row-stride-d{head_dim}-{short_dtype(dtype)}",
            Problem(q_len=33, head_dim=head_dim, storage=("odd_rows",) * 3, dtype=dtype),
            check="accuracy",
        )
        for head_dim in (16, 64, 5, 33)
        for dtype in DTYPES
    ],
    *[
        Case(
            "T13",
            f"bias-offset-{offset}",
            Problem(q_len=40, kv_len=41, offset=offset, bias=Table("random", storage="odd_rows"), grads=("q", "k", "v", "bias")),
        )
        for offset in (1, 3, 7)
    ],
]
