"""Every Hopper kernel that a call can get is compiled in the tests, and was right on a card."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from compiled import needs_triton
from hopper_aot import COMPILED, VARIANTS, spec_of

from attnzoo.backends.hopper import support
from attnzoo.backends.hopper.tiles import ForwardTile
from attnzoo.spec import AttentionSpec

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RESULTS = BENCHMARKS / "results" / "h200"
Kernels = Callable[[AttentionSpec], set[str]]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The kernels that a call gets, as `hopper_gpu.py` writes them down."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("hopper_gpu")
    monkeypatch.delitem(sys.modules, "hopper_gpu")  # other tests find nothing of it
    return lambda spec: module.kernels_of(spec, backward=spec.head_dim <= support.BACKWARD_HEAD_DIM)


def calls(head_dim: int) -> dict[str, AttentionSpec]:
    """Of every kind, on both sides of every length at which the tile changes; values have the head dim."""
    bands = [
        {},
        *[dict(causal=True, align=align) for align in ("top_left", "bottom_right")],
        *[dict(window=(left, 0), align="bottom_right") for left in (128, 600, 1024, 6000)],
        *[dict(window=window, align="top_left") for window in ((128, 128), (128, None), (None, 128), (None, 100))],
        *[dict(window=window, align="top_left") for window in ((2**31, 0), (2**31, None), (None, 2**31), (2**31, 2**31))],
    ]
    return {
        f"{length} x {kv_len} {band}": spec_of(head_dim, length=length, kv_len=kv_len, **band)
        for length in (1, 300, 512, 513, 1024, 1025, 2048, 2049, 4096, 4097, 8192)
        for kv_len in (length, length + 128, length + 37)
        for band in bands
    }


@needs_triton
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_every_kernel_that_a_call_can_get_is_compiled(head_dim: int, kernels: Kernels) -> None:
    compiled = {each for name in COMPILED for each in kernels(spec_of(int(name.split("-")[1]), **VARIANTS[name.split("-")[2]]))}
    left_out = [name for name, spec in calls(head_dim).items() if not kernels(spec) <= compiled]
    assert not left_out, f"no name in PROCESSES stands for the kernels of {left_out[:3]}"


@needs_triton
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_every_kernel_that_a_call_can_get_was_right_on_a_card(head_dim: int, kernels: Kernels) -> None:
    """The committed results hold those that were: `hopper_gpu.py check` against float64, `repeat` bit by bit."""
    right = {
        each
        for what in ("check", "repeat")
        for each in json.loads((RESULTS / f"hopper_{what}.json").read_text(encoding="utf-8"))["kernels"]
    }
    not_run = [name for name, spec in calls(head_dim).items() if not kernels(spec) <= right]
    assert not not_run, f"no card has run the kernels of {not_run[:3]}: {sorted(kernels(calls(head_dim)[not_run[0]]) - right)}"


@needs_triton
def test_a_changed_tile_was_right_on_no_card(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    right = json.loads((RESULTS / "hopper_check.json").read_text(encoding="utf-8"))["kernels"]
    launch = importlib.import_module("attnzoo.backends.hopper.launch")
    spec = spec_of(128, causal=True)
    assert kernels(spec) <= set(right)
    monkeypatch.setattr(launch, "forward_tile_of", lambda _: ForwardTile(64, 2, 3, 3))
    launch.forward_plan.cache_clear()
    assert not kernels(spec) <= set(right)
    launch.forward_plan.cache_clear()
