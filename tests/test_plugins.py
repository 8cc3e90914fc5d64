"""Faulty plugins, each a real installed distribution: its error is kept and shown, and no other backend is harmed."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from distribution import hook, install

import attnzoo
from attnzoo import AttentionSpec, PluginError, PluginWarning, UnknownBackendError, registry
from attnzoo.registry import BUILT_IN, Plugin, Registry, reasons_against

Q = torch.ones(1, 1, 2, 4)
SPEC = AttentionSpec.of(Q, Q, Q)

# Source of a module whose entry point declares the one backend `bad`, and a part of the error that must be shown.
FAULTY = {
    "raises ImportError": ("import a_module_nobody_has", "ModuleNotFoundError: No module named 'a_module_nobody_has'"),
    "raises OSError": ("raise OSError('libkernel.so: cannot open')", "OSError: libkernel.so: cannot open"),
    "raises RuntimeError": ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
    "raises SystemExit": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "raises a BaseException of its own": ("class Stop(BaseException): pass\nraise Stop('halt')", "Stop: halt"),
    "raises a test runner's skip": ("import pytest; pytest.skip('no GPU', allow_module_level=True)", "Skipped: no GPU"),
    "raises what cannot be put into words": (
        "class Mum(Exception):\n    def __str__(self): raise ValueError('no words')\nraise Mum",
        "Mum: (its message can't be read)",
    ),
    "has a syntax error": ("def attnzoo_backends(:", "SyntaxError"),
    "fails an assertion": ("assert False", "AssertionError"),
    "recurses": ("def f(): f()\nf()", "RecursionError"),
    "asks for itself at import": ("import attnzoo; attnzoo.get('bad')", "is being imported"),
    "has no hook": ("def attnzoo_backends(): return []", "has no hook"),
    "is empty": ("", "has no hook"),
    "misspells the hook": ("import attnzoo\n@attnzoo.hookimpl\ndef attnzoo_backend(): return []", "unknown hook 'attnzoo_backend'"),
    "misspells an optional hook": (
        "import attnzoo\n@attnzoo.hookimpl(optionalhook=True)\ndef attnzoo_backend(): return []",
        "has no hook",
    ),
    "takes an argument": (hook("[Good('bad')]", signature="registry"), "registry"),
    "is a hook wrapper": (
        "import attnzoo\n@attnzoo.hookimpl(wrapper=True)\ndef attnzoo_backends():\n    return (yield)",
        "is a hook wrapper",
    ),
    "is an old hook wrapper": (
        "import attnzoo\n@attnzoo.hookimpl(hookwrapper=True)\ndef attnzoo_backends():\n    yield",
        "is a hook wrapper",
    ),
    "is a generator": ("import attnzoo\n@attnzoo.hookimpl\ndef attnzoo_backends():\n    yield 1", "returned <generator"),
    "hook raises": (hook("1 / 0"), "ZeroDivisionError"),
    "hook exits": (hook("exit(4)"), "SystemExit: 4"),
    "returns None": (hook("None"), "returned None, not a list"),
    "returns a string": (hook("'bad'"), "returned 'bad', not a list"),
    "returns a backend": (hook("Good('bad')"), "not a list of backends"),
    "returns a dict": (hook("{'bad': Good('bad')}"), "not a list of backends"),
    "returns a list of strings": (hook("['bad']"), "returned 'bad', not an attnzoo.Backend"),
    "returns a class": (hook("[Good]"), "not an attnzoo.Backend"),
    "returns a lookalike": (hook("[types.SimpleNamespace(name='bad')]", before="import types"), "not an attnzoo.Backend"),
    "returns nothing": (hook("[]"), "returned [], but its entry points declare ['bad']"),
    "returns another name": (hook("[Good('worse')]"), "returned ['worse'], but its entry points declare ['bad']"),
    "returns one name more": (hook("[Good('bad'), Good('extra')]"), "returned ['bad', 'extra'], but"),
    "returns a name twice": (hook("[Good('bad'), Good('bad')]"), "two backends named 'bad'"),
    "returns a reserved name": (hook("[Good('flash')]"), "returned ['flash'], but"),
    "has a name that is no string": (hook("[Good(7)]"), "has name 7, not a string"),
    "has no name": (
        hook("[Bare('bad')]", before="class Bare(Good):\n    name = property(lambda self: None, lambda self, name: None)"),
        "name None",
    ),
    "raises in its name": (
        hook("[Sly('bad')]", before="class Sly(Good):\n    name = property(lambda self: 1 / 0, lambda self, name: None)"),
        "ZeroDivisionError",
    ),
    "has another api_version": (
        hook("[New('bad')]", before="class New(Good):\n    api_version = 2"),
        "api_version 2; this attnzoo takes 1",
    ),
    "has no capabilities": (hook("[Mute('bad')]", before="class Mute(Good):\n    capabilities = None"), "has no attnzoo.Capabilities"),
    "claims an unknown feature": (hook("[attnzoo.Capabilities(forward={'telepathy'})]"), "unknown features ['telepathy']"),
    "claims head dims that are no pair": (hook("[attnzoo.Capabilities(head_dims=64)]"), "head_dims is 64"),
    "claims one head dim": (hook("[attnzoo.Capabilities(head_dims=(64,))]"), "head_dims is (64,)"),
    "claims a dtype by name": (hook("[attnzoo.Capabilities(dtypes={'float32'})]"), "dtypes holds 'float32'"),
    "claims a torch.device": (
        hook("[attnzoo.Capabilities(devices={torch.device('cpu')})]", before="import torch"),
        "devices holds device(",
    ),
    "claims a device in a bare string": (hook("[attnzoo.Capabilities(devices='cuda')]"), "devices is 'cuda'"),
    "claims a feature in a bare string": (hook("[attnzoo.Capabilities(forward='mask')]"), "forward is 'mask'"),
    "claims a device type that is a number": (hook("[attnzoo.Capabilities(devices={0})]"), "devices holds 0"),
    "is abstract": (
        hook("[Half()]", before="class Half(attnzoo.Backend):\n    name = 'bad'"),
        "TypeError: Can't instantiate abstract class",
    ),
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on sys.path; what is imported from it is forgotten again."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_default", Registry(plugins=[BUILT_IN]))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path.parent)):
            del sys.modules[name]


def installed(**environ: str) -> Registry:
    importlib.invalidate_caches()
    return Registry.installed(environ)


def assert_quarantined(known: Registry, name: str, error: str) -> None:
    with pytest.warns(PluginWarning) as warned, pytest.raises(UnknownBackendError) as raised:
        known.get(name)
    assert len(warned) == 1, f"warned {len(warned)} times"
    for what, text in (
        ("warning", str(warned[0].message)),
        ("UnknownBackendError", str(raised.value)),
        ("failures()", str(known.failures())),
    ):
        assert error in text.replace('\\"', '"').replace("\\'", "'"), f"{what} does not show {error!r}: {text}"


def assert_works(known: Registry, name: str) -> None:
    o, _ = known.get(name).attend(SPEC, attnzoo.AttentionInputs.of(SPEC, Q, Q, Q))
    assert torch.equal(o, Q), f"{name} gives {o}"


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_plugin_is_quarantined_and_harms_no_other(site, fault):
    source, error = FAULTY[fault]
    install(site, "bad-plugin", {"bad": "bad_module"}, {"bad_module": source})
    install(site, "good-plugin", {"good": "good_module"}, {"good_module": hook("[Good('good')]")})
    known = installed()
    assert {"bad", "good", "naive"} <= set(known.names()), f"names are {known.names()}"
    if fault == "asks for itself at import":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "_default", known)
            assert_quarantined(known, "bad", error)
    else:
        assert_quarantined(known, "bad", error)
    assert_works(known, "good")
    assert_works(known, "naive")
    with pytest.raises(UnknownBackendError):  # and no second warning, which would be an error here
        known.get("bad")


def test_there_are_enough_kinds():
    assert len(FAULTY) >= 24, f"{len(FAULTY)} kinds of faulty plugin"


def test_the_entry_point_is_at_fault(site):
    broken = {
        "absent": "no_such_module",
        "attribute": "good_module:nothing",
        "odd": "good module?",
        "function": "good_module:attnzoo_backends",
    }
    for name, value in broken.items():
        install(site, f"{name}-plugin", {name: value}, {"good_module": hook("[Good('good')]")})
    known = installed()
    for name, error in (("absent", "No module named"), ("attribute", "AttributeError"), ("odd", "Error"), ("function", "has no hook")):
        assert_quarantined(known, name, error)


def test_an_interrupt_is_the_users_own(site):
    install(site, "slow-plugin", {"slow": "slow_module"}, {"slow_module": "raise KeyboardInterrupt"})
    known = installed()
    with pytest.raises(KeyboardInterrupt):
        known.get("slow")
    assert not known.failures(), f"an interrupt was recorded as {known.failures()}"
    (site / "slow_module.py").write_text(hook("[Good('slow')]"))
    importlib.invalidate_caches()
    assert_works(known, "slow")


@pytest.mark.parametrize("name", ["naive", "tiled", "flash", "block_sparse", "auto"])
def test_a_reserved_name(site, name):
    install(site, "grabbing-plugin", {name: "grab", "other": "grab"}, {"grab": hook(f"[Good({name!r}), Good('other')]")})
    known = installed()
    with pytest.warns(PluginWarning, match="reserved"):
        known.report()
    assert "reserved" in str(known.failures()), f"failures are {known.failures()}"
    assert known.plugin_of("naive") is BUILT_IN, f"naive now comes from {known.plugin_of('naive')}"
    assert "grab" not in sys.modules, "a plugin that takes a reserved name was imported"
    assert_works(known, "naive")
    with pytest.raises(UnknownBackendError, match="reserved"):
        known.get("other")


def test_a_name_of_two_distributions(site):
    for place, name in enumerate(("first-plugin", "second-plugin")):
        install(site, name, {"mine": f"m{place}", f"own{place}": f"m{place}"}, {f"m{place}": hook(f"[Good('mine'), Good('own{place}')]")})
    known = installed()
    assert "mine" in known.names(), f"names are {known.names()}"
    with pytest.raises(UnknownBackendError, match=r"first-plugin 1\.0 and second-plugin 1\.0") as raised:
        known.get("mine")
    assert "uninstall one" in str(raised.value), f"no advice in {raised.value}"
    assert "mine" in known.failures(), f"failures are {known.failures()}"
    assert {"first-plugin", "second-plugin"} <= {plugin.distribution for plugin in known.plugins()}, "a claimant is not listed"
    assert_works(known, "own0")
    assert_works(known, "own1")
    assert_works(installed(ATTNZOO_PLUGINS="second-plugin"), "mine")


def test_one_distribution_twice_on_the_path(site, tmp_path_factory, monkeypatch):
    again = tmp_path_factory.mktemp("again")
    for folder in (site, again):
        install(folder, "good-plugin", {"good": "good_module"}, {"good_module": hook("[Good('good')]")})
    monkeypatch.syspath_prepend(again)
    known = installed()
    assert not known.failures(), f"failures are {known.failures()}"
    assert_works(known, "good")


def test_a_module_of_several_names_is_registered_once(site):
    source = hook("[Good('one'), Good('two')]", before="COUNT = [0]").replace("    return [", "    COUNT[0] += 1\n    return [")
    install(site, "pair-plugin", {"one": "pair", "two": "pair"}, {"pair": source})
    known = installed()
    assert_works(known, "one")
    assert_works(known, "two")
    assert sys.modules["pair"].COUNT == [1], f"the hook was called {sys.modules['pair'].COUNT[0]} times"


@pytest.mark.parametrize("metadata", ["", "Metadata-Version: 2.1\n", "\x00\x01"])
def test_metadata_that_lacks_a_name(site, metadata):
    install(site, "nameless", {"odd": "odd_module"}, {"odd_module": hook("[Good('odd')]")}, metadata=metadata or "\n")
    assert_works(installed(), "odd")
    assert_works(installed(), "naive")


@pytest.mark.parametrize("text", ["[attnzoo.backends]\nno equals sign\n", "good = before any section\n", "[[[\n="])
def test_entry_points_that_cannot_be_read(site, text):
    install(site, "garbled-plugin", text, {})
    install(site, "good-plugin", {"good": "good_module"}, {"good_module": hook("[Good('good')]")})
    assert_works(installed(), "good")
    assert_works(installed(), "naive")


def test_the_order_of_plugins_does_not_matter(site):
    plugins = []
    for name, source in (("good", hook("[Good('good')]")), ("exits", "exit()"), ("twice", hook("[Good('twice')] * 2"))):
        install(site, f"{name}-plugin", {name: f"{name}_module"}, {f"{name}_module": source})
        plugins.append(Plugin(f"{name}-plugin", "1.0", f"{name}_module", (name,)))
    importlib.invalidate_caches()
    outcomes = set()
    for order in itertools.permutations([BUILT_IN, *plugins]):
        known = Registry(plugins=order)
        with pytest.warns(PluginWarning):
            known.load([name for plugin in order for name in plugin.names])
        assert_works(known, "good")
        assert_works(known, "naive")
        outcomes.add((known.names(), tuple(sorted(known.failures().items()))))
    assert len(outcomes) == 1, f"the order of plugins matters: {outcomes}"


# Plugins that are no fault of anybody's


def test_imported_by_the_user_first(site):
    install(site, "good-plugin", {"good": "good_module"}, {"good_module": hook("[Good('good')]")})
    importlib.invalidate_caches()
    importlib.import_module("good_module")
    assert_works(installed(), "good")


def test_uses_attnzoo_at_import(site):
    source = hook(
        "[Good('good')]",
        before="import torch\nfrom attnzoo import attention\nq = torch.ones(1, 1, 2, 4)\nattention(q, q, q, backend='naive')",
    )
    install(site, "good-plugin", {"good": "good_module"}, {"good_module": source})
    assert_works(installed(), "good")


def test_explains_at_import(site, monkeypatch):
    """It asks every backend, itself included, while it is half imported: no verdict on it is kept."""
    source = hook("[Good('good')]", before="import torch\nq = torch.ones(1, 1, 2, 4)\nTOLD = attnzoo.explain(q, q, q)")
    install(site, "good-plugin", {"good": "good_module"}, {"good_module": source})
    known = installed()
    monkeypatch.setattr(registry, "_default", known)
    importlib.import_module("good_module")
    assert "is being imported" in str(sys.modules["good_module"].TOLD.rejected["good"]), "explain gives no reason"
    assert_works(known, "good")


def test_warns_at_import(site):
    source = hook("[Good('good')]", before="import warnings\nwarnings.warn('I am old', DeprecationWarning)")
    install(site, "good-plugin", {"good": "good_module"}, {"good_module": source})
    with pytest.warns(DeprecationWarning, match="I am old"):
        assert_works(installed(), "good")


def test_a_warning_turned_into_an_error_costs_one_call(site):
    install(site, "grabbing-plugin", {"naive": "grab"}, {"grab": ""})
    install(site, "bad-plugin", {"bad": "bad_module"}, {"bad_module": "raise OSError('no driver')"})
    known = installed()
    for call in (known.report, lambda: known.get("bad")):
        with pytest.raises(PluginWarning):
            call()
    assert_works(known, "naive")
    with pytest.raises(UnknownBackendError, match="no driver"):
        known.get("bad")


def test_threads_get_one_backend(site):
    source = hook("[Good('good')]", before="import time; time.sleep(0.05)")
    install(site, "good-plugin", {"good": "good_module"}, {"good_module": source})
    known = installed()
    found, start = [], threading.Barrier(8)

    def ask():
        start.wait()
        found.append(known.get("good"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8, f"only {len(found)} of 8 threads got a backend"
    assert len({id(backend) for backend in found}) == 1, "threads got different backends of one name"
    assert found[0] is known.get("good"), "a thread got a backend that is not kept"


def test_two_plugins_that_ask_for_each_other_at_import_in_two_threads(site):
    """Loading holds no lock: each import may wait for the other thread's, and none forever."""
    for mine, other in (("left", "right"), ("right", "left")):
        before = f"import time; time.sleep(0.05)\ntry:\n    attnzoo.registry.default().get('{other}')\nexcept LookupError:\n    pass"
        install(site, f"{mine}-plugin", {mine: f"{mine}_module"}, {f"{mine}_module": hook(f"[Good('{mine}')]", before=before)})
    known = installed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_default", known)
        threads = [threading.Thread(target=known.load, args=((name,),), daemon=True) for name in ("left", "right")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads), "two threads wait for each other"
        assert_works(known, "left")
        assert_works(known, "right")


