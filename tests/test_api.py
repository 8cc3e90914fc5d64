"""attention, get and use: which backend serves a call, and what is raised where none does."""

from __future__ import annotations

import asyncio
import pickle
import threading

import pytest
import torch

import attnzoo
from attnzoo import Backend, Capabilities, UnknownBackendError, UnsupportedError
from attnzoo import registry as registry_module
from attnzoo.backend import FEATURES
from attnzoo.registry import Registry

Q = torch.zeros(1, 2, 4, 8)


class Fake(Backend):
    """Returns q, and notes its name; gives the reasons it is told to give."""

    def __init__(self, name, log, *reasons, attend=None):
        self.name, self.log, self.reasons, self.answer = name, log, list(reasons), attend
        self.capabilities = Capabilities(dtypes={torch.float32}, forward=set(FEATURES), backward=set(FEATURES))

    def unsupported_reasons(self, spec):
        return self.capabilities.reasons_against(spec) + self.reasons

    def attend(self, spec, inputs):
        self.log.append(self.name)
        return self.answer(spec, inputs) if self.answer else (inputs.q, None)


@pytest.fixture
def served(monkeypatch):
    """Three backends: `first` refuses everything, `second` and `third` serve. Gives the log of who served."""
    log = []
    backends = [Fake("first", log, "it is Monday", "it rains"), Fake("second", log), Fake("third", log)]
    monkeypatch.setattr(registry_module, "_default", Registry(backends, preference=("first", "second", "third")))
    return log


def test_automatic_choice_takes_the_first_that_can(served):
    attnzoo.attention(Q, Q, Q)
    attnzoo.attention(Q, Q, Q, backend="auto")
    assert served == ["second", "second"], f"served by {served}"


def test_a_name_is_exact(served):
    attnzoo.attention(Q, Q, Q, backend="third")
    assert served == ["third"], f"served by {served}"


def test_a_named_backend_is_never_replaced(served):
    with pytest.raises(UnsupportedError) as caught:
        attnzoo.attention(Q, Q, Q, backend="first")
    assert not served, f"{served} took its place"
    assert caught.value.rejected == {"first": ("it is Monday", "it rains")}, f"reasons are {caught.value.rejected}"
    assert caught.value.alternatives == ("second", "third"), f"alternatives are {caught.value.alternatives}"
    for word in ("first", "it is Monday", "it rains", "second, third"):
        assert word in str(caught.value), f"{word!r} is missing in {caught.value}"
    assert isinstance(caught.value, NotImplementedError), "UnsupportedError is a NotImplementedError"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "the error does not survive pickling"


def test_a_tuple_is_an_order_of_preference(served):
    attnzoo.attention(Q, Q, Q, backend=("first", "third", "second"))
    attnzoo.attention(Q, Q, Q, backend=("third", "auto"))
    attnzoo.attention(Q, Q, Q, backend=("first", "auto"))
    assert served == ["third", "third", "second"], f"served by {served}"


def test_no_backend_at_all(served):
    half = Q.half()
    with pytest.raises(UnsupportedError) as caught:
        attnzoo.attention(half, half, half)
    assert list(caught.value.rejected) == ["first", "second", "third"], f"asked {list(caught.value.rejected)}"
    assert all(any("float16" in r and "float32" in r for r in reasons) for reasons in caught.value.rejected.values()), caught.value
    assert not caught.value.alternatives, f"{caught.value.alternatives} could, it says"


def test_an_unknown_name_is_an_error_wherever_it_stands(served):
    with pytest.raises(UnknownBackendError, match="did you mean 'third'"):
        attnzoo.attention(Q, Q, Q, backend=("second", "thirt"))
    assert not served, f"served by {served}"


@pytest.mark.parametrize("entry", ["attention", "get", "use", "explain", "tuple"])
def test_an_unknown_name_gives_the_known_ones_and_the_nearest(entry, served):
    calls = {
        "attention": lambda: attnzoo.attention(Q, Q, Q, backend="secnd"),
        "get": lambda: attnzoo.get("secnd"),
        "use": lambda: attnzoo.use("secnd").__enter__(),
        "explain": lambda: attnzoo.explain(Q, Q, Q, backend="secnd"),
        "tuple": lambda: attnzoo.attention(Q, Q, Q, backend=("secnd", "third")),
    }
    with pytest.raises(UnknownBackendError) as caught:
        calls[entry]()
    for word in ("'secnd'", "did you mean 'second'", "first", "second", "third"):
        assert word in str(caught.value), f"{word!r} is missing in {caught.value}"
    assert isinstance(caught.value, LookupError), "UnknownBackendError is a LookupError"
    assert not served, f"{served} ran"


@pytest.mark.parametrize("choice", [5, ["second"], (5,), ("second", None), (["second"],), (), b"second"], ids=repr)
@pytest.mark.parametrize("entry", ["attention", "use", "explain"])
def test_a_choice_of_the_wrong_type(entry, choice, served):
    calls = {
        "attention": lambda: attnzoo.attention(Q, Q, Q, backend=choice),
        "use": lambda: attnzoo.use(choice).__enter__(),
        "explain": lambda: attnzoo.explain(Q, Q, Q, backend=choice),
    }
    with pytest.raises(ValueError if choice == () else TypeError, match="backend is") as caught:
        calls[entry]()
    assert "a name" in str(caught.value), f"what is allowed is missing in {caught.value}"
    assert not served, f"{served} ran"


