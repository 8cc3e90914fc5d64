"""The calls that `flash_gpu.py check`, `compile` and `variants` make: one of each feature, as sizes and options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Call = tuple[dict[str, Tensor], dict[str, Any], tuple[Tensor, Tensor]]
"""Tensors, other options, and the gradients of o and lse."""

IDS = torch.tensor([[0] * 130 + [1] * 150 + [-7] * 53, [3] * 333])
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "d64": {"D": 64, "causal": True},
    "d128": {"D": 128, "causal": True, "S": 700},
    "d256": {"D": 256, "causal": True},
    "d96-dv160": {"D": 96, "Dv": 160},
    "d5-dv1": {"D": 5, "Dv": 1},
    "short": {"Sq": 3, "S": 1000},
    "short-causal": {"Sq": 5, "S": 3000, "causal": True, "align": "bottom_right", "D": 128},
    "one-query": {"Sq": 1, "S": 4097, "D": 64},
    "top-left": {"Sq": 400, "S": 200, "causal": True, "align": "top_left"},
    "bottom-right": {"Sq": 400, "S": 200, "causal": True, "align": "bottom_right"},
    "window": {"window": (70, 17)},
    "causal-window": {"window": (90, None), "causal": True, "D": 128},
    "mask": {"mask": (2, 4, 333, 333)},
    "mask-keys": {"mask": (2, 1, 1, 333)},
    "bias": {"bias": (2, 4, 333, 333)},
    "bias-heads": {"bias": (1, 4, 333, 333), "causal": True, "D": 128},
    "bias-keys": {"bias": (2, 1, 1, 333)},
    "bias-rows": {"bias": (1, 4, 333, 1)},
    "sinks": {"sinks": True, "causal": True},
    "softcap": {"softcap": 2.0, "bias": (1, 1, 333, 333)},
    "negative-scale": {"scale": -0.3},
    "zero-scale": {"scale": 0.0},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 77, "D": 64},
    "dropout-short": {"dropout_p": 0.3, "dropout_seed": 2**63 + 5, "Sq": 7, "S": 900},
    "segments": {"segment_ids": IDS},
    "segments-causal": {"segment_ids": IDS, "causal": True, "D": 128},
    "one-kv-head": {"Hkv": 1, "D": 128, "causal": True},
}
HOPPER_CALLS: dict[str, dict[str, Any]] = {
    "hopper-d64": {"D": 64, "S": 1200},
    "hopper-d64-causal": {"D": 64, "S": 1200, "causal": True},
    "hopper-d128": {"D": 128, "S": 700},
    "hopper-d128-causal": {"D": 128, "S": 700, "causal": True, "Hkv": 1},
    "hopper-d96-window": {"D": 96, "S": 700, "window": (100, 50)},
    "hopper-d128-bottom-right": {"D": 128, "Sq": 300, "S": 700, "causal": True, "align": "bottom_right"},
    "hopper-d256": {"D": 256, "S": 500, "causal": True},
}


def call_of(name: str, dtype: torch.dtype, device: str = "cuda") -> Call:
    """The call of a name above: 2 batches of 4 query heads, 2 kv heads, 333 tokens and 32 columns unless it says otherwise."""
    return made(dict({**FEATURES, **HOPPER_CALLS}[name]), dtype, device, seed=len(name))


def made(options: dict[str, Any], dtype: torch.dtype, device: str, *, seed: int) -> Call:
    """Sizes become tensors, a mask's and a bias's shape too; the rest are options already."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    S, D, Hkv = options.pop("S", 333), options.pop("D", 32), options.pop("Hkv", 2)
    Sq, Dv = options.pop("Sq", S), options.pop("Dv", D)
    tensors = {"q": randn(2, 4, Sq, D).to(dtype), "k": randn(2, Hkv, S, D).to(dtype), "v": randn(2, Hkv, S, Dv).to(dtype)}
    if "mask" in options:
        tensors["mask"] = randn(*options.pop("mask")) < 0.3
    if "bias" in options:
        tensors["bias"] = randn(*options.pop("bias"))
    if options.pop("sinks", False):
        tensors["sinks"] = randn(4)
    if "segment_ids" in options:
        options["segment_ids"] = options["segment_ids"].to(device)
    return tensors, options, (randn(2, 4, Sq, Dv).to(dtype), randn(2, 4, Sq))
