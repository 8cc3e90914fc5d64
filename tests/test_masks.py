"""keep_mask and band_mask against pair-by-pair rules, whole and in tiles."""

from __future__ import annotations

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnzoo import AttentionInputs, AttentionSpec
from attnzoo.masks import band_mask, keep_mask, tile_of

bounds = st.none() | st.integers(0, 9) | st.just(2**40)
lengths = st.integers(0, 8)
aligns = st.sampled_from(["top_left", "bottom_right"])


def described(q_len, kv_len, **options):
    q, kv = torch.zeros(2, 3, q_len, 4), torch.zeros(2, 3, kv_len, 4)
    spec = AttentionSpec.of(q, kv, kv, **options)
    given = {name: options[name] for name in ("mask", "segment_ids") if name in options}
    return spec, AttentionInputs.of(spec, q, kv, kv, **given)


@settings(max_examples=150, deadline=None)
@given(lengths, lengths, st.booleans(), aligns, st.tuples(bounds, bounds))
def test_the_band_pair_by_pair(q_len, kv_len, causal, align, window):
    spec, _ = described(q_len, kv_len, causal=causal, align=align, window=window)
    found = band_mask(spec, slice(0, q_len), slice(0, kv_len), torch.device("cpu"))
    expected = torch.from_numpy(oracle.band(q_len, kv_len, causal, align, window))
    if found is None:
        assert expected.all(), "no band, but some pair may not attend"
    else:
        assert torch.equal(found, expected), f"band {spec.band}, diagonal {spec.diagonal}"


def test_no_rule_is_no_mask():
    spec, inputs = described(4, 6)
    assert keep_mask(spec, inputs, slice(0, 4), slice(0, 6)) is None, "every pair attends: there is nothing to mask"


def random_rules(q_len, kv_len, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, 1, q_len, kv_len, generator=generator) < 0.7
    ids = [torch.randint(-1, 2, (2, length), generator=generator) for length in (q_len, kv_len)]
    return {"causal": True, "align": "bottom_right", "window": (5, None), "mask": mask, "segment_ids": tuple(ids)}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 99))
def test_all_rules_compose_by_and(q_len, kv_len, seed):
    rules = random_rules(q_len, kv_len, seed)
    spec, inputs = described(q_len, kv_len, **rules)
    found = keep_mask(spec, inputs, slice(0, q_len), slice(0, kv_len)).expand(2, 3, q_len, kv_len)
    arrays = rules | {"mask": rules["mask"].numpy(), "segment_ids": [ids.numpy() for ids in rules["segment_ids"]]}
    expected = torch.from_numpy(oracle.allowed_pairs((2, 3, q_len, kv_len), **arrays))
    assert torch.equal(found, expected), f"{q_len} x {kv_len}, seed {seed}"


def slices(length):
    return st.integers(0, length).flatmap(lambda start: st.integers(start, length).map(lambda stop: slice(start, stop)))


@settings(max_examples=60, deadline=None)
@given(slices(7), slices(9))
def test_a_tile_is_a_slice_of_the_whole(rows, columns):
    spec, inputs = described(7, 9, **random_rules(7, 9, 3))
    whole = keep_mask(spec, inputs, slice(0, 7), slice(0, 9))
    assert torch.equal(keep_mask(spec, inputs, rows, columns), whole[:, :, rows, columns]), f"tile {rows}, {columns} differs"


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (7, 1), (7, 9)], ids=str)
def test_tile_of_a_broadcast_table(shape):
    table = torch.arange(63).view(7, 9)[: shape[0], : shape[1]][None, None]
    found = tile_of(table, slice(2, 5), slice(4, 9)).expand(1, 1, 3, 5)
    assert torch.equal(found, table.expand(1, 1, 7, 9)[:, :, 2:5, 4:9]), f"a table of {shape} is cut wrongly"


@pytest.mark.parametrize("dtypes", [(torch.int64, torch.int32), (torch.uint8, torch.int8), (torch.int16, torch.int16)], ids=str)
def test_segment_ids_of_any_two_integer_dtypes(dtypes):
    ids = torch.tensor([[0, 1, 100, 1]] * 2, dtype=dtypes[0]), torch.tensor([[1, 0, 100]] * 2, dtype=dtypes[1])
    spec, inputs = described(4, 3, segment_ids=ids)
    expected = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 1], [1, 0, 0]], dtype=torch.bool)
    assert torch.equal(keep_mask(spec, inputs, slice(0, 4), slice(0, 3))[1, 0], expected), f"ids of {dtypes} compare wrongly"