# Switches


def test_allow_list(site):
    for name in ("good", "other"):
        install(site, f"My.{name}_plugin", {name: f"{name}_module"}, {f"{name}_module": hook(f"[Good({name!r})]")})
    everybody = set(installed().names())
    for value, names in (("", set()), (" ", set()), ("my-good-plugin", {"good"}), ("MY_GOOD.PLUGIN, nobody", {"good"})):
        allowed = set(installed(ATTNZOO_PLUGINS=value).names()) & {"good", "other"}
        assert allowed == names, f"ATTNZOO_PLUGINS={value!r} allows {allowed}"
    assert {"good", "other"} <= everybody, f"unset allows {everybody}"
    assert "good_module" not in sys.modules, "looking for plugins imported one"


@pytest.mark.parametrize("value", ["1", "yes"])
def test_strict(site, value):
    install(site, "bad-plugin", {"bad": "bad_module"}, {"bad_module": "raise OSError('no driver')"})
    known = installed(ATTNZOO_STRICT=value)
    with pytest.raises(PluginError, match=r"bad-plugin .* no driver"):
        known.get("bad")
    assert_works(known, "naive")
    install(site, "worse-plugin", {"bad": "bad_module"}, {})
    with pytest.raises(PluginError, match=r"bad-plugin 1\.0 and worse-plugin 1\.0"):
        installed(ATTNZOO_STRICT=value)
    install(site, "grabbing-plugin", {"naive": "grab"}, {})
    with pytest.raises(PluginError, match="reserved"):
        installed(ATTNZOO_STRICT=value)


