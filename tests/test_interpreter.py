"""Triton's interpreter, as the tests mend it, casts as a GPU does."""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

import interpreter  # noqa: E402  imports triton

NUMBERS = torch.randn(1019, generator=torch.Generator().manual_seed(0))
VALUES = torch.cat([NUMBERS, torch.tensor([0.0, 1e-40, 3.4e38, 1 + 2**-8, -torch.inf])])


@triton.jit
def cast_kernel(source, target, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(target + places, tl.load(source + places).to(target.dtype.element_ty))


def cast() -> torch.Tensor:
    found = torch.empty(1024, dtype=torch.bfloat16)
    cast_kernel[(1,)](VALUES, found, 1024)
    return found


def test_fp32_is_rounded_to_bf16():
    assert torch.equal(cast(), VALUES.to(torch.bfloat16))


def test_it_would_be_cut_off(monkeypatch):
    """Else nothing needs to be mended any more."""
    monkeypatch.setattr(triton.runtime.interpreter, "_convert_float", interpreter.CUTTING)
    assert not torch.equal(cast(), VALUES.to(torch.bfloat16))
