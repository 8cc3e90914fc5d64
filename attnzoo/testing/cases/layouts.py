"""T23: block layouts."""

from __future__ import annotations

from typing import Any

from attnzoo.testing.case import Case
from attnzoo.testing.problem import Blocks, Problem, Segments, Table, short_dtype

DTYPES = ("float16", "bfloat16", "float32")
KINDS = (
    "random",
    "all",
    "none",
    "diagonal",
    "empty_rows",
    "empty_columns",
    "last_column",
    "causal",
    "window",
    "pairs",
    "one_pair",
    "all_partial",
    "band_rule",
    "segment_rule",
)
BLOCKS = ((16, 16), (32, 64), (64, 32), (128, 128), (20, 24), (1, 1), (48, 16))
CUT: dict[str, Any] = {"batch": 1, "q_heads": 2, "head_dim": 64}

CASES = [
    *[
        Case(
            "T23",
            f"{kind}-{block[0]}x{block[1]}",
            Problem(batch=1, q_len=70, kv_len=70, layout=Blocks(kind, block), return_lse=True, loss="o+lse"),
        )
        for kind in KINDS
        for block in BLOCKS
    ],
    *[
        Case("T23", f"{kind}-{short_dtype(dtype)}", Problem(q_len=130, head_dim=64, layout=Blocks(kind, (32, 32)), dtype=dtype))
        for kind in KINDS
        for dtype in ("float16", "bfloat16")
    ],
    *[
        Case(
            "T23",
            f"{kind}-per-{dims}-{short_dtype(dtype)}",
            Problem(batch=3, q_heads=4, kv_heads=2, q_len=50, layout=Blocks(kind, dims=dims), dtype=dtype),
        )
        for kind in ("random", "pairs", "empty_columns", "segment_rule")
        for dims in ("1h", "b1", "bh")
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Case("T23", f"{kind}-{q_len}x{kv_len}", Problem(batch=1, q_len=q_len, kv_len=kv_len, layout=Blocks(kind, (16, 16))))
        for kind in ("random", "pairs", "causal_end", "band_rule", "empty_columns", "last_column")
        for q_len, kv_len in ((1, 5), (5, 1), (3, 300), (300, 3), (17, 33), (32, 17), (17, 32), (64, 48))
    ],
    # the layout of causal, for every head dim, against the truth of causal itself
    *[
        Case(
            "T23",
            f"causal-layout-d{head_dim}-{short_dtype(dtype)}",
            Problem(batch=1, q_len=130, head_dim=head_dim, layout=Blocks("causal", (64, 64)), dtype=dtype),
        )
        for head_dim in (16, 32, 64, 96, 128)
        for dtype in DTYPES
    ],
    *[
        Case("T23", f"{kind}-with-{name}", Problem(q_len=70, layout=Blocks(kind, (32, 32)), **options))
        for kind in ("random", "pairs", "empty_rows")
        for name, options in (
            ("causal", {"causal": True}),
            ("window", {"window": (20, 5)}),
            ("mask", {"mask": Table("random")}),
            ("bias", {"bias": Table("random", "1hqk"), "grads": ("q", "k", "v", "bias")}),
            ("segments", {"segments": Segments()}),
            ("dropout", {"dropout_p": 0.3, "dropout_seed": 6}),
            ("softcap", {"softcap": 3.0}),
            ("bshd", {"storage": ("bshd",) * 3, "grad_storage": "bshd"}),
            ("value-dim", {"value_dim": 16}),
        )
    ],
    # blocks as wide as the tiles of kernels for one card, which serve few head dims each
    *[
        Case(
            "T23",
            f"wide-blocks-{kind}-d{head_dim}-{short_dtype(dtype)}",
            Problem(batch=1, q_heads=4, kv_heads=2, q_len=300, kv_len=420, head_dim=head_dim, layout=Blocks(kind, (128, 128)), dtype=dtype),
        )
        for kind in ("random", "pairs", "all_partial")
        for head_dim in (64, 96, 128)
        for dtype in ("float16", "bfloat16")
    ],
    # the last block is cut in the middle, or by one: what lies outside must not count, though a score of 0 would beat every real one
    *[
        Case(
            "T23",
            f"cut-blocks-low-scores-{kind}-{q_len}x{kv_len}-{short_dtype(dtype)}",
            Problem(**CUT, q_len=q_len, kv_len=kv_len, shift=-1e4, layout=Blocks(kind, (256, 256)), dtype=dtype),
        )
        for kind in ("all", "all_partial", "pairs", "causal_end")
        for q_len, kv_len in ((384, 384), (40, 128), (255, 640), (511, 255))
        for dtype in ("float16", "float32")
        if dtype == "float16" or (kind in ("all", "pairs") and kv_len > 128)
    ],
    *[
        Case(
            "T23",
            f"cut-blocks-low-bias-{kind}-{q_len}x{kv_len}-{short_dtype(dtype)}",
            Problem(
                **CUT,
                q_len=q_len,
                kv_len=kv_len,
                bias=Table("constant", "qk", size=-1e4),
                grads=("q", "k", "v", "bias"),
                layout=Blocks(kind, (256, 256)),
                dtype=dtype,
            ),
        )
        for kind in ("all", "pairs")
        for q_len, kv_len in ((384, 384), (511, 255))
        for dtype in ("bfloat16", "float32")
    ],
    # a compiler that forgets how narrow a product is counts its elements twice
    *[
        Case(
            "T23",
            f"narrow-blocks-with-{name}-and-dropout-{short_dtype(dtype)}",
            Problem(q_len=40, layout=Blocks("random", (16, 16)), dropout_p=0.3, dropout_seed=6, dtype=dtype, **options),
        )
        for name, options in (("mask", {"mask": Table("random")}), ("int8-segments", {"segments": Segments(dtype="int8")}))
        for dtype in ("float16", "bfloat16")
    ],
    *[
        Case(
            "T23",
            f"relation-mask-{kind}-{short_dtype(dtype)}",
            Problem(batch=1, q_len=70, layout=Blocks(kind, (32, 16)), dtype=dtype),
            check="layout_as_mask",
        )
        for kind in KINDS
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Case("T23", f"relation-full-{short_dtype(dtype)}", Problem(q_len=70, kv_len=45, dtype=dtype), check="full_layout")
        for dtype in DTYPES
    ],
]