@pytest.mark.parametrize("value", ["", "0"])
def test_not_strict(site, value):
    install(site, "bad-plugin", {"bad": "bad_module"}, {"bad_module": "raise OSError('no driver')"})
    assert_quarantined(installed(ATTNZOO_STRICT=value), "bad", "no driver")


# Backends that load, and misbehave when asked

UNWILLING = {
    "raises": ("raise RuntimeError('no device')", "its unsupported_reasons raised RuntimeError: no device"),
    "exits": ("exit(5)", "its unsupported_reasons raised SystemExit: 5"),
    "raises a BaseException of its own": (
        "raise type('Stop', (BaseException,), {})('halt')",
        "its unsupported_reasons raised Stop: halt",
    ),
    "raises what cannot be put into words": (
        "raise type('Mum', (Exception,), {'__str__': lambda self: 1 / 0})",
        "its unsupported_reasons raised Mum: (its message can't be read)",
    ),
    "returns a string": ("return 'no'", "its unsupported_reasons returned 'no', not a list of strings"),
    "returns None": ("return None", "its unsupported_reasons returned None"),
    "returns what cannot be shown": (
        "return type('Shy', (), {'__repr__': lambda self: 1 / 0})()",
        "its unsupported_reasons raised ZeroDivisionError",
    ),
    "returns numbers": ("return [1]", "its unsupported_reasons returned [1]"),
    "returns False": ("return False", "its unsupported_reasons returned False"),
    "yields": ("yield 'no'", "its unsupported_reasons returned <generator"),
}


