"""The committed list of kernel variants."""

from __future__ import annotations

from attnzoo.testing.variants import FACTORS, VARIANTS, all_pairs, covering_list, pairs_of, training_list

OTHERS = ("mask", "bias", "segments", "layout", "softcap", "sinks", "dropout", "deterministic")


def test_list_is_short_enough_to_compile() -> None:
    assert 0 < len(VARIANTS) <= 150


def test_every_two_values_meet() -> None:
    met = set().union(*[pairs_of(variant) for variant in VARIANTS])
    assert [pair for pair in all_pairs() if pair not in met] == []


def test_variants_name_every_factor() -> None:
    for variant in VARIANTS:
        assert list(variant) == list(FACTORS)
        assert all(value in FACTORS[factor] for factor, value in variant.items())


def test_committed_list_is_the_generated_one() -> None:
    assert list(VARIANTS) == covering_list() + training_list()


def test_what_training_asks_for_is_among_them() -> None:
    """Half precision with all gradients and no other feature, at the head dims that fast kernels take."""
    plain = [v for v in VARIANTS if v["grads"] == "all" and not any(v[name] != "none" for name in OTHERS)]
    for head_dim in ("64", "72", "128"):
        found = [v for v in plain if v["head_dim"] == head_dim and v["dtype"] in ("float16", "bfloat16")]
        assert {v["band"] for v in found} >= {"none", "causal", "bottom_right", "window", "causal_window"}
        assert {v["dtype"] for v in found} == {"float16", "bfloat16"}
