"""`block_sparse_gpu.py build`: making layouts on the device, and the schedule that their first call makes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from block_sparse_inputs import DEVICE, HEADS

from attnzoo import BlockLayout, layouts
from attnzoo.backends.block_sparse_triton.schedule import Schedule

ROUNDS = 7


def makers(scale: int = 1) -> dict[str, Callable[[], BlockLayout]]:
    """Layouts by name; lengths are divided by scale."""
    length, short = 131072 // scale, 32768 // scale
    ids = torch.arange(length, device=DEVICE) // (5000 // scale)
    scores = torch.randn(1, HEADS, short // 128, short // 128, device=DEVICE)
    return {
        f"from_mask_mod, documents, S = {length}": lambda: layouts.from_mask_mod(
            lambda b, h, i, j: ids[i] == ids[j], length, length, device=DEVICE
        ),
        f"documents, S = {length}": lambda: layouts.documents(ids, device=DEVICE),
        f"topk, {HEADS} heads, an eighth of the blocks, S = {short}": lambda: layouts.topk(
            scores, short // 1024, q_len=short, kv_len=short
        ),
        f"causal, S = {length}": lambda: layouts.causal(length, device=DEVICE),
        f"sliding_window 1024, S = {2**20 // scale}": lambda: layouts.sliding_window(2**20 // scale, window=1024, device=DEVICE),
    }


def build(save: Callable[[str, Any], None], scale: int = 1) -> list[dict[str, Any]]:
    """Of each layout the median ms over rounds, transposed lists included, the first call's schedule apart, and the most
    device memory at once."""
    rows = []
    for name, make in makers(scale).items():
        times, schedules, peak = [], [], 0.0
        for turn in range(ROUNDS + 1):  # the first is warm-up
            before = start_of_memory()
            began = now()
            layout = make()
            _ = layout.transposed
            middle = now()
            if turn:
                times.append(1000 * (middle - began))
                peak = max(peak, megabytes_since(before))
            Schedule.of(layout)
            schedules += [1000 * (now() - middle)] if turn else []
        row = {
            "layout": name,
            "blocks": len(layout.full.indices) + len(layout.partial.indices),
            "ms": statistics.median(times),
            "schedule ms": statistics.median(schedules),
            "peak MB": peak,
        }
        rows.append(row)
        save("build", rows)
        print(f"build {name}: {row['ms']:.2f} ms, {peak:.0f} MB, schedule {row['schedule ms']:.2f} ms", flush=True)
    return rows


def now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def start_of_memory() -> int:
    if DEVICE != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def megabytes_since(before: int) -> float:
    return (torch.cuda.max_memory_allocated() - before) / 1e6 if DEVICE == "cuda" else 0.0
