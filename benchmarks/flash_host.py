"""`flash_gpu.py host`: the host's share of a call, by the Hopper kernels and by the portable ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from flash_calls import qkv

import attnzoo

SIZES = (2, 64, 128, 64)  # batch, heads, length and head dim: as large as the Hopper kernels want it
WAYS: dict[str, dict[str, Any]] = {"hopper": {"causal": True}, "portable": {"causal": True, "softcap": 30.0}}
MEANS = 20


def host(save: Callable[[str, Any], None]) -> None:
    rows = {}
    for name, options in WAYS.items():
        rows[name] = host_share(options)
        save("host", rows)
        print(f"host, {name}: " + ", ".join(f"{part} {us:.0f} us" for part, us in rows[name].items()), flush=True)


def host_share(options: dict[str, Any]) -> dict[str, float]:
    """Microseconds from `attention()` to its last launch, beyond what the same launches cost alone, through the kept binaries."""
    from attnzoo.backends.hopper import launch as hopper
    from attnzoo.backends.triton import launch as portable

    plain = list(qkv(*SIZES).values())
    leaves = [t.detach().requires_grad_() for t in plain]
    recorded: list[Callable[[], None]] = []
    with recording(portable.Kernel, "launch", recorded), recording(hopper.Launch, "__call__", recorded):
        attnzoo.attention(*plain, backend="flash", **options)
    alone = host_us(lambda: [launch() for launch in recorded])
    without = host_us(lambda: attnzoo.attention(*plain, backend="flash", **options)) - alone
    return {
        "launches": alone,
        "without grad": without,
        "with grad": host_us(lambda: attnzoo.attention(*leaves, backend="flash", **options)) - alone,
    }


def host_us(run: Callable[[], Any], calls: int = 50) -> float:
    """Time on the host of a call, the least of 20 means, with the queue never full enough to wait for."""
    times = []
    for _ in range(MEANS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - began) / calls)
    torch.cuda.synchronize()
    return 1e6 * min(times)


@contextlib.contextmanager
def recording(owner: Any, method: str, into: list[Callable[[], None]]) -> Iterator[None]:
    """Note every call of a launch as a closure that repeats it."""
    original = getattr(owner, method)

    def note(*arguments: Any) -> None:
        original(*arguments)
        into.append(lambda: original(*arguments))

    setattr(owner, method, note)
    try:
        yield
    finally:
        setattr(owner, method, original)
