"""merge: parts over disjoint keys give what one call over all keys gives, values and gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnzoo import attention, merge


def qkv(q_len=5, kv_len=12, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 4, q_len, 8), (2, 2, kv_len, 8), (2, 2, kv_len, 6))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def partial(q, k, v, keys, mask, sinks=None):
    """Attention over a slice of the keys."""
    return attention(q, k[:, :, keys], v[:, :, keys], mask=mask[:, keys], sinks=sinks, return_lse=True, backend="naive")


cuts = st.lists(st.integers(0, 12), max_size=4).map(lambda inner: [0, *sorted(inner), 12])


@settings(max_examples=60, deadline=None)
@given(cuts, st.booleans(), st.integers(0, 2**16))
def test_parts_add_up_with_their_gradients(cuts, with_sinks, seed):
    q, k, v = (t.requires_grad_() for t in qkv(seed=seed))
    mask = torch.rand(5, 12, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask[0] = False  # a row that no part sees
    sinks = torch.tensor([0.5, -1.0, 2.0, -torch.inf], dtype=torch.float64).requires_grad_() if with_sinks else None
    slices = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
    parts = [partial(q, k, v, keys, mask, sinks if place == 0 else None) for place, keys in enumerate(slices)]
    leaves = [q, k, v, *([sinks] if with_sinks else [])]
    found = results_and_gradients(merge(parts), leaves)
    expected = results_and_gradients(partial(q, k, v, slice(None), mask, sinks), leaves)
    for name, one, other in zip(("o", "lse", "dq", "dk", "dv", "dsinks"), found, expected):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name} of parts cut at {cuts}: {text}")


def results_and_gradients(results, leaves):
    o, lse = results
    weights = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    return [o, lse, *torch.autograd.grad((o * weights).sum() + finite.square().sum(), leaves)]


def test_rows_empty_in_every_part():
    o, lse = torch.zeros(1, 2, 3, 4, requires_grad=True), torch.full((1, 2, 3), -torch.inf, requires_grad=True)
    merged_o, merged_lse = merge([(o, lse), (o, lse)])
    assert not merged_o.any(), f"o is {merged_o}, not 0"
    assert (merged_lse == -torch.inf).all(), f"lse is {merged_lse}, not -inf"
    for name, gradient in zip(("o", "lse"), torch.autograd.grad(merged_o.sum(), (o, lse))):
        assert not gradient.any(), f"a gradient reaches the {name} of an empty row: {gradient}"


def test_an_empty_part_changes_nothing():
    o, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    nothing = torch.zeros_like(o), torch.full_like(lse, -torch.inf)
    for parts in ([(o, lse), nothing], [nothing, (o, lse)], [(o, lse)]):
        merged_o, merged_lse = merge(parts)
        torch.testing.assert_close(merged_o, o, msg="o changed")
        torch.testing.assert_close(merged_lse, lse, msg="lse changed")


@pytest.mark.parametrize("shift", [1e4, -1e4, 0.0])
def test_a_common_shift_of_the_lse_cancels(shift):
    o, lse = torch.randn(2, 1, 2, 3, 4, dtype=torch.float64), torch.randn(2, 1, 2, 3, dtype=torch.float64)
    plain, shifted = merge(list(zip(o, lse))), merge(list(zip(o, lse + shift)))
    torch.testing.assert_close(shifted[0], plain[0], msg=f"o changed with a shift of {shift}")
    torch.testing.assert_close(shifted[1], plain[1] + shift, msg="lse did not move with the shift")


def test_two_known_parts():
    o = torch.tensor([1.0, 4.0]).view(2, 1, 1, 1, 1)
    lse = torch.tensor([1.0, 3.0]).log().view(2, 1, 1, 1)
    merged_o, merged_lse = merge(list(zip(o, lse)))
    assert merged_o.item() == pytest.approx((1 * 1 + 3 * 4) / 4), f"o is {merged_o.item()}"
    assert merged_lse.exp().item() == pytest.approx(4.0), f"exp(lse) is {merged_lse.exp().item()}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_fp32(dtype):
    o = torch.ones(64, 1, 1, 1, 1, dtype=dtype)
    o[0] = 3.0
    merged_o, merged_lse = merge([(part, torch.zeros(1, 1, 1)) for part in o])
    assert merged_o.dtype == dtype, f"o has {merged_o.dtype}"
    assert merged_lse.dtype == torch.float32, f"lse has {merged_lse.dtype}"
    expected = torch.tensor(66 / 64, dtype=dtype)  # a sum of 64 in bfloat16 itself would stall
    assert merged_o.item() == expected.item(), f"{merged_o.item()}, the mean is {expected.item()}"


def test_gradcheck_and_gradgradcheck():
    o = [torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lse = [torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def merged(o0, o1, lse0, lse1):
        return merge([(o0, lse0), (o1, lse1)])

    assert torch.autograd.gradcheck(merged, (*o, *lse)), "first derivatives are wrong"
    assert torch.autograd.gradgradcheck(merged, (*o, *lse)), "second derivatives are wrong"


OUT, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)

MALFORMED = {
    "empty": (ValueError, "parts is empty; at least one", []),
    "tensor": (TypeError, "parts[0] is a Tensor; pair", [OUT, LSE]),
    "not-a-sequence": (TypeError, "parts is a int; (o, lse)", 5),
    "triple": (TypeError, "parts[0] is a tuple of 3; pair", [(OUT, LSE, LSE)]),
    "list-of-numbers": (TypeError, "parts[1]; pair of tensors", [(OUT, LSE), (1.0, 2.0)]),
    "swapped": (ValueError, "parts[0] has o (1, 2, 3) and lse (1, 2, 3, 4)", [(LSE, OUT)]),
    "lse-shape": (ValueError, "parts[0] has o (1, 2, 3, 4) and lse (1, 2, 5)", [(OUT, torch.zeros(1, 2, 5))]),
    "shapes-differ": (ValueError, "parts[1] has o (1, 2, 3, 5); (1, 2, 3, 4); alike", [(OUT, LSE), (torch.zeros(1, 2, 3, 5), LSE)]),
    "o-dtypes-differ": (ValueError, "parts[1]; torch.float64; torch.float32; alike", [(OUT, LSE), (OUT.double(), LSE)]),
    "lse-dtypes-differ": (ValueError, "parts[1]; torch.float64; torch.float32; alike", [(OUT, LSE), (OUT, LSE.double())]),
    "o-int": (TypeError, "parts[0]; torch.int64; float", [(OUT.long(), LSE)]),
    "lse-int": (TypeError, "parts[0]; torch.int64; float", [(OUT, LSE.long())]),
    "devices-differ": (ValueError, "parts[1]; meta; cpu; alike", [(OUT, LSE), (OUT.to("meta"), LSE.to("meta"))]),
    "lse-device": (ValueError, "parts[0]; meta; cpu", [(OUT, LSE.to("meta"))]),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_parts(name):
    error, words, parts = MALFORMED[name]
    with pytest.raises(error) as caught:
        merge(parts)
    missing = [word for word in words.split("; ") if word not in str(caught.value)]
    assert not missing, f"{name}: the message {caught.value!s} lacks {missing}"
