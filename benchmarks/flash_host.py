"""`flash_gpu.py host`: the host's share of a call, by the Hopper kernels and by the portable ones.

    TRITON_INTERPRET=1 python benchmarks/flash_host.py

needs no GPU: the thread's time of a call whose launches do nothing, which tells one commit from another. Name another checkout
in PYTHONPATH to measure that.
"""

from __future__ import annotations

import contextlib
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import attnzoo

SIZES = (2, 64, 128, 64)  # batch, heads, length and head dim: as large as the Hopper kernels want it
WAYS: dict[str, dict[str, Any]] = {"hopper": {"causal": True}, "portable": {"causal": True, "softcap": 30.0}}
MEANS = 20
RUNS = 3  # on the same host they differ by more than half


def host(save: Callable[[str, Any], None]) -> None:
    runs: list[dict[str, Any]] = []
    for _ in range(RUNS):
        runs.append({})
        for name, options in WAYS.items():
            runs[-1][name] = host_share(options)
            save("host", runs)
            print(f"host, {name}: " + ", ".join(f"{part} {us:.0f} us" for part, us in runs[-1][name].items()), flush=True)


def host_share(options: dict[str, Any]) -> dict[str, float]:
    """Microseconds from `attention()` to its last launch, beyond what the same launches cost alone, through the kept binaries."""
    from flash_calls import qkv

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


STAND_IN_SIZES = (2, 8, 2048, 64)  # batch, heads, length and head dim


def share_without_card(kernels: str, *, calls: int = 2000, rounds: int = 12) -> dict[str, float]:
    """Microseconds of this thread, from `attention()` to its last launch; tensors lie on the CPU, and no launch does anything."""
    plain = [torch.zeros(STAND_IN_SIZES, dtype=torch.bfloat16) for _ in range(3)]
    leaves = [tensor.clone().requires_grad_() for tensor in plain]

    def us(tensors: list[Tensor]) -> float:
        def call() -> object:
            return attnzoo.attention(*tensors, causal=True, backend="flash")

        return 1e6 * min(timeit.repeat(call, number=calls, repeat=rounds, timer=time.thread_time)) / calls

    with without_card(kernels):
        return {"without grad": us(plain), "with grad": us(leaves)}


@contextlib.contextmanager
def without_card(kernels: str) -> Iterator[None]:
    """`flash` takes tensors on the CPU; its launches do nothing."""
    from attnzoo import registry
    from attnzoo.backends import flash
    from attnzoo.backends.hopper import launch as hopper
    from attnzoo.backends.triton import launch as portable

    with contextlib.ExitStack() as patches:
        replaced: list[tuple[Any, str, Any]] = [
            (registry, "_default", registry.Registry([flash.Flash(is_interpreted=True)])),
            (portable.Kernel, "launch", lambda *arguments: None),
            (hopper.Launch, "__call__", lambda launch: None),
        ]
        if kernels == "hopper":
            replaced.append((flash, "reasons_against_hopper", lambda *asked: ()))
        for owner, name, stand_in in replaced:
            patches.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def main() -> None:
    for kernels in ("portable", "hopper"):
        us = share_without_card(kernels)
        print(f"{kernels}: {us['without grad']:.1f} us without grad, {us['with grad']:.1f} with")


if __name__ == "__main__":
    main()
