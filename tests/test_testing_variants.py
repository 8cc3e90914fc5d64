"""The committed list of kernel variants."""

from __future__ import annotations

from attnzoo.testing.variants import FACTORS, VARIANTS, all_pairs, covering_list, pairs_of


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
    assert list(VARIANTS) == covering_list()
