"""Each feature under what usually changes around it, in T08, T10, T11, T14 and T15: a wide head, other strides, few queries
before many keys, another scale, fp64, and gradients of some inputs alone.

A kernel picks its tiles by the head dim, splits a decoding call, and leaves out what no gradient needs: in each of these it
reads masks, sinks, seeds and layouts anew.
"""

from __future__ import annotations

from dataclasses import replace

from attnzoo.testing.case import Case
from attnzoo.testing.cases.pairs import NEEDS_ONE_LENGTH, PARTS, meeting
from attnzoo.testing.problem import Problem, short_dtype

HALVES = ("float16", "bfloat16")
ALONE = (("q",), ("k",), ("v",), ("q", "k"), ("k", "v"))


def _decoding(feature: str) -> Problem:
    problem = replace(meeting(feature), q_len=3, kv_len=700, head_dim=16, batch=1)
    return replace(problem, align="bottom_right") if feature in NEEDS_ONE_LENGTH else problem


CASES = [
    *[
        Case("T11", f"head-dim-{head_dim}-with-{feature}-{short_dtype(dtype)}", replace(meeting(feature), head_dim=head_dim, dtype=dtype))
        for place, feature in enumerate(PARTS)
        for head_dim, dtype in ((64, HALVES[place % 2]), (128, HALVES[1 - place % 2]), (128, "float32"))
    ],
    *[
        Case(
            "T08",
            f"all-{storage}-with-{feature}-{short_dtype(dtype)}",
            replace(meeting(feature), storage=(storage,) * 3, grad_storage=storage, dtype=dtype),
        )
        for storage, dtype in (("bshd", "bfloat16"), ("bshd", "float32"), ("last_dim", "float16"))
        for feature in PARTS
    ],
    *[
        Case("T10", f"three-queries-700-keys-with-{feature}-{short_dtype(dtype)}", replace(_decoding(feature), dtype=dtype))
        for place, feature in enumerate(PARTS)
        for dtype in (HALVES[place % 2], "float32")
        if feature != "empty"
    ],
    *[
        Case("T14", f"scale-{name}-with-{feature}-{short_dtype(dtype)}", replace(meeting(feature), scale=scale, dtype=dtype))
        for place, feature in enumerate(PARTS)
        for name, scale, dtype in (("negative", -0.3, HALVES[place % 2]), ("one", 1.0, "float32"), ("zero", 0.0, "float32"))
    ],
    *[Case("T14", f"fp64-with-{feature}", replace(meeting(feature), dtype="float64")) for feature in PARTS],
    *[
        Case("T15", f"grads-{'-'.join(grads)}-with-{feature}-{short_dtype(dtype)}", replace(meeting(feature), grads=grads, dtype=dtype))
        for place, feature in enumerate(PARTS)
        for grads in ALONE
        for dtype in ((*HALVES, "float32")[place % 3],)
        if feature not in ("bias_grad", "empty")
    ],
]
