"""`flash_gpu.py repeats`: deterministic backward passes with the memory nearly full give equal bits each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flash_calls import PORTABLE, qkv, values_and_grads

TIMES = 5000
LEFT_BYTES = 2**31


def repeats(save: Callable[[str, Any], None]) -> None:
    """
    Raises:
        AssertionError: a pass differs from the first.
    """
    tensors = qkv(2, 4, 777, 64)
    upstream = torch.randn(2, 4, 777, 64, device="cuda"), torch.randn(2, 4, 777, device="cuda")
    first = values_and_grads(PORTABLE, tensors, {"deterministic": True}, upstream)
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - LEFT_BYTES, dtype=torch.uint8, device="cuda")
    for n in range(TIMES):
        again = values_and_grads(PORTABLE, tensors, {"deterministic": True}, upstream)
        if not all([torch.equal(a, b) for a, b in zip(first, again)]):
            raise AssertionError(f"repeat {n} differs")
    save("repeats", {"times": TIMES, "bytes taken": taken.numel()})
    print(f"{TIMES} repeats, equal bits, {taken.numel() / 2**30:.0f} GiB taken", flush=True)
