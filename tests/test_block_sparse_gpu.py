"""benchmarks/block_sparse_gpu.py on a CPU, small: only what is right is timed, and what goes wrong is said."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from attnzoo import BlockLayout, layouts

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """block_sparse_cells with ours alone, no dense forward, and short rounds."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("block_sparse_cells")
    monkeypatch.setattr(module, "SPARSE", {"block_sparse": module.SPARSE["block_sparse"]})
    monkeypatch.setattr(module, "DENSE", {})
    monkeypatch.setattr(sys.modules["card_clock"], "HEAD_STARTS_MS", (0.0,))
    monkeypatch.setattr(sys.modules["card_clock"], "MOST_CALLS", 1)
    monkeypatch.setattr(module, "HEADS", 2)
    monkeypatch.setattr(module, "qkv", lambda length, dim: sys.modules["block_sparse_inputs"].qkv(length, dim, heads=2))
    yield module
    for name in set(sys.modules) - before:  # other tests find nothing of it
        if name.startswith(("block_sparse_", "card_clock", "hopper_gpu")):
            del sys.modules[name]


def made(cells: ModuleType, family: str, excluded: dict[str, str] | None = None):
    return cells.Cells(cells.Job(16, 300, family), excluded or {}, lambda name: None)


@pytest.mark.parametrize(
    ("family", "name"), [("blocks", "random 1/2"), ("blocks", "butterfly"), ("window", "sliding_window"), ("documents", "documents")]
)
def test_a_right_contender_is_timed(cells, family, name):
    each = made(cells, family)
    row = each.time(each.prepare(name))
    assert row["reasons"] == {}
    assert row["layout"] == name
    assert set(row["ms"]["forward"]) == set(row["ms"]["backward"]) == {"block_sparse"}
    assert max(row["errors"].values()) < 5e-3


def test_one_that_can_be_called_once_costs_its_own_cells_alone(cells):
    """Right when it is checked, and refused when a clock calls it again: as compiled backwards with donated buffers are."""

    def once(pattern):
        attend, calls = ours(pattern), []

        class Once(torch.autograd.Function):
            @staticmethod
            def forward(ctx, o):
                ctx.is_used = False
                return o.clone()

            @staticmethod
            def backward(ctx, grad):
                if ctx.is_used:
                    raise RuntimeError("compiled with non-empty donated buffers")
                ctx.is_used = True
                return grad

        def call(q, k, v):
            calls.append(q.requires_grad)
            if not q.requires_grad and calls.count(False) > 1:
                raise RuntimeError("no second forward")
            return Once.apply(attend(q, k, v))

        return call

    ours = cells.SPARSE["block_sparse"]
    cells.SPARSE["once"] = once
    each = made(cells, "window")
    row = each.time(each.prepare("sliding_window"))
    assert set(row["ms"]["forward"]) == set(row["ms"]["backward"]) == {"block_sparse"}
    assert row["reasons"] == {
        "once forward": "RuntimeError: no second forward",
        "once backward": "RuntimeError: compiled with non-empty donated buffers",
    }


def test_flex_is_compiled_so_that_its_backward_runs_twice(cells, monkeypatch):
    import torch._functorch.config as functorch

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    peers = sys.modules["block_sparse_peers"]
    peers.compiled_flex.cache_clear()
    with functorch.patch(donated_buffer=True), torch._dynamo.config.patch(recompile_limit=8):  # what it sets is undone here
        peers.compiled_flex()
        assert functorch.donated_buffer is False
    peers.compiled_flex.cache_clear()


def test_a_wrong_contender_and_one_that_fails_are_not(cells):
    def wrong_gradient(pattern):
        attend = ours(pattern)
        return lambda q, k, v: attend(q, k, v) + 100 * (q - q.detach())

    def wrong_head(pattern):
        attend = ours(pattern)
        return lambda q, k, v: attend(q, k, v) * torch.tensor([1.1, 1.0], dtype=q.dtype)[:, None, None]

    def missing(pattern):
        raise ImportError("no such package")

    ours = cells.SPARSE["block_sparse"]
    cells.SPARSE.update({"wrong gradient": wrong_gradient, "wrong head": wrong_head, "missing": missing, "crashed": ours})
    each = made(cells, "window", {"crashed": "took the context along"})
    row = each.time(each.prepare("sliding_window"))
    assert set(row["ms"]["forward"]) == {"block_sparse", "wrong gradient"}
    assert set(row["ms"]["backward"]) == {"block_sparse"}
    assert "relative error of dq" in row["reasons"]["wrong gradient backward"]
    assert "all heads" in row["reasons"]["wrong head forward"]
    assert row["reasons"]["missing"] == "ImportError: no such package"
    assert row["reasons"]["crashed"] == "took the context along"


@pytest.mark.parametrize("family", ["blocks", "window", "documents"])
def test_the_truth_is_float64_under_the_layouts_mask(cells, family):
    for make in cells.FAMILIES[family].values():
        pattern = make(300)
        q, k, v, g = torch.randn(4, 300, 16, dtype=torch.float64)
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=pattern.layout.to_dense()[0, 0])
        for found, wanted in zip(cells.truth(pattern, q, k, v, g), [o, *torch.autograd.grad(o, (q, k, v), g)]):
            torch.testing.assert_close(found, wanted)


def test_blocks_that_contradict_the_rule_are_noticed(cells):
    pattern = sys.modules["block_sparse_inputs"].Pattern(layouts.causal(300, block=128), left=18)
    with pytest.raises(AssertionError, match="not those of its rule"):
        cells.visible(pattern, slice(0, 300), 300)


def test_building_reports_every_layout(cells):
    build = importlib.import_module("block_sparse_build")
    saved = {}
    rows = build.build(lambda name, what: saved.update({name: what}), scale=64)
    assert saved["build"] == rows
    assert len(rows) == 5
    assert all(row["ms"] > 0 and row["schedule ms"] > 0 and row["blocks"] > 0 for row in rows[:2] + rows[3:])


def test_random_blocks_have_an_empty_row(cells):
    layout = sys.modules["block_sparse_inputs"].random_blocks(1, 2, 500, (64, 64))
    assert isinstance(layout, BlockLayout)
    assert layout.full.offsets.diff().view(2, 8)[:, 4].tolist() == [0, 0]
