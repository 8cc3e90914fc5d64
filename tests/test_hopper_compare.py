"""benchmarks/hopper_compare.py without a GPU: the gradients that its contenders are held to are those of the call."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import attnzoo

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 5)], ids=("full", "causal", "window"))
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_true_gradients_are_those_of_the_last_key_head(monkeypatch, causal, window, kv_heads):
    monkeypatch.syspath_prepend(str(FOLDER))
    compare = importlib.import_module("hopper_compare")
    cell = compare.Cell("table", 8, 24, causal, 2, 4, kv_heads, window=window, backward=True)
    q, k, v = [torch.randn(2, heads, 24, 8, dtype=torch.float64).requires_grad_() for heads in (4, kv_heads, kv_heads)]
    o = attnzoo.attention(q, k, v, causal=causal, window=None if window is None else (window, 0), backend="naive")
    grad_o = torch.randn_like(o)
    for found, whole in zip(compare.true_gradients(cell, q, k, v, grad_o), torch.autograd.grad(o, (q, k, v), grad_o)):
        torch.testing.assert_close(found, whole[-1, -len(found) :])


def test_every_cell_with_a_backward_fits_a_float64_truth(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    cells = list(importlib.import_module("hopper_compare").cells())
    assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.section for cell in cells if cell.backward} == {"table", "dims", "grouped", "window"}
    assert max(cell.length**2 * 8 for cell in cells if cell.backward) <= 2**31, "three such matrices at a time"
