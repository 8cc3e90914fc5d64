"""`block_sparse_gpu.py tune` and `quick`: portable kernels under many tiles, and time against density without a peer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from block_sparse_inputs import HEADS, qkv
from card_bursts import time_ms
from flash_calls import attend
from flash_compile import in_parallel
from flash_tune import forget_tiles, kernels_alone
from torch import Tensor

from attnzoo import layouts
from attnzoo.backends.block_sparse import BlockSparse
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

CANDIDATES: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {
    "forward": {
        64: [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 3), (128, 128, 8, 2)],
        128: [(128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3), (64, 128, 4, 2)],
    },
    "backward_keys": {
        64: [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 8, 3), (64, 128, 8, 4), (64, 128, 8, 2)],
        128: [(64, 128, 8, 3), (64, 128, 8, 4), (64, 128, 8, 2), (32, 128, 8, 4), (64, 64, 4, 3)],
    },
    "backward_queries": {
        64: [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 3)],
        128: [(128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)],
    },
}


def run_of(kernel: str, dim: int, tile: tuple[int, ...], device: str, length: int = 8192) -> Callable[[], Any]:
    """A closure that runs one kernel under one tile over random blocks."""
    from attnzoo.backends.block_sparse_triton import backward_keys, backward_queries, forward
    from attnzoo.backends.block_sparse_triton.launch import SMALLER, SparseProblem
    from attnzoo.backends.triton import table

    SMALLER.clear()
    table.HOPPER[kernel] = {256: table.Tile(*tile)}
    forget_tiles()
    length, heads = (length, HEADS) if device == "cuda" else (512, 2)
    q, k, v, g = [torch.randn(1, length, heads, dim, device=device).to(torch.bfloat16).transpose(1, 2) for _ in range(4)]
    layout = layouts.random(length, density=0.25, block=128, device=device)
    spec = AttentionSpec.of(q, k, v, layout=layout)
    call = SparseProblem(spec, AttentionInputs.of(spec, q, k, v, layout=layout))
    return kernels_alone((forward, backward_keys, backward_queries), call, g)[kernel]


def compile_tile(kernel: str, dim: int, tile: tuple[int, ...]) -> None:
    run_of(kernel, dim, tile, "cpu")()


def tune(save: Callable[[str, Any], None]) -> None:
    """Rank the tiles, and put the best into the table for what else runs here."""
    from attnzoo.backends.triton import problem, table

    before = {kernel: dict(table.HOPPER[kernel]) for kernel in CANDIDATES}
    jobs = [(kernel, dim, tile) for kernel, dims in CANDIDATES.items() for dim, tiles in dims.items() for tile in tiles]
    in_parallel(compile_tile, jobs)
    ranks: dict[str, Any] = {}
    best: dict[str, dict[int, Any]] = {kernel: {} for kernel in CANDIDATES}
    for (kernel, dim), group in itertools.groupby(jobs, key=lambda job: job[:2]):
        found = []
        for _, _, tile in group:
            try:
                found.append((time_ms(run_of(kernel, dim, tile, "cuda"), rounds=3, budget_ms=10.0), tile))
            except Exception as failure:
                print(kernel, dim, tile, type(failure).__name__, str(failure)[:80])
        found.sort()
        ranks[f"{kernel} {dim}"] = found
        save("tune", ranks)
        best[kernel][dim] = table.Tile(*found[0][1])
        print(f"{kernel:17s} D={dim}", "  ".join(f"{tile}: {1000 * ms:.0f} us" for ms, tile in found), flush=True)
    for kernel, tiles in best.items():
        table.HOPPER[kernel] = {**before[kernel], **tiles}
    table.tile_for.cache_clear()
    problem.facts_of.cache_clear()


def quick(save: Callable[[str, Any], None]) -> None:
    """Hopper and portable kernels over random blocks, beside the dense forward and backward of cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    ways = {"hopper": BlockSparse(), "portable": BlockSparse(kernels="portable")}
    rows: list[dict[str, Any]] = []
    for dim, length in itertools.product((128, 64), (8192, 32768)):
        tensors = qkv(length, dim)
        g = torch.randn_like(tensors["q"])
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            dense = forward_and_backward(lambda: sdpa(*tensors.values()), tensors, g)  # noqa: B023
        print(f"D={dim} S={length} cudnn dense {dense[0]:.3f} {dense[1]:.3f} ms", flush=True)
        for share in (1, 4, 8, 32):
            layout = layouts.random(length, density=1 / share, device="cuda")
            row: dict[str, Any] = {"dim": dim, "length": length, "density": layout.density, "dense": dense}
            useful = 4e-9 * HEADS * length * length * dim * layout.density
            for way, backend in ways.items():
                row[way] = forward_and_backward(lambda: attend(backend, tensors, {"layout": layout})[0], tensors, g)  # noqa: B023
            rows.append(row)
            save("quick", rows)
            rates = "  ".join(f"{way} {useful / row[way][0]:.0f} / {2.5 * useful / row[way][1]:.0f} TFLOP/s" for way in ways)
            over = row["hopper"][0] / layout.density / dense[0]
            print(f"D={dim} S={length} density {layout.density:.4f}: {rates}, over density x dense {over:.2f}", flush=True)


def forward_and_backward(call: Callable[[], Tensor], tensors: dict[str, Tensor], g: Tensor) -> tuple[float, float]:
    """Milliseconds of each."""
    o = call()
    with torch.no_grad():
        forward_ms = time_ms(call, rounds=3, budget_ms=12.0)
    leaves = list(tensors.values())
    return forward_ms, time_ms(lambda: torch.autograd.grad(o, leaves, g, retain_graph=True), rounds=3, budget_ms=12.0)
