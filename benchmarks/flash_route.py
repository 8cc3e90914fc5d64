"""`flash_gpu.py route`: the portable forward against the Hopper one on small calls: where `flash` changes over."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from card_bursts import replay_us
from flash_calls import PORTABLE

from attnzoo.backends.flash import reasons_against_hopper
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

DIMS = (64, 128)
SIZES = (
    (1, 8, 65, 65),
    (8, 16, 128, 128),
    (4, 16, 256, 256),
    (8, 16, 256, 256),
    (1, 16, 512, 512),
    (4, 16, 512, 512),
    (32, 16, 512, 512),
    (1, 16, 1024, 1024),
    (4, 16, 1024, 1024),
    (1, 16, 2048, 2048),
    (1, 32, 128, 8192),
    (1, 16, 512, 8192),
)
"""Batch, heads, queries and keys: from so little that the card is idle to where it is full."""


def route(save: Callable[[str, Any], None]) -> None:
    rows = []
    for dim, sizes, causal in itertools.product(DIMS, SIZES, (False, True)):
        if causal and sizes[2] != sizes[3]:
            continue
        row = routed(dim, sizes, causal)
        rows.append(row)
        save("route", rows)
        lost = row[row["chosen"]] / min(row["hopper"], row["portable"])
        times = f"hopper {row['hopper']:.1f} portable {row['portable']:.1f} us, chosen {row['chosen']}, {lost:.2f}"
        print(f"route {row['sizes']} causal={int(causal)}: {times}", flush=True)


def routed(dim: int, sizes: tuple[int, int, int, int], causal: bool) -> dict[str, Any]:
    """Microseconds of both on the card, and which of them `flash` takes."""
    from attnzoo.backends.hopper import launch as hopper

    batch, heads, q_len, kv_len = sizes
    shapes = [(batch, length, heads, dim) for length in (q_len, kv_len, kv_len)]
    q, k, v = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for shape in shapes]
    spec = AttentionSpec.of(q, k, v, causal=causal)
    inputs = AttentionInputs.of(spec, q, k, v)
    return {
        "sizes": (dim, *sizes),
        "causal": causal,
        "hopper": replay_us(lambda: hopper.forward(spec, q, k, v)),
        "portable": replay_us(lambda: PORTABLE.forward(spec, inputs)),
        "chosen": "portable" if reasons_against_hopper(spec, "forward") else "hopper",
    }
