"""benchmarks/flash_gpu.py on a CPU: every word is there, its calls are valid, what is wrong is said, results are written as they come."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from attnzoo import registry
from attnzoo.backends.naive import Naive

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script by its name; other tests find nothing of it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == BENCHMARKS:
            del sys.modules[name]


def words_of_usage() -> list[str]:
    lines = (BENCHMARKS / "flash_gpu.py").read_text().split('"""')[1].splitlines()
    return [line.split()[2] for line in lines if line.strip().startswith("python benchmarks/flash_gpu.py")]


def test_every_word_has_its_function(load):
    flash_gpu = load("flash_gpu")
    assert sorted(words_of_usage()) == sorted(flash_gpu.WORDS)
    for word in flash_gpu.WORDS:
        assert callable(flash_gpu.action(word)), word


def test_every_case_is_a_valid_call(load):
    """By naive, with gradients of the right shapes; a case's sizes are used up and come out the same twice."""
    cases, calls = load("flash_cases"), load("flash_calls")
    for name in [*cases.FEATURES, *cases.HOPPER_CALLS]:
        tensors, options, upstream = cases.call_of(name, torch.float32, "cpu")
        again, _, _ = cases.call_of(name, torch.float32, "cpu")
        found = calls.values_and_grads(Naive(), tensors, options, upstream)
        differentiable = [t for t in tensors.values() if t.is_floating_point()]
        assert [value.shape for value in found] == [t.shape for t in (*upstream, *differentiable)], name
        assert not any([value.isnan().any() for value in found]), name
        assert all([torch.equal(t, again[n]) for n, t in tensors.items()]), name


def test_a_wrong_backend_is_said(load, monkeypatch):
    class Wrong(Naive):
        def attend(self, spec, inputs):
            o, lse = super().attend(spec, inputs)
            return o * 1.0001, lse

    check = load("flash_check")
    names, dtypes = ("short", "sinks"), (torch.float32, torch.bfloat16)
    monkeypatch.setattr(check, "PORTABLE", Naive())
    assert check.wrong_features(dtypes, names, "cpu") == []
    monkeypatch.setattr(check, "PORTABLE", Wrong())
    bad = check.wrong_features(dtypes, (*names, "unknown"), "cpu")
    assert [line.split(":")[0] for line in bad] == [
        "short torch.float32",
        "sinks torch.float32",
        "unknown torch.float32",
        "unknown torch.bfloat16",
    ]


def test_nan_and_a_wrong_infinity_are_the_worst_errors(load):
    worst_error = load("flash_calls").worst_error
    truth = torch.tensor([1.0, -torch.inf])
    assert worst_error([truth], [truth]) == 0.0
    assert worst_error([torch.tensor([torch.nan, -torch.inf])], [truth]) == float("inf")
    assert worst_error([torch.tensor([1.0, -1e30])], [truth]) == float("inf")


def test_nan_stops_the_variants(load):
    class NotANumber(Naive):
        def attend(self, spec, inputs):
            o, lse = super().attend(spec, inputs)
            return o * torch.nan, lse

    check = load("flash_check")
    check.run_variant(Naive(), "short", torch.float16, "cpu")
    with pytest.raises(AssertionError, match=r"short torch.float16: nan"):
        check.run_variant(NotANumber(), "short", torch.float16, "cpu")


def test_probes_that_raise_are_named(load, monkeypatch):
    def fine() -> None:
        pass

    def broken() -> None:
        raise AssertionError("differs")

    probes = load("flash_probes")
    monkeypatch.setattr(probes, "PROBES", (fine, broken))
    saved = {}
    probes.probes(lambda name, what: saved.update({name: what}))
    assert saved == {"probes": ["broken: AssertionError differs"]}


