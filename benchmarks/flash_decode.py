"""`flash_gpu.py decode`: the portable kernels with few queries over long caches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from card_bursts import replay_us, time_ms
from flash_calls import PORTABLE, attend
from torch import Tensor

HEADS, KV_HEADS, DIM = 64, 8, 128
CACHED = 32768  # keys
FEW_HEADS = (8, 256, 131072)  # of one kv head; queries and keys
COPIED = 2**30  # elements


def decode(save: Callable[[str, Any], None]) -> None:
    """Time and bytes of keys and values a second, beside those that a copy reads and writes."""
    copy = copy_rate()
    rows: list[dict[str, float]] = []
    for batch, queries in itertools.product((1, 8), (1, 8)):
        row = decoded(batch, queries, copy)
        rows.append(row)
        save("decode", rows)
        rates = f"{row['TB/s']:.2f} TB/s, {row['of copy']:.2f} of a copy's {copy:.2f}"
        print(f"decode B={batch} q={queries}: {row['us']:.0f} us in a graph, {row['eager us']:.0f} us eager; {rates}", flush=True)
    rows.append({"few heads": few_heads_rate()})
    save("decode", rows)
    heads, queries, keys = FEW_HEADS
    print(f"{queries} queries over {keys} keys, {heads}/1 heads: {rows[-1]['few heads']:.0f} TFLOP/s", flush=True)


def copy_rate() -> float:
    """TB/s, read and written."""
    source = torch.empty(COPIED, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.numel() * 2 / time_ms(lambda: target.copy_(source)) / 1e9


def decoded(batch: int, queries: int, copy: float) -> dict[str, float]:
    tensors = cached(batch, HEADS, KV_HEADS, queries, CACHED)

    def run() -> Any:
        return attend(PORTABLE, tensors, {"causal": True, "align": "bottom_right"})

    us, eager_us = replay_us(run, calls=5), 1000 * time_ms(run)
    rate = 2 * tensors["k"].numel() * 2 / us / 1e6
    return {"batch": batch, "queries": queries, "us": us, "eager us": eager_us, "TB/s": rate, "of copy": rate / copy}


def few_heads_rate() -> float:
    """TFLOP/s."""
    heads, queries, keys = FEW_HEADS
    tensors = cached(1, heads, 1, queries, keys)
    return 4 * heads * queries * keys * DIM / time_ms(lambda: attend(PORTABLE, tensors, {})) / 1e9


def cached(batch: int, heads: int, kv_heads: int, queries: int, keys: int) -> dict[str, Tensor]:
    shapes = {"q": (batch, heads, queries, DIM), "k": (batch, kv_heads, keys, DIM), "v": (batch, kv_heads, keys, DIM)}
    return {n: torch.randn(s, device="cuda", dtype=torch.bfloat16) for n, s in shapes.items()}
