"""`flash_gpu.py subsets`: both backwards where only some of q, k and v need a gradient: which of them `flash` should take.

The Hopper backward makes all three whatever is asked for; the portable one leaves out the products of the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from card_bursts import replay_us
from flash_calls import PORTABLE, TOKENS, WIDTH

from attnzoo.backends.flash import Flash, reasons_against_hopper
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

DIMS = (64, 128)
LENGTHS = (512, 2048, 8192)
SUBSETS = (("q", "k", "v"), ("q",), ("k",), ("v",), ("q", "k"), ("k", "v"))
FASTEST, HOPPER = Flash(), Flash(kernels="hopper")


def subsets(save: Callable[[str, Any], None]) -> None:
    rows = []
    for dim, length, causal in itertools.product(DIMS, LENGTHS, (False, True)):
        for grads in SUBSETS:
            row = timed(dim, length, causal, grads)
            rows.append(row)
            save("subsets", rows)
            times = f"hopper {row['hopper']:.0f} portable {row['portable']:.0f} us, chosen {row['chosen']}"
            print(f"subsets D={dim} S={length} causal={int(causal)} of {'+'.join(grads)}: {times}", flush=True)


def timed(dim: int, length: int, causal: bool, grads: tuple[str, ...]) -> dict[str, Any]:
    """Microseconds of both backwards on the card, and which of them `flash` takes."""
    shape = (TOKENS // length, length, WIDTH // dim, dim)
    made = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for name in "qkv"}
    q, k, v = [made[name].requires_grad_(name in grads) for name in "qkv"]
    spec = AttentionSpec.of(q, k, v, causal=causal)
    inputs = AttentionInputs.of(spec, *[tensor.detach() for tensor in (q, k, v)])
    o, lse = FASTEST.forward(spec, inputs)
    grad_o = torch.randn_like(o)

    def us(backend: Flash) -> float:
        return replay_us(lambda: backend.backward(spec, inputs, o, lse, grad_o, None), calls=10)

    return {
        "dim": dim,
        "length": length,
        "causal": causal,
        "grads": grads,
        "hopper": us(HOPPER),
        "portable": us(PORTABLE),
        "chosen": "portable" if reasons_against_hopper(spec, "backward") else "hopper",
    }
