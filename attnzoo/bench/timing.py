"""How long a call takes: by events of the CUDA stream, by the clock elsewhere; with a warm or a cold cache."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["as_graph", "burst", "peak_bytes", "synchronize"]

CACHE_BYTES = {"cuda": 2**29, "cpu": 2**26}  # more than any last-level cache; on CUDA 0.2 ms, in which the host gets ahead
FEWEST, MOST = 3, 300

T = TypeVar("T")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def burst(call: Callable[[], object], device: torch.device, *, seconds: float, is_cold: bool) -> list[float]:
    """Milliseconds of each call, of as many as `seconds` hold; at least three."""
    scratch = torch.empty(CACHE_BYTES.get(device.type, 2**26), dtype=torch.uint8, device=device) if is_cold else None
    measure = _by_events if device.type == "cuda" else _by_clock
    measure(call, 1, scratch)  # what the allocator and lazy loading do once
    estimate = min(measure(call, 2, scratch)) / 1e3
    count = int(min(max(seconds / max(estimate, 1e-7), FEWEST), MOST))
    was_enabled = gc.isenabled()
    gc.disable()  # a collection in the middle of a call would be its time
    try:
        return measure(call, count, scratch)
    finally:
        if was_enabled:
            gc.enable()


def _by_clock(call: Callable[[], object], count: int, scratch: Tensor | None) -> list[float]:
    times = []
    for _ in range(count):
        if scratch is not None:
            scratch.zero_()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _by_events(call: Callable[[], object], count: int, scratch: Tensor | None) -> list[float]:
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    torch.cuda.synchronize()
    for start, end in pairs:
        if scratch is not None:
            scratch.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def as_graph(call: Callable[[], T], stream: torch.cuda.Stream) -> Callable[[], T]:
    """Replays of the call, captured on the stream; autograd runs a backward on the stream of its forward."""
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = call()

    def replay() -> T:
        graph.replay()
        return kept

    return replay


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that torch allocates for a call, at their highest and beyond what was in use before."""
    if device.type != "cuda":
        return _peak_of_events(call)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del kept
    return peak


def _peak_of_events(call: Callable[[], object]) -> int:
    """From the profiler's account of every allocation: the process's own size says little about small tensors."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = call()
    del kept
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]" and event.device_index() == -1)
    return max(itertools.accumulate([int(change) for _, change in changes], initial=0))
