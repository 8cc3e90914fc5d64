"""Registry: names, order of preference, the decision and what is said where there is none."""

from __future__ import annotations

import pytest
import torch

from attnzoo import AttentionSpec, Backend, Capabilities, UnknownBackendError, UnsupportedError, layouts, registry
from attnzoo.backend import API_VERSION, FEATURES
from attnzoo.backends.flash import Flash
from attnzoo.registry import AUTO, BUILT_IN, PREFERENCE, RESERVED, Plugin, Registry, discover

Q = torch.zeros(1, 1, 2, 4)
SPEC = AttentionSpec.of(Q, Q, Q)


class Fake(Backend):
    def __init__(self, name, *reasons):
        self.name, self.reasons, self.asked = name, list(reasons), 0
        self.capabilities = Capabilities(dtypes={torch.float32}, forward=set(FEATURES), backward=set(FEATURES))

    def unsupported_reasons(self, spec):
        self.asked += 1
        return self.reasons

    def attend(self, spec, inputs):
        return inputs.q, None


def test_names_are_sorted_and_each_registry_has_its_own():
    assert Registry([Fake("b"), Fake("a")]).names() == ("a", "b")
    assert Registry().names() == (), "an empty registry knows names"


def test_preference_passes_over_what_is_not_known():
    known = Registry([Fake("b"), Fake("a")], preference=("x", "a", "b"))
    assert known.preference == ("a", "b"), f"preference is {known.preference}"


@pytest.mark.parametrize(
    ("choice", "order"),
    [
        ("a", ("a",)),
        (AUTO, ("a", "b")),
        (("z", "a"), ("z", "a")),
        (("z", AUTO), ("z", "a", "b")),
        ((AUTO, "z"), ("a", "b", "z")),
        (("b", AUTO), ("b", "a")),
    ],
)
def test_order(choice, order):
    known = Registry([Fake("b"), Fake("a"), Fake("z")], preference=("a", "b"))
    assert known.order(choice) == order, f"{choice!r} gives {known.order(choice)}"


def test_automatic_choice_is_block_sparse_for_a_layout_and_flash_without():
    """The order needs no layout to be looked at: flash claims none."""
    unable = Capabilities(dtypes={torch.float32}, forward=set(FEATURES) - {"layout"})
    known = Registry([Fake(name) for name in ("naive", "tiled", "flash", "block_sparse")])
    for name in known.names():
        known.get(name).unsupported_reasons = (unable if name == "flash" else known.get(name).capabilities).reasons_against
    assert "layout" not in Flash(is_interpreted=True).capabilities.forward
    layout = layouts.causal(2, block=2)
    assert known.decide(SPEC, AUTO).chosen.name == "flash"
    assert known.decide(AttentionSpec.of(Q, Q, Q, layout=layout), AUTO).chosen.name == "block_sparse"


@pytest.mark.parametrize(
    ("choice", "error"), [((), ValueError), (["a"], TypeError), (7, TypeError), (None, TypeError), (("a", 7), TypeError)]
)
def test_a_malformed_choice(choice, error):
    with pytest.raises(error, match="backend is"):
        Registry([Fake("a")]).order(choice)


def test_the_first_without_a_reason_is_chosen_and_nobody_behind_it_is_asked():
    first, second, third = Fake("first", "it rains", "it is late"), Fake("second"), Fake("third")
    decision = Registry([third, second, first]).decide(SPEC, ("first", "second", "third"))
    assert decision.chosen is second, f"chosen is {decision.chosen}"
    assert decision.rejected == {"first": ("it rains", "it is late")}, f"rejected are {decision.rejected}"
    assert third.asked == 0, "a backend behind the chosen one was asked"


def test_nobody_can():
    known = Registry([Fake("first", "it rains"), Fake("second", "it is late"), Fake("third")])
    with pytest.raises(UnsupportedError) as caught:
        known.select(SPEC, ("second", "first"))
    assert list(caught.value.rejected.items()) == [("second", ("it is late",)), ("first", ("it rains",))], (
        f"rejected: {caught.value.rejected}"
    )
    assert caught.value.alternatives == ("third",), f"alternatives are {caught.value.alternatives}"
    for part in ("it rains", "it is late", "third"):
        assert part in str(caught.value), f"the message lacks {part!r}: {caught.value}"


def test_an_unknown_name_gets_the_nearest():
    known = Registry([Fake("tiled"), Fake("naive")])
    for ask in (lambda: known.get("tilde"), lambda: known.require_known(["tilde"]), lambda: known.decide(SPEC, ("tilde", "naive"))):
        with pytest.raises(UnknownBackendError, match=r"'tilde'; did you mean 'tiled'\? Known: naive, tiled"):
            ask()
    with pytest.raises(UnknownBackendError, match=r"'zzz'; known: "):
        known.get("zzz")
    with pytest.raises(TypeError, match=r"backend is \[\], a list; it takes a name"):
        known.get([])
    with pytest.raises(TypeError, match="takes a name"):
        known.get(7)


def test_looking_for_alternatives_imports_no_plugin():
    absent = Plugin("absent", "1.0", "no_such_module", ("absent",))
    known = Registry([Fake("first", "it rains")], plugins=[absent])
    with pytest.raises(UnsupportedError) as caught:
        known.select(SPEC, "first")
    assert caught.value.alternatives == (), f"alternatives are {caught.value.alternatives}"
    assert not known.failures(), f"a plugin nobody asked for was imported: {known.failures()}"


def test_the_built_ins_are_a_plugin_like_others():
    known = Registry(plugins=[BUILT_IN])
    assert set(BUILT_IN.names) == set(known.names()), f"names are {known.names()}"
    known.load(known.names())
    assert not known.failures(), f"failures are {known.failures()}"
    assert {name: known.get(name).name for name in known.names()} == {name: name for name in known.names()}
    assert known.plugins() == (BUILT_IN,)
    assert known.plugin_of("naive") is BUILT_IN
    assert known.error_of(BUILT_IN) is None


def test_every_built_in_name_is_reserved():
    assert {*BUILT_IN.names, *PREFERENCE, AUTO} == RESERVED, f"reserved are {sorted(RESERVED)}"


def test_one_version_of_the_interface():
    assert registry.API_VERSION == API_VERSION, "registry and backend disagree on api_version"


def test_attnzoo_itself_declares_no_entry_point():
    assert not [plugin for plugin in discover() if plugin.distribution == "attnzoo"], "the built-ins come as a plugin of their own"


def test_a_choice_is_made_while_compiling(monkeypatch):
    monkeypatch.setattr(registry, "_default", Registry([Fake("first", "it rains"), Fake("second")]))

    def call(q):
        spec = AttentionSpec.of(q, q, q)
        return q + len(registry.default().select(spec, ("first", "second")).name)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(Q), Q + 6), "the compiled call chose another backend"


def test_a_failing_backend_is_passed_over_while_compiling(monkeypatch):
    class Odd(Fake):
        def unsupported_reasons(self, spec):
            raise RuntimeError("no device")

    monkeypatch.setattr(registry, "_default", Registry([Odd("odd"), Fake("second")]))

    def call(q):
        spec = AttentionSpec.of(q, q, q)
        return q + len(registry.default().select(spec, ("odd", "second")).name)

    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(Q), Q + 6), "the compiled call chose another backend"