@pytest.mark.parametrize("fault", UNWILLING)
def test_unsupported_reasons_at_fault(site, fault):
    body, reason = UNWILLING[fault]
    before = f"class Odd(Good):\n    def unsupported_reasons(self, spec):\n        {body}"
    install(site, "odd-plugin", {"odd": "odd_module"}, {"odd_module": hook("[Odd('odd')]", before=before)})
    known = installed()
    decision = known.decide(SPEC, ("odd", "naive"))
    assert decision.chosen is known.get("naive"), f"chosen is {decision.chosen}"
    assert decision.rejected["odd"][0].startswith(reason), f"reasons are {decision.rejected}"
    assert reasons_against(known.get("odd"), SPEC)[0].startswith(reason), "asked alone, it is another reason"


# In a process of its own


def run(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path[1:]]), **environ}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=120)


def test_names_imports_no_plugin(tmp_path):
    install(tmp_path, "bad-plugin", {"bad": "bad_module"}, {"bad_module": "open('imported', 'w')\nraise OSError"})
    source = "import sys, attnzoo; print(*attnzoo.names()); assert 'bad_module' not in sys.modules, 'names() imported a plugin'"
    done = run(tmp_path, "-W", "error", "-c", source)
    assert done.returncode == 0, done.stderr
    assert "bad" in done.stdout.split(), f"names are {done.stdout}"
    listed = run(
        tmp_path, "-c", "import sys; from attnzoo.registry import default; print(*default().names()); assert 'torch' not in sys.modules"
    )
    assert listed.returncode == 0, f"the registry imports torch: {listed.stderr}"
    assert listed.stdout == done.stdout, f"two lists of names: {listed.stdout} and {done.stdout}"


