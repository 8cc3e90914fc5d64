"""What every call of a process shares, and none may leave changed: torch's settings and the default generator."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["generator_state", "shared_settings"]


def generator_state(device: torch.device) -> Tensor:
    """The state of the device's default generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def shared_settings(device: torch.device) -> dict[str, object]:
    """Name -> value, of what would change the meaning or the speed of somebody else's next call."""
    settings: dict[str, object] = {
        "the default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled(device.type),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the number of threads": torch.get_num_threads(),
        "the precision of fp32 products": torch.backends.cuda.matmul.fp32_precision,
    }
    return settings | ({"the current device": torch.cuda.current_device()} if device.type == "cuda" else {})
