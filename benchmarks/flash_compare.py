"""`flash_gpu.py compare`: the portable kernels beside SDPA (FA2, cuDNN) and `torch.compile(flex_attention)`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from block_sparse_peers import compiled_flex
from card_bursts import interleaved_ms
from flash_calls import PORTABLE, TOKENS, WIDTH, attend, flops, qkv, require, worst_error
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention as sdpa

LENGTHS = (512, 2048, 8192, 16384)
DIMS = (64, 128)
Calls = dict[str, Callable[[], Tensor]]


def compare(save: Callable[[str, Any], None]) -> None:
    rows = []
    for dim, causal, length in itertools.product(DIMS, (False, True), LENGTHS):
        row = cell(dim, causal, length)
        rows.append(row)
        save("compare", rows)
        rates = "  ".join(f"{name} {row[name][0]:.0f}/{row[name][1]:.0f}" for name in ("flash", "fa2", "cudnn", "flex"))
        print(f"D={dim} causal={int(causal)} S={length:6d}  fwd/bwd TFLOP/s  {rates}", flush=True)
    for name, summary in ratios(rows).items():
        save(name, summary)
        print(f"{name}: geometric mean {summary}", flush=True)


def cell(dim: int, causal: bool, length: int) -> dict[str, Any]:
    """Forward and backward TFLOP/s by contender, ours checked against fa2 first."""
    batch, heads = TOKENS // length, WIDTH // dim
    tensors = {n: t.requires_grad_() for n, t in qkv(batch, heads, length, dim).items()}
    calls = contenders(tensors, causal)
    outputs = {name: call() for name, call in calls.items()}
    error = worst_error([outputs["flash"]], [outputs["fa2"]])
    require(error, 2e-2, f"flash against fa2, D={dim} S={length} causal={causal}")
    with torch.no_grad():
        forward_ms = interleaved_ms(calls)
    backward_ms = interleaved_ms(backwards_of(outputs, list(tensors.values())))
    useful = flops(batch, heads, length, dim, causal) / 1e9
    rates = {name: (useful / forward_ms[name], 2.5 * useful / backward_ms[name]) for name in calls}
    return {"dim": dim, "causal": causal, "length": length, **rates}


def contenders(tensors: dict[str, Tensor], causal: bool) -> Calls:
    q, k, v = tensors.values()
    length = q.shape[2]
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda") if causal else None
    flex = compiled_flex()
    return {
        "flash": lambda: attend(PORTABLE, tensors, {"causal": causal})[0],
        "fa2": held_to([SDPBackend.FLASH_ATTENTION], lambda: sdpa(q, k, v, is_causal=causal)),
        "cudnn": held_to([SDPBackend.CUDNN_ATTENTION], lambda: sdpa(q, k, v, is_causal=causal)),
        "flex": lambda: flex(q, k, v, block_mask=blocks),
    }


def held_to(kinds: list[SDPBackend], call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The call with SDPA held to one of its backends."""

    def run() -> Tensor:
        with sdpa_kernel(kinds):
            return call()

    return run


def backwards_of(outputs: dict[str, Tensor], leaves: list[Tensor]) -> dict[str, Callable[[], Any]]:
    g = torch.randn_like(outputs["flash"])

    def backward_of(o: Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(o, leaves, g, retain_graph=True)

    return {name: backward_of(o) for name, o in outputs.items()}


def ratios(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Of speed, ours over flex's and fa2's: geometric mean and worst cell, by pass and by causal."""
    found = {}
    for peer, place, causal in itertools.product(("flex", "fa2"), (0, 1), (None, False, True)):
        of_cells = [row["flash"][place] / row[peer][place] for row in rows if causal in (None, row["causal"])]
        which = {None: "all", False: "full", True: "causal"}[causal]
        name = f"flash/{peer} {('forward', 'backward')[place]} {which}"
        found[name] = f"{statistics.geometric_mean(of_cells):.3f}, worst {min(of_cells):.3f}"
    return found
