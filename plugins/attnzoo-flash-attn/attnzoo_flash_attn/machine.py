"""What a call needs beyond the kernels' own claims: an installed distribution and a card that it runs on."""

from __future__ import annotations

import importlib.util

import torch

from attnzoo import AttentionSpec
from attnzoo.tracing import constant_when_traced

__all__ = ["ROW", "ampere_reasons", "band_reasons", "hopper_reasons", "is_installed"]

ROW = 8
"""Head dims are multiples of it: rows are copied 16 bytes at a time, 8 elements of half precision."""


@constant_when_traced
def is_installed(*modules: str) -> bool:
    """Whether one of the modules can be found; imports none of them, but for a package that holds one."""
    for module in modules:
        try:
            if importlib.util.find_spec(module) is not None:
                return True
        except (ImportError, ValueError):
            continue
    return False


@constant_when_traced
def hopper_reasons(device: torch.device) -> list[str]:
    """Why the card is none that these kernels were measured on."""
    reasons, (major, minor) = _card(device)
    return reasons if major in (0, 9) else [f"compute capability is {major}.{minor}, it takes 9.0, where it was measured"]


@constant_when_traced
def ampere_reasons(device: torch.device) -> list[str]:
    """Why the card is none that FlashAttention 2 is compiled for."""
    reasons, (major, minor) = _card(device)
    return reasons if major == 0 or major >= 8 else [f"compute capability is {major}.{minor}, it takes 8.0 and later"]


def _card(device: torch.device) -> tuple[list[str], tuple[int, int]]:
    """Why there is no such card, and its compute capability, (0, 0) where there is none."""
    if device.type != "cuda":
        return [], (0, 0)  # the capabilities say so
    if not torch.cuda.is_available():
        return [f"the device is {device}, torch sees no CUDA device here"], (0, 0)
    if (device.index or 0) >= (count := torch.cuda.device_count()):
        return [f"the device is {device}, this machine has {count} CUDA devices"], (0, 0)
    return [], torch.cuda.get_device_capability(device)


def band_reasons(spec: AttentionSpec) -> list[str]:
    """Flash-attn's causal and window are bottom-right; rows with no key come of longer queries."""
    if spec.band == (None, None) or spec.q_len <= spec.kv_len:
        return []
    return [f"q has length {spec.q_len} and k {spec.kv_len}, it takes causal and window where q is no longer than k"]