GARBAGE = (
    "None",
    "inputs.q",
    "(inputs.q,)",
    "(inputs.q, None, None)",
    "('o', None)",
    "(inputs.q[..., :1], None)",
    "(inputs.q.double(), None)",
)


def test_attend_returns_garbage(tmp_path):
    names = [f"garbage{place}" for place in range(len(GARBAGE))]
    classes = "\n".join(
        f"class G{place}(Good):\n    def attend(self, spec, inputs):\n        return {value}" for place, value in enumerate(GARBAGE)
    )
    returned = ", ".join(f"G{place}({name!r})" for place, name in enumerate(names))
    install(tmp_path, "garbage-plugin", dict.fromkeys(names, "garbage"), {"garbage": hook(f"[{returned}]", before=classes)})
    source = f"""
        import attnzoo, torch
        q = torch.ones(1, 1, 2, 4)
        for name in {names}:
            try:
                result = attnzoo.attention(q, q, q, backend=name)
            except RuntimeError as error:
                assert name in str(error), f"{{name}} is not named in: {{error}}"
            else:
                raise SystemExit(f"{{name}} returned {{result}}, and nothing was said")
        assert torch.equal(attnzoo.attention(q, q, q), q)
    """
    done = run(tmp_path, "-c", dedent(source))
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """Every faulty plugin installed at once, under names of their own, with one that works."""
    folder = tmp_path_factory.mktemp("crowd")
    for place, (source, _) in enumerate(FAULTY.values()):
        name = f"bad{place:02}"
        install(folder, f"{name}-plugin", {name: f"{name}_module"}, {f"{name}_module": source})
    install(folder, "good-plugin", {"good": "good_module"}, {"good_module": hook("[Good('good')]")})
    install(folder, "clash-a", {"clash": "good_module"}, {})
    install(folder, "clash-b", {"clash": "good_module"}, {})
    install(folder, "grabbing-plugin", {"naive": "grab"}, {"grab": ""})
    return folder


