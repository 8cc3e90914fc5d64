"""explain: which backend would run, why not the others, as a table and as plain data."""

from __future__ import annotations

import json

import pytest
import torch

import attnzoo
from attnzoo import AttentionSpec, Backend, BlockLayout, Capabilities, UnknownBackendError
from attnzoo.backend import FEATURES
from attnzoo.explanation import Explanation, scaled
from attnzoo.registry import Registry


class Fake(Backend):
    """A backend that gives the reasons it is told to give."""

    def __init__(self, name, *reasons):
        self.name, self.reasons = name, list(reasons)
        self.capabilities = Capabilities(dtypes={torch.float32}, forward=set(FEATURES), backward=set(FEATURES))

    def unsupported_reasons(self, spec):
        return self.reasons

    def attend(self, spec, inputs):
        raise AssertionError("explain must not run a backend")


def spec_of(**options):
    q = torch.zeros(1, 2, 8, 4)
    return AttentionSpec.of(q, q, q, **options)


def explained(*backends, choice="auto", **options):
    registry = Registry(backends, preference=tuple(b.name for b in backends))
    return Explanation.of(registry, spec_of(**options), choice)


def test_the_first_able_backend_is_chosen_and_all_reasons_are_listed():
    found = explained(Fake("a", "too long", "too wide"), Fake("b"), Fake("c"), Fake("d", "no"))
    assert found.chosen == "b", f"chose {found.chosen}"
    assert found.able == ("b", "c"), f"able are {found.able}"
    assert found.rejected == {"a": ("too long", "too wide"), "d": ("no",)}, f"rejected are {found.rejected}"
    assert found.cost is not None, "no cost for the chosen backend"
    assert found.cost.flops > 0, "attention without FLOPs"


def test_an_explicit_choice_is_never_replaced():
    found = explained(Fake("a", "no"), Fake("b"), choice="a")
    assert found.chosen is None, f"{found.chosen} took the place of a"
    assert found.able == ("b",), "the backend that could is not told"
    assert found.cost is None, "a cost, but nothing would run"
    assert "no backend of a can serve" in str(found), f"prints\n{found}"


def test_an_unknown_name_is_an_error():
    with pytest.raises(UnknownBackendError, match="nope"):
        explained(Fake("a"), choice="nope")


def test_the_table_shows_everything_literally():
    reason = "takes [float16] or [/b], see [bold]x[/bold]"
    text = str(explained(Fake("first", reason), Fake("second")))
    for word in ("first", "rejected", reason, "second", "chosen", "second would run", "FLOP", "B moved", "extra memory"):
        assert word in text, f"{word!r} is missing in\n{text}"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "window": (3, None), "softcap": 5.0},
        {"mask": torch.ones(8, 8, dtype=torch.bool), "bias": torch.zeros(1, 2, 1, 8), "sinks": torch.zeros(2, dtype=torch.float64)},
        {"layout": BlockLayout.from_dense(torch.ones(8, 8, dtype=torch.bool).tril(), block=4), "dropout_p": 0.5},
    ],
    ids=["plain", "band", "tables", "layout"],
)
def test_to_dict_is_plain_data(options):
    found = explained(Fake("a"), Fake("b", "no"), **options).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False))["chosen"] == "a", "JSON lost the choice"
    assert set(found["spec"]) == set(AttentionSpec.__dataclass_fields__), "a field of the spec is missing"
    assert found["spec"]["dtype"] == "torch.float32", f"dtype is {found['spec']['dtype']}"


def test_the_public_function_reads_no_tensor():
    q = torch.empty(1, 2, 1024, 64, device="meta", dtype=torch.float16)
    found = attnzoo.explain(q, q, q, causal=True, backend="naive")
    assert found.chosen == "naive", f"chose {found.chosen}: {found.rejected}"
    assert found.spec.causal, "the options did not arrive"


def test_the_public_function_follows_use():
    q = torch.zeros(1, 2, 8, 4)
    with attnzoo.use(("naive",)):
        assert attnzoo.explain(q, q, q).order == ("naive",), "use() is not seen"


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0 "), (999, "999 "), (12_300_000, "12.3 M"), (1.5e9, "1.5 G"), (2e21, "2e+03 E")], ids=str
)
def test_scaled_amounts(amount, text):
    assert scaled(amount) == text, f"{amount} prints as {scaled(amount)!r}"
