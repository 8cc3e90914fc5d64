"""T32, first part: the smallest call of each feature, forward alone and with gradients; and the plain calls that no
backend may refuse."""

from __future__ import annotations

from dataclasses import replace

from attnzoo.testing.case import Case
from attnzoo.testing.problem import DTYPES, Blocks, Problem, Segments, Sinks, Table, short_dtype

PLAIN = Problem(q_len=32, head_dim=32)

FEATURES: dict[str, Problem] = {
    "causal": Problem(q_len=32, causal=True),
    "top_left": Problem(q_len=16, kv_len=32, causal=True, align="top_left"),
    "bottom_right": Problem(q_len=16, kv_len=32, causal=True, align="bottom_right"),
    "window": Problem(q_len=32, window=(5, 3)),
    "mask": Problem(q_len=32, mask=Table("padding")),
    "bias": Problem(q_len=32, bias=Table()),
    "bias_grad": Problem(q_len=32, bias=Table(), grads=("q", "k", "v", "bias")),
    "segments": Problem(q_len=32, segments=Segments()),
    "layout": Problem(q_len=64, layout=Blocks("diagonal", (32, 32))),
    "softcap": Problem(q_len=32, softcap=5.0),
    "sinks": Problem(q_len=32, sinks=Sinks(), grads=("q", "k", "v", "sinks")),
    "dropout": Problem(q_len=32, dropout_p=0.25, dropout_seed=17),
    "lse": Problem(q_len=32, return_lse=True, loss="o+lse"),
    "deterministic": Problem(q_len=32, deterministic=True),
    "grouped_heads": Problem(q_len=32, q_heads=4, kv_heads=2),
    "value_dim": Problem(q_len=32, value_dim=16),
    "empty": Problem(q_len=32, kv_len=0),
}


EVERYTHING = Problem(
    q_heads=4,
    kv_heads=2,
    q_len=16,
    kv_len=32,
    value_dim=16,
    causal=True,
    align="bottom_right",
    window=(9, 0),
    mask=Table("padding"),
    bias=Table(),
    segments=Segments(),
    layout=Blocks("random"),
    softcap=5.0,
    sinks=Sinks(),
    dropout_p=0.1,
    dropout_seed=1,
    return_lse=True,
    deterministic=True,
    grads=("q", "k", "v", "bias", "sinks"),
)


def _forward(problem: Problem) -> Problem:
    return replace(problem, grads=(), loss="o")


CASES = [
    *[
        Case("T32", f"plain-{direction}-{short_dtype(dtype)}", replace(problem, dtype=dtype), required=True)
        for dtype in DTYPES
        for direction, problem in (("forward", _forward(PLAIN)), ("backward", PLAIN))
    ],
    *[
        Case("T32", f"claim-{feature}-{direction}", made, check="claim", required=True)
        for feature, problem in FEATURES.items()
        for direction, made in (("forward", _forward(problem)), ("backward", problem))
        if not (feature == "bias_grad" and direction == "forward")
    ],
    Case("T11", "claimed-head-dims", PLAIN, check="claimed_head_dims", required=True),
    Case("T28", "unclaimed-device", PLAIN, check="unclaimed_device"),
    Case("T31", "declaration", PLAIN, check="declaration", required=True),
    Case("T32", "unclaimed-dtype", PLAIN, check="unclaimed_dtype"),
    Case("T32", "all-reasons-forward", _forward(EVERYTHING), check="all_reasons"),
    Case("T32", "all-reasons-backward", EVERYTHING, check="all_reasons"),
    Case("T32", "rules-reach-the-result", PLAIN, check="rules_reach_the_result", required=True),
]