def test_use_sets_the_default_of_its_block(served):
    with attnzoo.use("third"):
        attnzoo.attention(Q, Q, Q)
        with attnzoo.use(("first", "second")):
            attnzoo.attention(Q, Q, Q)
        attnzoo.attention(Q, Q, Q)
        attnzoo.attention(Q, Q, Q, backend="second")
        attnzoo.attention(Q, Q, Q, backend="auto")
    attnzoo.attention(Q, Q, Q)
    assert served == ["third", "second", "third", "second", "second", "second"], f"served by {served}"


def test_use_is_exact_too(served):
    with attnzoo.use("first"), pytest.raises(UnsupportedError, match="it is Monday"):
        attnzoo.attention(Q, Q, Q)
    assert not served, f"{served} took its place"


def test_use_ends_with_an_exception(served):
    with pytest.raises(KeyError), attnzoo.use("third"):
        raise KeyError
    attnzoo.attention(Q, Q, Q)
    assert served == ["second"], f"served by {served}: the default outlived its block"


def test_use_does_not_leak_into_threads(served):
    with attnzoo.use("third"):
        thread = threading.Thread(target=attnzoo.attention, args=(Q, Q, Q))
        thread.start()
        thread.join()
    assert served == ["second"], f"the other thread was served by {served}"


def test_use_does_not_leak_between_tasks(served):
    async def one(name, mine, theirs):
        with attnzoo.use(name):
            mine.set()
            await theirs.wait()  # both tasks are inside their own use() now
            attnzoo.attention(Q, Q, Q)
        await asyncio.sleep(0)

    async def both():
        second, third = asyncio.Event(), asyncio.Event()
        await asyncio.gather(one("second", second, third), one("third", third, second))
        attnzoo.attention(Q, Q, Q)

    asyncio.run(both())
    assert sorted(served[:2]) == ["second", "third"], f"the tasks were served by {served[:2]}"
    assert served[2:] == ["second"], "a task's default leaked into its parent"


def test_get_gives_the_backend_in_the_public_signature(served):
    third = attnzoo.get("third")
    assert torch.equal(third(Q, Q, Q, causal=True), Q), "the call did not reach the backend"
    assert (third.name, served) == ("third", ["third"]), f"{third.name} served by {served}"
    with pytest.raises(TypeError, match="backend is 'second'"):
        third(Q, Q, Q, backend="second")
    with pytest.raises(UnsupportedError, match="it rains"):
        attnzoo.get("first")(Q, Q, Q)


def test_names_are_sorted(served):
    assert attnzoo.names() == ("first", "second", "third"), f"names are {attnzoo.names()}"


def test_an_error_in_a_kernel_is_not_retried(monkeypatch):
    log = []

    def broken(spec, inputs):
        raise RuntimeError("kernel")

    backends = [Fake("a", log, attend=broken), Fake("b", log)]
    monkeypatch.setattr(registry_module, "_default", Registry(backends, preference=("a", "b")))
    with pytest.raises(RuntimeError, match="kernel"):
        attnzoo.attention(Q, Q, Q)
    assert log == ["a"], f"{log} ran"


def test_a_backend_that_forgets_the_lse_is_blamed(served):
    with pytest.raises(RuntimeError, match=r"'second' returned no lse"):
        attnzoo.attention(Q, Q, Q, return_lse=True)


def test_a_backend_whose_lse_has_another_dtype_is_blamed(monkeypatch):
    half = Fake("half", [], attend=lambda spec, inputs: (inputs.q, torch.zeros(1, 2, 4, dtype=torch.float16)))
    monkeypatch.setattr(registry_module, "_default", Registry([half], preference=("half",)))
    with pytest.raises(RuntimeError, match=r"'half' returned .*float16.* where .*float32.* is due"):
        attnzoo.attention(Q, Q, Q, return_lse=True)


@pytest.mark.parametrize("answer", [RuntimeError("x"), "a string", None, [1]], ids=repr)
def test_a_backend_that_cannot_say_its_reasons_is_passed_over(answer, monkeypatch):
    log = []

    class Mute(Fake):
        def unsupported_reasons(self, spec):
            if isinstance(answer, Exception):
                raise answer
            return answer

    backends = [Mute("a", log), Fake("b", log)]
    monkeypatch.setattr(registry_module, "_default", Registry(backends, preference=("a", "b")))
    attnzoo.attention(Q, Q, Q)
    assert log == ["b"], f"served by {log}"
    with pytest.raises(UnsupportedError, match="its unsupported_reasons"):
        attnzoo.attention(Q, Q, Q, backend="a")


def test_autocast_is_over_inside_a_backend(monkeypatch):
    def attend(spec, inputs):
        assert not torch.is_autocast_enabled("cpu"), "a backend runs under autocast"
        return inputs.q, None

    backend = Fake("a", [], attend=attend)
    backend.capabilities = Capabilities(dtypes={torch.bfloat16}, forward=set(FEATURES))
    monkeypatch.setattr(registry_module, "_default", Registry([backend], preference=("a",)))
    with torch.autocast("cpu", torch.bfloat16):
        assert attnzoo.attention(Q, Q, Q).dtype == torch.bfloat16, "autocast did not cast"
        assert torch.is_autocast_enabled("cpu"), "autocast is off after the call"


def test_the_built_ins_are_there():
    assert {"naive", "tiled"} <= set(attnzoo.names()), f"only {attnzoo.names()}"
    chosen = attnzoo.explain(Q, Q, Q).chosen
    assert chosen == "tiled", f"{chosen} is the choice on a CPU, not tiled"
