"""The kernel variants of the deep profile: a committed list in which every two feature values meet, and what training asks for.

`python -m attnzoo.testing.variants` writes the list again; greedy, and the same every time.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["FACTORS", "VARIANTS", "covering_list", "pairs_of", "training_list"]

Variant = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]

FACTORS: dict[str, tuple[str, ...]] = {
    "dtype": ("float16", "bfloat16", "float32", "float64"),
    "head_dim": ("16", "40", "64", "72", "128", "256"),
    "value_dim": ("same", "narrow", "wide"),
    "band": ("none", "causal", "top_left", "bottom_right", "window", "causal_window"),
    "mask": ("none", "full", "keys"),
    "bias": ("none", "fixed", "full", "heads"),
    "segments": ("none", "documents"),
    "layout": ("none", "random", "pairs", "band_rule"),
    "softcap": ("none", "on"),
    "sinks": ("none", "on"),
    "dropout": ("none", "on"),
    "lse": ("none", "o+lse"),
    "group": ("1", "2", "4"),
    "grads": ("none", "all", "q", "kv", "v"),
    "deterministic": ("none", "on"),
    "storage": ("contiguous", "bshd", "slack"),
}
"""What a kernel is compiled for: factor -> its values, the simplest first."""

TRAINED_BANDS = ("none", "causal", "bottom_right", "causal_window", "window")

LIST = Path(__file__).with_name("variants.json")


def pairs_of(variant: Mapping[str, str]) -> set[Pair]:
    """Every two (factor, value) that meet in a variant."""
    return set(itertools.combinations(sorted(variant.items()), 2))


def all_pairs() -> list[Pair]:
    """Every two values of two factors, in a fixed order."""
    made = []
    for first, second in itertools.combinations(sorted(FACTORS), 2):
        made += [((first, a), (second, b)) for a in FACTORS[first] for b in FACTORS[second]]
    return made


def covering_list() -> list[Variant]:
    """Greedy: start from the first pair that is missing, then give each factor the value that covers most."""
    missing = dict.fromkeys(all_pairs())
    variants = []
    while missing:
        variant = dict(next(iter(missing)))
        for factor in FACTORS:
            if factor not in variant:
                variant[factor] = max(FACTORS[factor], key=lambda value: _gain(variant, factor, value, missing))
        for pair in pairs_of(variant):
            missing.pop(pair, None)
        variants.append({factor: variant[factor] for factor in FACTORS})
    return variants


def _gain(variant: Variant, factor: str, value: str, missing: Mapping[Pair, None]) -> int:
    met: Iterable[Pair] = (tuple(sorted(((factor, value), other))) for other in variant.items())  # type: ignore[misc]
    return sum(pair in missing for pair in met)


def training_list() -> list[Variant]:
    """Half precision, every gradient, and of the features the bands, the lse and grouped heads: where all features are drawn alike, such
    calls hardly occur, and many a backend has its fastest kernels for them alone."""
    plain = {factor: values[0] for factor, values in FACTORS.items()} | {"grads": "all"}
    turns = zip(itertools.cycle(("bfloat16", "float16")), itertools.cycle(("none", "none", "o+lse")), itertools.cycle(FACTORS["storage"]))
    made = []
    for head_dim, (band, group) in itertools.product(("64", "72", "128"), zip(TRAINED_BANDS, itertools.cycle(("1", "4")))):
        dtype, lse, storage = next(turns)
        made.append({**plain, "dtype": dtype, "head_dim": head_dim, "band": band, "lse": lse, "group": group, "storage": storage})
    return made


def _read() -> tuple[Variant, ...]:
    return tuple(json.loads(LIST.read_text()))


def write() -> None:
    """Write the list, a line a variant."""
    LIST.write_text("[\n" + ",\n".join(json.dumps(variant) for variant in covering_list() + training_list()) + "\n]\n")


if __name__ == "__main__":
    write()
else:
    VARIANTS = _read()
