"""The drop-in for torch's scaled_dot_product_attention means what torch's function means."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import attnzoo
from attnzoo.integrations.sdpa import scaled_dot_product_attention as dropin

BACKENDS = [name for name in ("naive", "tiled") if name in attnzoo.names()]


def draw(*shape, seed=0, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)


def bools(*shape, seed=3):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.4


def numbers(*shape):
    return draw(*shape, seed=4)


# id: (shapes of query, key, value, then the further arguments; a callable is called in the test)
CASES = {
    "4-dims": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6), {}),
    "3-dims": ((4, 5, 8), (4, 7, 8), (4, 7, 8), {}),
    "2-dims": ((5, 8), (7, 8), (7, 3), {}),
    "5-dims": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8), {}),
    "mixed-dims": ((2, 4, 5, 8), (4, 7, 8), (4, 7, 8), {}),
    "2-and-4-dims": ((2, 4, 5, 8), (7, 8), (7, 8), {}),
    "batch-broadcasts": ((1, 4, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8), {}),
    "one-kv-head": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8), {}),
    "one-query-head": ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {}),
    "one-key-head": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 4, 7, 8), {}),
    "gqa": ((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    "gqa-3-dims": ((6, 5, 8), (2, 7, 8), (2, 7, 8), {"enable_gqa": True}),
    "gqa-key-and-value-differ": ((2, 6, 5, 8), (2, 2, 7, 8), (2, 3, 7, 8), {"enable_gqa": True}),
    "gqa-equal-heads": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"enable_gqa": True}),
    "causal-square": ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8), {"is_causal": True}),
    "causal-wide": ((2, 4, 3, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"is_causal": True}),
    "causal-tall": ((2, 4, 7, 8), (2, 4, 3, 8), (2, 4, 3, 8), {"is_causal": True}),
    "causal-one-query": ((2, 4, 1, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"is_causal": True}),
    "scale": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"scale": 1.7}),
    "scale-zero": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"scale": 0.0}),
    "bool-2-dims": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"attn_mask": lambda: bools(5, 7)}),
    "bool-3-dims": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"attn_mask": lambda: bools(4, 5, 7)}),
    "bool-padding": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"attn_mask": lambda: bools(2, 1, 1, 7)}),
    "bool-empty-row": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"attn_mask": lambda: bools(5, 7) & (torch.arange(5) != 2)[:, None]}),
    "bool-of-3-dim-query": ((4, 5, 8), (4, 7, 8), (4, 7, 8), {"attn_mask": lambda: bools(4, 1, 7)}),
    "bool-5-dims": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8), {"attn_mask": lambda: bools(2, 1, 1, 5, 7)}),
    "bool-ones-in-front": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8), {"attn_mask": lambda: bools(1, 1, 4, 5, 7)}),
    "float": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"attn_mask": lambda: numbers(2, 1, 5, 7)}),
    "float-2-dims": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"attn_mask": lambda: numbers(5, 7)}),
    "float-of-2-dim-query": ((5, 8), (7, 8), (7, 8), {"attn_mask": lambda: numbers(5, 7)}),
    "float-gqa": ((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), {"attn_mask": lambda: numbers(2, 6, 5, 7), "enable_gqa": True}),
    "upper-left-bias": ((2, 4, 3, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"attn_mask": lambda: causal_upper_left(3, 7)}),
    "lower-right-bias": ((2, 4, 3, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"attn_mask": lambda: causal_lower_right(3, 7)}),
    "no-query": ((2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 8), {}),
    "no-key": ((2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 8), {}),
}


def results_of(function, shapes, options):
    """The output and the gradients of everything that has one."""
    options = {name: value() if callable(value) else value for name, value in options.items()}
    tensors = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    output = function(*tensors, **options)
    mask = options.get("attn_mask")
    sources = [*tensors, mask] if mask is not None and mask.requires_grad else tensors
    gradients = torch.autograd.grad(output, sources, draw(*output.shape, seed=9, requires_grad=False))
    return [output, *gradients]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_same_as_torch(backend, case):
    *shapes, options = CASES[case]
    expected = results_of(torch_sdpa, shapes, options)
    found = results_of(dropin, shapes, {**options, "backend": backend})
    for name, mine, theirs in zip(("output", "dq", "dk", "dv", "dmask"), found, expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_signature_is_torchs_plus_backend():
    documented = torch_sdpa.__doc__.split("->")[0]
    parameters = inspect.signature(dropin).parameters
    given = [name for name in parameters if name != "backend"]
    assert [word.split("=")[0].strip() for word in documented[documented.index("(") + 1 : documented.rindex(")")].split(",")] == given
    torch_defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    assert {name: p.default for name, p in parameters.items() if name in torch_defaults} == torch_defaults
    assert parameters["scale"].kind is parameters["backend"].kind is inspect.Parameter.KEYWORD_ONLY  # as torch has scale


def test_dropout_is_attnzoos_and_follows_the_generator():
    q, k, v = (draw(2, 4, 9, 8, seed=i, requires_grad=False) for i in range(3))
    torch.manual_seed(5)
    first = dropin(q, k, v, dropout_p=0.5, backend="naive")
    second = dropin(q, k, v, dropout_p=0.5, backend="naive")
    torch.manual_seed(5)
    torch.testing.assert_close(attnzoo.attention(q, k, v, dropout_p=0.5, backend="naive"), first, rtol=0, atol=0)
    assert not torch.equal(first, second), "two calls drew one seed"


def test_backend_is_the_one_of_use():
    q = draw(1, 1, 4, 8, requires_grad=False)
    with attnzoo.use("naive"):
        torch.testing.assert_close(dropin(q, q, q), attnzoo.get("naive")(q, q, q), rtol=0, atol=0)
    with pytest.raises(attnzoo.UnknownBackendError, match="no_such_backend"):
        dropin(q, q, q, backend="no_such_backend")


Q, K = (2, 4, 5, 8), (2, 4, 7, 8)
MALFORMED = {
    "query-is-a-list": (TypeError, "query is a list", lambda: dropin([1.0], draw(*K), draw(*K))),
    "key-1-dim": (ValueError, r"key has 1 dims, shape \(7,\)", lambda: dropin(draw(*Q), draw(7), draw(*K))),
    "heads-without-gqa": (ValueError, "have heads", lambda: dropin(draw(*Q), draw(2, 2, 7, 8), draw(2, 2, 7, 8))),
    "batches": (ValueError, "have leading dims", lambda: dropin(draw(*Q), draw(3, 4, 7, 8), draw(3, 4, 7, 8))),
    "gqa-indivisible": (ValueError, "3 heads", lambda: dropin(draw(*Q), draw(2, 3, 7, 8), draw(2, 3, 7, 8), enable_gqa=True)),
    "gqa-value-indivisible": (
        ValueError,
        "value has 3 heads",
        lambda: dropin(draw(*Q), draw(2, 2, 7, 8), draw(2, 3, 7, 8), enable_gqa=True),
    ),
    "mask-and-causal": (ValueError, "only one of them", lambda: dropin(draw(*Q), draw(*K), draw(*K), bools(5, 7), is_causal=True)),
    "mask-1-dim": (ValueError, "attn_mask has 1 dims", lambda: dropin(draw(*Q), draw(*K), draw(*K), bools(7))),
    "mask-int": (TypeError, "int64", lambda: dropin(draw(*Q), draw(*K), draw(*K), bools(5, 7).long())),
    "mask-is-a-list": (TypeError, "attn_mask is a list", lambda: dropin(draw(*Q), draw(*K), draw(*K), [[True]])),
    "mask-shape": (ValueError, r"\(5, 6\)", lambda: dropin(draw(*Q), draw(*K), draw(*K), bools(5, 6))),
    "mask-leading-dims": (
        ValueError,
        "leading dims",
        lambda: dropin(draw(*Q), draw(*K), draw(*K), bools(3, 4, 5, 7)),
    ),
    "bias-of-other-lengths": (ValueError, "causal bias", lambda: dropin(draw(*Q), draw(*K), draw(*K), causal_upper_left(5, 6))),
    "bias-and-causal": (ValueError, "only one", lambda: dropin(draw(*Q), draw(*K), draw(*K), causal_upper_left(5, 7), is_causal=True)),
    "dropout-of-all": (ValueError, "dropout_p is 1.0", lambda: dropin(draw(*Q), draw(*K), draw(*K), dropout_p=1.0)),
    "dtypes": (TypeError, "dtype", lambda: dropin(draw(*Q), draw(*K).float(), draw(*K))),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_calls_name_the_argument(case):
    error, words, call = MALFORMED[case]
    with pytest.raises(error, match=words):
        call()


def test_in_place_of_torchs_function_in_a_model(monkeypatch):
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    x = draw(2, 5, 16)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)  # this module's masks say what is hidden
    expected, _ = layer(x, x, x, attn_mask=mask, need_weights=False)
    calls = []
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **options: calls.append(1) or dropin(*args, **options, backend="naive"),
    )
    found, _ = layer(x, x, x, attn_mask=mask, need_weights=False)
    assert calls, "the model did not call the drop-in"
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
