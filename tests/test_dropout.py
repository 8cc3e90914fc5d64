"""Dropout by counter: the published Philox vectors, the contract's counter and lane, and the seed."""

from __future__ import annotations

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnzoo import AttentionInputs, AttentionSpec, attention
from attnzoo.dropout import dropout_keep, philox, threshold

# Counter, key and lanes from Random123's kat_vectors, philox4x32-10.
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "lanes"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(counter, key, lanes):
    words = [torch.tensor(word) for word in counter]
    found = tuple(int(lane) for lane in philox(tuple(torch.tensor(word) for word in key), tuple(words)))
    assert found == lanes, f"philox gives {[hex(lane) for lane in found]}"
    assert oracle.philox(counter, key) == lanes, "the tests' own philox is wrong"


word = st.integers(0, 2**32 - 1)


@settings(max_examples=100, deadline=None)
@given(st.tuples(word, word, word, word), st.tuples(word, word))
def test_philox_on_any_words(counter, key):
    found = philox(tuple(torch.tensor(w) for w in key), tuple(torch.tensor(w) for w in counter))
    assert tuple(int(lane) for lane in found) == oracle.philox(counter, key), f"differs at {counter}, {key}"


def keep(seed, p, *ranges):
    seed = (seed + 2**63) % 2**64 - 2**63
    return dropout_keep(torch.tensor([seed]), p, *ranges)


WHOLE = (range(2), range(3), range(5), range(11))


@pytest.mark.parametrize("seed", [0, 7, -1, -(2**63), 2**63 - 1, 2**63 + 5, 2**64 - 1, 0x123456789ABCDEF0], ids=hex)
def test_the_contracts_counter_and_lane(seed):
    found = keep(seed, 0.4, *WHOLE)
    for b, h, i, j in torch.cartesian_prod(*[torch.arange(len(r)) for r in WHOLE]).tolist():
        expected = oracle.is_kept(seed, 0.4, b, h, i, j)
        assert bool(found[b, h, i, j]) == expected, f"element {(b, h, i, j)} of seed {seed:#x}"


def test_high_indices():
    ranges = (range(70000, 70001), range(65537, 65538), range(2**31, 2**31 + 1), range(2**31 + 2, 2**31 + 6))
    found = keep(3, 0.5, *ranges).flatten().tolist()
    expected = [oracle.is_kept(3, 0.5, 70000, 65537, 2**31, j) for j in ranges[3]]
    assert found == expected, f"far indices give {found}, not {expected}"


def unit_range(length):
    return st.integers(0, length).flatmap(lambda start: st.integers(start, length).map(lambda stop: range(start, stop)))


@settings(max_examples=50, deadline=None)
@given(st.tuples(*[unit_range(len(r)) for r in WHOLE]))
def test_a_tile_is_a_slice_of_the_whole(ranges):
    b, h, i, j = (slice(r.start, r.stop) for r in ranges)
    assert torch.equal(keep(5, 0.3, *ranges), keep(5, 0.3, *WHOLE)[b, h, i, j]), f"tile {ranges} differs"


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_is_right(p):
    kept = keep(11, p, range(2), range(2), range(256), range(256)).double().mean().item()
    deviation = (p * (1 - p) / 2**18) ** 0.5
    assert abs(kept - (1 - p)) < 5 * deviation, f"{kept} kept at p = {p}"


@pytest.mark.parametrize(("p", "expected"), [(0.0, 0), (2.0**-33, 0), (2.0**-32, 1), (0.5, 2**31), (1 - 2.0**-53, 2**32 - 1)], ids=repr)
def test_the_threshold_is_the_floor(p, expected):
    assert threshold(p) == expected, f"threshold({p}) is {threshold(p)}"


def qkv(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 6, 4, generator=generator, dtype=dtype) for _ in range(3)]


def test_p_zero_draws_nothing():
    before = torch.get_rng_state()
    attention(*qkv(), dropout_p=0.0, backend="naive")
    attention(*qkv(), dropout_p=0.0, dropout_seed=3, backend="naive")
    attention(*qkv(), dropout_p=0.5, dropout_seed=3, backend="naive")
    assert torch.equal(torch.get_rng_state(), before), "the generator was advanced without need"


def test_no_seed_follows_manual_seed():
    with torch.random.fork_rng():
        torch.manual_seed(17)
        first, second = (attention(*qkv(), dropout_p=0.5, backend="naive") for _ in range(2))
        torch.manual_seed(17)
        again = attention(*qkv(), dropout_p=0.5, backend="naive")
    assert torch.equal(first, again), "manual_seed does not repeat the draw"
    assert not torch.equal(first, second), "two calls drew the same seed"


def test_drawn_seeds_cover_64_bits():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        q, k, v = qkv()
        spec = AttentionSpec.of(q, k, v, dropout_p=0.5)
        seeds = [int(AttentionInputs.of(spec, q, k, v).dropout_seed) % 2**64 for _ in range(200)]
    for bit in range(64):
        share = sum(seed >> bit & 1 for seed in seeds) / 200
        assert 0.3 < share < 0.7, f"bit {bit} is set in {share:.0%} of the seeds"


@pytest.mark.parametrize("seed", [-5, 2**63 + 12, 2**64 - 1])
def test_an_int_and_a_tensor_seed_are_one(seed):
    wrapped = torch.tensor((seed + 2**63) % 2**64 - 2**63)
    one = attention(*qkv(), dropout_p=0.5, dropout_seed=seed, backend="naive")
    for shape in ((), (1,), (1, 1)):
        other = attention(*qkv(), dropout_p=0.5, dropout_seed=wrapped.reshape(shape), backend="naive")
        assert torch.equal(one, other), f"a tensor seed of shape {shape} drops other elements"


def test_naive_drops_exactly_these_elements():
    q, k, _ = qkv(torch.float64)
    identity = torch.eye(6, dtype=torch.float64).expand(1, 2, 6, 6)
    kept = attention(q, k, identity, dropout_p=0.4, dropout_seed=9, backend="naive")
    whole = attention(q, k, identity, backend="naive")
    factors = torch.from_numpy(oracle.dropout_factors(9, 0.4, (1, 2, 6, 6)))
    torch.testing.assert_close(kept, whole * factors, msg="the values of the identity are not the dropped probabilities")


def test_checkpointing_repeats_the_drawn_seed():
    q, k, v = (t.requires_grad_() for t in qkv(torch.float64))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        plain = torch.autograd.grad(attention(q, k, v, dropout_p=0.5, backend="naive").square().sum(), (q, k, v))
        torch.manual_seed(1)
        again = torch.utils.checkpoint.checkpoint(lambda *t: attention(*t, dropout_p=0.5, backend="naive"), q, k, v, use_reentrant=False)
        recomputed = torch.autograd.grad(again.square().sum(), (q, k, v))
    for name, one, other in zip("qkv", plain, recomputed):
        assert torch.equal(one, other), f"d{name} differs: the recomputed forward dropped other elements"
