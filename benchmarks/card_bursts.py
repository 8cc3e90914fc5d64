"""Milliseconds of calls back to back on a GPU: the L2 as the call before left it, the host's share wherever it is the longer one.

`card_clock.py` times single calls instead, with an empty L2 and the host ahead.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

MOST_CALLS = 200
GRAPH_REPLAYS = 3


def time_ms(run: Callable[[], Any], *, rounds: int = 5, budget_ms: float = 25.0) -> float:
    """Median over rounds of the mean time of a call, by events; a round takes about the budget."""
    run()
    torch.cuda.synchronize()
    calls = max(2, min(MOST_CALLS, int(budget_ms / max(burst_ms(run, 1), 1e-3))))
    return statistics.median([burst_ms(run, calls) / calls for _ in range(rounds)])


def burst_ms(run: Callable[[], Any], calls: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


def interleaved_ms(calls: dict[str, Callable[[], Any]], *, rounds: int = 5, budget_ms: float = 12.0) -> dict[str, float]:
    """Medians over rounds in which each is timed once, so that a drift of the card's clock meets them all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(time_ms(call, rounds=1, budget_ms=budget_ms))
    return {name: statistics.median(found) for name, found in times.items()}


def replay_us(run: Callable[[], Any], calls: int = 20) -> float:
    """Microseconds on the card of a call, without the host's share: the least of three replays of a graph of many."""
    run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return min(time_ms(graph.replay, rounds=1, budget_ms=1.0) for _ in range(GRAPH_REPLAYS)) / calls * 1000
