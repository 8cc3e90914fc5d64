"""T18, the rest: every two features of a call meet, alone together, with gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

from attnzoo.testing.case import Case
from attnzoo.testing.problem import Blocks, Problem, Segments, Sinks, Table, short_dtype

SKEWED: dict[str, Any] = {"q_len": 40, "kv_len": 60, "causal": True}

PARTS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "top_left": {**SKEWED, "align": "top_left"},
    "bottom_right": {**SKEWED, "align": "bottom_right"},
    "window": {"window": (9, 4)},
    "mask": {"mask": Table("random")},
    "bias": {"bias": Table("random", "1hqk")},
    "bias_grad": {"bias": Table("random", "1hqk"), "grads": ("bias",)},
    "segments": {"segments": Segments()},
    "layout": {"layout": Blocks("pairs", (32, 16))},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": Sinks(), "grads": ("sinks",)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
    "lse": {"return_lse": True, "loss": "o+lse"},
    "deterministic": {"deterministic": True},
    "grouped_heads": {"q_heads": 6, "kv_heads": 2},
    "value_dim": {"value_dim": 16},
    "empty": {"kv_len": 0},
}
"""Feature -> what it adds to a call of 50 queries and keys; `grads` beside q, k and v."""

NEVER_MEET: dict[tuple[str, str], str] = {
    ("causal", "top_left"): "causal alone is for one length, align for two",
    ("causal", "bottom_right"): "causal alone is for one length, align for two",
    ("top_left", "bottom_right"): "a call has one alignment",
}
"""Pairs that no call has -> why."""

NEEDS_ONE_LENGTH = {"causal", "window"}


def meeting(*features: str) -> Problem:
    """The call that needs these features, in the order of `PARTS`, and no other."""
    options: dict[str, Any] = {"q_len": 50}
    grads = ["q", "k", "v"]
    for feature in features:
        options |= PARTS[feature]
        grads += PARTS[feature].get("grads", ())
    if "empty" in features and NEEDS_ONE_LENGTH & {*features}:
        options |= {"kv_len": None, "batch": 0}
    return Problem(**{**options, "grads": tuple(grads)})


CASES = [
    Case("T18", f"pair-{first}-{second}-{short_dtype(dtype)}", replace(meeting(first, second), dtype=dtype))
    for place, (first, second) in enumerate(pair for pair in combinations(PARTS, 2) if pair not in NEVER_MEET)
    for dtype in (("float16", "bfloat16")[place % 2], "float32")
]