def test_info_shows_every_failure(crowd):
    done = run(crowd, "-m", "attnzoo", "info", "--format", "json")
    assert done.returncode in (0, 1), f"exit code {done.returncode}: {done.stderr}"
    told = json.loads(done.stdout)
    shown = told["failures"]
    for place, fault in enumerate(FAULTY):
        assert any(f"bad{place:02}-plugin" in who for who in shown), f"info does not show the plugin that {fault}"
    assert any("clash-a" in error and "clash-b" in error for error in shown.values()), "info does not show the clash"
    assert any("grabbing-plugin" in who for who in shown), "info does not show who takes a reserved name"
    states = {entry["backend"]: entry["state"] for entry in told["backends"]}
    for name in ("good", "naive", "tiled"):
        assert states[name] == "loaded", f"{name} is {states[name]}"


@pytest.mark.parametrize(
    "fault", ["raises", "exits", "raises a BaseException of its own", "raises what cannot be put into words", "returns None"]
)
def test_info_shows_who_cannot_say_its_reasons(tmp_path, fault):
    body, _ = UNWILLING[fault]
    before = f"class Odd(Good):\n    def unsupported_reasons(self, spec):\n        {body}"
    install(tmp_path, "odd-plugin", {"odd": "odd_module"}, {"odd_module": hook("[Odd('odd')]", before=before)})
    done = run(tmp_path, "-m", "attnzoo", "info", "--format", "json")
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
    here = {entry["backend"]: entry["here"] for entry in json.loads(done.stdout)["backends"]}
    assert here["odd"].startswith(("unsupported_reasons raised", "unsupported_reasons returned")), here["odd"]
    assert here["tiled"].startswith("runs on"), here["tiled"]


@pytest.mark.parametrize("command", [("info",), ("explain", "--q", "1,1,2,4")], ids=lambda command: command[0])
def test_what_a_plugin_prints_stays_out_of_the_data(tmp_path, command):
    source = hook("[Good('loud')]", before="print('hello from the plugin')")
    install(tmp_path, "loud-plugin", {"loud": "loud_module"}, {"loud_module": source})
    done = run(tmp_path, "-m", "attnzoo", *command, "--format", "json")
    json.loads(done.stdout)
    assert "hello from the plugin" in done.stderr, done.stderr


def test_a_crowd_of_faulty_plugins_stops_nobody(crowd):
    source = """
        import attnzoo, torch
        q = torch.ones(1, 1, 2, 4)
        for backend in (None, "naive", "tiled", "good"):
            assert torch.equal(attnzoo.attention(q, q, q, backend=backend), q), backend
        print(len(attnzoo.explain(q, q, q).able))
    """
    done = run(crowd, "-W", "ignore", "-c", dedent(source))
    assert done.returncode == 0, done.stderr
