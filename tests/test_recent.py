"""spec_of: the same specs and the same errors as AttentionSpec.of, and one spec for equal calls."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo import recent
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

DEFAULTS: dict[str, Any] = {
    "causal": False,
    "align": None,
    "window": None,
    "scale": None,
    "softcap": None,
    "return_lse": False,
    "deterministic": False,
}


def qkv(*, q_len: int = 6, kv_len: int = 6, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    return [torch.zeros(1, 2, length, 8, dtype=dtype, requires_grad=grad) for length in (q_len, kv_len, kv_len)]


def spec_of(tensors: list[Tensor], **options: Any) -> AttentionSpec:
    return recent.described(*tensors, *{**DEFAULTS, **options}.values())[0]


def test_equal_calls_share_a_spec() -> None:
    assert spec_of(qkv()) is spec_of(qkv())


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (1, 2)},
    "left": {"window": (1, None)},
    "scale": {"scale": 1.0},
    "int-scale": {"scale": 1},
    "softcap": {"softcap": 1.0},
    "lse": {"return_lse": True},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_the_validators(name: str) -> None:
    for _ in range(2):
        for options in CALLS.values():  # each behind all the others
            assert spec_of(qkv(), **options) == AttentionSpec.of(*qkv(), **options), f"{options}, {name} before"
        assert spec_of(qkv(), **CALLS[name]) == AttentionSpec.of(*qkv(), **CALLS[name])


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"causal": False}, {"causal": 0}),
        ({"return_lse": True}, {"return_lse": 1.0}),
        ({"deterministic": True}, {"deterministic": 1}),
        ({}, {"window": ()}),
        ({}, {"window": False}),
        ({"window": (1, 1)}, {"window": (True, 1)}),
        ({"window": (1, 1)}, {"window": (1.0, 1)}),
        ({"window": (1, 1)}, {"window": [1, 1]}),
        ({"window": (1, 1)}, {"window": (1, 1, 1)}),
        ({"scale": 1.0}, {"scale": True}),
        ({"scale": 1.0}, {"scale": torch.tensor(1.0)}),
        ({}, {"scale": torch.ones(2)}),
        ({}, {"scale": numpy.ones(2)}),
        ({}, {"softcap": numpy.ones(2)}),
        ({}, {"align": numpy.ones(2)}),
        ({}, {"causal": numpy.ones(2)}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"softcap": 1.0}, {"softcap": "1.0"}),
        ({"causal": True}, {"causal": True, "align": 0}),
        ({"causal": True}, {"causal": True, "align": ["top_left"]}),
    ],
)
def test_a_malformed_call_behind_its_twin_raises_what_it_raises_alone(good: dict[str, Any], bad: dict[str, Any]) -> None:
    spec_of(qkv(), **good)
    with pytest.raises((TypeError, ValueError)) as alone:
        AttentionSpec.of(*qkv(), **bad)
    with pytest.raises(type(alone.value)) as behind:
        spec_of(qkv(), **bad)
    assert str(behind.value) == str(alone.value)


def test_what_surrounds_the_call_counts() -> None:
    leaves = qkv(grad=True)
    assert spec_of(leaves).grads == ("q", "k", "v")
    with torch.no_grad():
        assert spec_of(leaves).grads == ()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert spec_of(leaves).dtype == torch.bfloat16
    assert spec_of(leaves).dtype == torch.float32
    torch.use_deterministic_algorithms(True)
    try:
        assert spec_of(leaves).deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert not spec_of(leaves).deterministic


def test_strides_dtypes_and_lengths_count() -> None:
    q, k, v = qkv()
    bshd = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v)]
    assert spec_of(bshd).strides != spec_of([q, k, v]).strides
    assert spec_of(qkv(dtype=torch.float64)).dtype == torch.float64
    assert spec_of(qkv(kv_len=7)).kv_len == 7
    with pytest.raises(ValueError, match="align"):
        spec_of(qkv(kv_len=7), causal=True)


def test_views_that_stand_for_their_negative_become_contiguous() -> None:
    q, k, v = [torch.zeros(1, 2, 6, 16)[..., :8] for _ in "qkv"]
    assert spec_of([q, k, v]).strides[0] == q.stride()
    assert spec_of([torch._neg_view(q), k, v]).strides[0] == (96, 48, 8, 1)


class Named(Tensor):
    pass


def named(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Named)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def spread(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def heads_inside(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


READY = {"contiguous": Tensor.contiguous, "heads inside": heads_inside, "slack": lambda t: torch.cat([t, t], -1)[..., :8], "leaf": leaf}
UNREADY = {"spread": spread, "transposed": lambda t: t.mT.contiguous().mT, "negated": torch._neg_view, "subclass": named}


@pytest.mark.parametrize("name", READY)
def test_a_ready_call_has_the_inputs_that_validation_gives(name: str) -> None:
    tensors = [READY[name](tensor) for tensor in qkv()]
    for _ in range(2):
        spec, is_ready = recent.described(*tensors, *DEFAULTS.values())
        assert is_ready, "q, k and v would be looked at again"
        expected, found = AttentionInputs.of(spec, *tensors), AttentionInputs.ready(*tensors)
        assert all([one is other for one, other in zip(found.tensors(), expected.tensors(), strict=True)])
        assert found.layout is None


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", UNREADY)
def test_a_call_whose_tensors_become_others_is_not_ready(name: str, place: int) -> None:
    tensors = qkv()
    tensors[place] = UNREADY[name](tensors[place])
    for _ in range(2):
        assert not recent.described(*tensors, *DEFAULTS.values())[1]


def test_a_call_is_not_ready_under_autocast_nor_where_kv_heads_are_cut_off() -> None:
    assert recent.described(*qkv(), *DEFAULTS.values())[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not recent.described(*qkv(), *DEFAULTS.values())[1]
        assert not recent.described(*qkv(dtype=torch.bfloat16), *DEFAULTS.values())[1], "autocast stays on inside of the backend"
    q, k, v = qkv()
    for _ in range(2):
        assert not recent.described(q[:, :0], k, v, *DEFAULTS.values())[1]


def test_a_subclass_is_asked_anew() -> None:
    q, k, v = qkv()
    assert spec_of([q.as_subclass(Named), k, v]) is not spec_of([q.as_subclass(Named), k, v])


def test_sparse_and_nested_tensors_are_refused_by_name() -> None:
    q, k, v = qkv()
    attnzoo.attention(q, k, v)
    with pytest.raises(TypeError, match="k is a sparse"):
        attnzoo.attention(q, k.to_sparse(), v)


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_calls", {})
    monkeypatch.setattr(recent, "MOST", 3)
    for length in range(1, 9):
        spec_of(qkv(q_len=length, kv_len=length))
    assert len(recent._calls) <= 3