@pytest.mark.parametrize("by_variable", [False, True])
def test_results_are_written_as_they_come(load, monkeypatch, tmp_path, by_variable):
    """Also those before a word that fails."""
    flash_gpu = load("flash_gpu")
    path = tmp_path / "flash_gpu.json"
    seen = []

    def action(word):
        def act(save):
            seen.append(json.loads(path.read_text()))
            save(word, 1)
            if word == "route":
                raise RuntimeError("no card")

        return act

    monkeypatch.setattr(flash_gpu, "machine", lambda: ["card", "torch", "triton"])
    monkeypatch.setattr(flash_gpu, "action", action)
    monkeypatch.setattr(sys, "argv", ["flash_gpu.py", "host", "route", "decode", *([] if by_variable else ["--json", str(path)])])
    monkeypatch.setenv("OUT", str(tmp_path if by_variable else tmp_path / "missing"))
    with pytest.raises(RuntimeError, match="no card"):
        flash_gpu.main()
    machine = {"machine": ["card", "torch", "triton"]}
    assert seen == [machine, {**machine, "host": 1}]
    assert json.loads(path.read_text()) == {**machine, "host": 1, "route": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["flash_gpu.json"]


def test_the_page_reads_what_the_words_save(load, monkeypatch):
    tables, compare, decode, host = map(load, ("flash_tables", "flash_compare", "flash_decode", "flash_host"))
    saved = {}

    def save(name, what):
        saved[name] = json.loads(json.dumps(what))

    def cell(dim, causal, length):
        rates = {"flash": (300, 400), "fa2": (200, 100), "cudnn": (400, 400), "flex": (100 if causal else 400, 200)}
        return {"dim": dim, "causal": causal, "length": length, **rates}

    monkeypatch.setattr(compare, "cell", cell)
    monkeypatch.setattr(decode, "copy_rate", lambda: 4.0)
    monkeypatch.setattr(decode, "replay_us", lambda run, calls: 50.0)
    monkeypatch.setattr(decode, "time_ms", lambda run: 0.1)
    monkeypatch.setattr(decode, "cached", lambda *sizes: {"k": torch.empty(1, 8, 1000, 128)})
    monkeypatch.setattr(host, "host_share", lambda options: {"launches": 8.0, "without grad": 20.0, "with grad": 46.0})
    compare.compare(save)
    decode.decode(save)
    host.host(save)
    assert "| flex | causal | 3.00, worst 3.00 | 2.00, worst 2.00 |" in tables.ratios(saved)
    assert saved["flash/flex forward full"] == "0.750, worst 0.750"
    assert len(tables.compared(saved)) == 2 + 16
    assert tables.behind_fa2(saved).endswith("every cell reaches it.")
    saved["compare"][0]["flash"] = [250, 400]
    assert "1 of 16 cells don't: 1.25 at D = 64, full, 512." in tables.behind_fa2(saved)
    assert "none failed" in tables.probed({"probes": []})
    assert "million: not finite" in tables.probed({"probes": ["million: not finite"]})
    assert "| 8 | 1 | 50 | 100 | 0.08 | 0.02 |" in tables.decoding(saved)
    assert "| portable | 8, 8, 8 | 20, 20, 20 | 46, 46, 46 |" in tables.hosted(saved)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the portable kernels' launchers ask the card, but in the interpreter"
)
@pytest.mark.parametrize("kernels", ["portable", "hopper"])
def test_the_hosts_share_without_a_card(load, kernels):
    pytest.importorskip("triton")
    host = load("flash_host")
    before = registry._default
    us = host.share_without_card(kernels, calls=2, rounds=1)
    assert us.keys() == {"without grad", "with grad"}
    assert min(us.values()) > 0
    assert registry._default is before, "other tests would find the stand-in"


def test_the_best_tile_ran_in_every_way(load):
    best_of = load("flash_tune").best_of
    assert best_of([{(1,): 400.0, (2,): 300.0, (3,): 900.0}, {(1,): 100.0, (2,): 300.0}]) == (2,)
    assert best_of([{}, {(1,): 1.0}]) is None


def test_a_tile_is_held_for_its_turn_alone(load):
    pytest.importorskip("triton")
    table = importlib.import_module("attnzoo.backends.triton.table")
    before = dict(table.HOPPER["forward"])
    asked = ("forward", 64, 64, torch.bfloat16, (9, 0))
    assert table.tile_for(*asked) == before[64]
    with contextlib.suppress(RuntimeError), load("flash_tune").held_to("forward", (16, 32, 4, 1)):
        assert table.tile_for(*asked) == table.Tile(16, 32, 4, 1)
        raise RuntimeError("out of resources")
    assert table.tile_for(*asked) == before[64]
    assert table.HOPPER["forward"] == before


def test_a_call_is_timed_in_bursts(load, monkeypatch):
    """As many calls a round as the budget holds, and the mean of one of them."""
    bursts = load("card_bursts")
    asked = []

    def burst_ms(run, calls):
        asked.append(calls)
        return 2.0 * calls

    monkeypatch.setattr(bursts, "burst_ms", burst_ms)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert bursts.time_ms(lambda: None, rounds=3, budget_ms=21.0) == 2.0
    assert asked == [1, 10, 10, 10]
    assert bursts.interleaved_ms({"a": lambda: None}, rounds=2) == {"a": 2.0}
