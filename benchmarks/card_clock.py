"""Milliseconds of single calls on a GPU, without the host's share; on a CPU plain seconds, so that what uses it can be tried.

Before each call the L2 is overwritten and the GPU is kept busy, so that the host has launched the whole call before its first
kernel starts. A sample for which the host came too late is taken again with a longer head start; a call for which that doesn't
help waits for the GPU itself, which is part of its time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

ROUNDS = 5
FLUSH_BYTES = 2**29  # ten times the L2
CYCLES_A_MS = 2_000_000
HEAD_STARTS_MS = (1.5, 3.0, 6.0)
BUDGET_MS = 8.0  # of a round of one call
MOST_CALLS = 4


class Timed:
    """A call and its samples."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.head_start, self.is_late = call, 0, False
        call()
        self.calls = max(1, min(MOST_CALLS, int(BUDGET_MS / max(self.sample_ms(), 1e-3))))
        self.medians: list[float] = []

    def round(self) -> None:
        self.medians.append(statistics.median(self.sample_ms() for _ in range(self.calls)))

    def sample_ms(self) -> float:
        if not torch.cuda.is_available():
            began = time.perf_counter()
            self.call()
            return 1e3 * (time.perf_counter() - began)
        ms, was_late = self.after_head_start()
        while was_late and self.head_start < len(HEAD_STARTS_MS) - 1:
            self.head_start += 1
            ms, was_late = self.after_head_start()
        self.is_late |= was_late
        return ms

    def after_head_start(self) -> tuple[float, bool]:
        """Milliseconds, and whether the GPU began before the host had launched all."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.empty(FLUSH_BYTES // 4, device="cuda").zero_()
        torch.cuda._sleep(int(HEAD_STARTS_MS[self.head_start] * CYCLES_A_MS))
        start.record()
        self.call()
        end.record()
        was_late = start.query()
        end.synchronize()
        return start.elapsed_time(end), was_late


def interleaved_ms(calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> tuple[dict[str, float], list[str]]:
    """Of each call the median over rounds that alternate between them, each coming first in its turn, of a round's median
    sample; and the names of calls that the host could not launch ahead."""
    timed = {name: Timed(call) for name, call in calls.items()}
    order = list(timed)
    for turn in range(rounds):
        first = turn % max(len(order), 1)
        for name in order[first:] + order[:first]:
            timed[name].round()
    return {name: statistics.median(each.medians) for name, each in timed.items()}, [name for name in order if timed[name].is_late]
