"""`flash_gpu.py tune`: each portable kernel under many tiles, for the tables in attnzoo/backends/triton/table.py."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from card_bursts import time_ms
from flash_calls import TOKENS, WIDTH, flops
from flash_compile import in_parallel
from torch import Tensor

from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

Sizes = tuple[int, int, int, int]
"""Queries, keys, warps and stages: the fields of `table.Tile`."""
Found = list[tuple[float, Sizes]]
"""TFLOP/s and the tile, fastest first."""

CANDIDATES: dict[str, dict[int, list[Sizes]]] = {
    "forward": {
        64: [(64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 2), (128, 64, 8, 3), (128, 64, 8, 4), (64, 128, 4, 3), (128, 64, 4, 3)],
        128: [(128, 128, 8, 3), (64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2)],
        256: [(128, 64, 8, 2), (128, 32, 8, 3)],
    },
    "backward_keys": {
        64: [(64, 128, 8, 3), (64, 128, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (32, 128, 4, 3), (32, 64, 4, 3)],
        128: [(64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 3), (32, 64, 4, 2)],
        256: [(32, 64, 8, 2), (64, 64, 8, 1), (32, 128, 8, 2)],
    },
    "backward_queries": {
        64: [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 4, 3)],
        128: [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 2)],
        256: [(128, 64, 8, 1), (128, 32, 8, 2)],
    },
}
SHORT_CANDIDATES: dict[str, dict[int, list[Sizes]]] = {
    "forward": {
        64: [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 4, 2), (128, 128, 8, 2), (64, 128, 4, 2), (64, 32, 4, 3)],
        128: [
            (128, 128, 8, 3),
            (128, 128, 8, 2),
            (64, 64, 4, 2),
            (64, 64, 4, 3),
            (64, 128, 4, 2),
            (128, 64, 8, 2),
            (128, 64, 8, 3),
            (128, 64, 4, 2),
        ],
    }
}
PRODUCTS = {"forward": 1.0, "backward_keys": 2.0, "backward_queries": 1.5}
"""As many times a forward's."""
COMPILED_LENGTH = 256  # the binaries are the same for every length
LENGTH, SHORT_LENGTHS = 4096, (512, 1024, 2048)
Job = tuple[str, int, bool, Sizes]


def tune(save: Callable[[str, Any], None]) -> None:
    """Rank the tiles with and without causal, and adopt the best for what else runs in this process."""
    jobs = compiled_jobs(CANDIDATES)
    rows: list[tuple[str, int, bool, Found]] = []
    for row in ranked_kinds(jobs, LENGTH):
        rows.append(row)
        save("tune", rows)
    adopt(rows)


def tune_short(save: Callable[[str, Any], None]) -> None:
    """The forward's tiles where a program has few steps of keys: what is best for thousands of keys need not be. Adopts nothing."""
    jobs = compiled_jobs(SHORT_CANDIDATES)
    rows = []
    for length in SHORT_LENGTHS:
        for row in ranked_kinds(jobs, length):
            rows.append((length, *row))
            save("tune_short", rows)


def compiled_jobs(candidates: dict[str, dict[int, list[Sizes]]]) -> list[Job]:
    """Each tile of each kernel and head dim, with and without causal."""
    jobs = [(k, d, c, t) for k, dims in candidates.items() for d, tiles in dims.items() for c in (False, True) for t in tiles]
    in_parallel(compile_tile, jobs)
    return jobs


def ranked_kinds(jobs: list[Job], length: int) -> Iterator[tuple[str, int, bool, Found]]:
    """Told as they come."""
    for (kernel, dim, causal), group in itertools.groupby(jobs, key=lambda job: job[:3]):
        found = ranked(kernel, dim, causal, [job[3] for job in group], length)
        print(f"{kernel:17s} D={dim} S={length} causal={int(causal)}", "  ".join(f"{t}:{n:.0f}" for n, t in found), flush=True)
        yield kernel, dim, causal, found


def ranked(kernel: str, dim: int, causal: bool, tiles: list[Sizes], length: int) -> Found:
    """Those that can't run are told and left out."""
    found = []
    useful = PRODUCTS[kernel] * flops(TOKENS // length, WIDTH // dim, length, dim, causal)
    for tile in tiles:
        try:
            with held_to(kernel, tile):
                run = run_of(kernel, dim, causal, (TOKENS // length, WIDTH // dim, length), "cuda")
                found.append((useful / time_ms(run, rounds=3, budget_ms=15.0) / 1e9, tile))
        except Exception as failure:
            print(kernel, dim, tile, type(failure).__name__, str(failure)[:80])
    return sorted(found, reverse=True)


def compile_tile(kernel: str, dim: int, causal: bool, tile: Sizes) -> None:
    with held_to(kernel, tile):
        run_of(kernel, dim, causal, (1, 2, COMPILED_LENGTH), "cpu")()


@contextlib.contextmanager
def held_to(kernel: str, tile: Sizes) -> Iterator[None]:
    """This kernel launched with this tile, whatever the head dim."""
    from attnzoo.backends.triton import table

    forget_tiles()
    try:
        with mock.patch.dict(table.HOPPER, {kernel: {256: table.Tile(*tile)}}):
            yield
    finally:
        forget_tiles()


def forget_tiles() -> None:
    """After a change of the table."""
    from attnzoo.backends.triton import problem, table

    table.tile_for.cache_clear()
    problem.facts_of.cache_clear()


def run_of(kernel: str, dim: int, causal: bool, sizes: tuple[int, int, int], device: str) -> Callable[[], Any]:
    """A closure that runs one kernel alone; sizes: batch, heads, length. The tile is what the table says now."""
    from attnzoo.backends.triton import backward_keys, backward_queries, forward, problem

    batch, heads, length = sizes
    q, k, v, g = [torch.randn(batch, length, heads, dim, device=device).to(torch.bfloat16).transpose(1, 2) for _ in range(4)]
    spec = AttentionSpec.of(q, k, v, causal=causal)
    call = problem.Problem(spec, AttentionInputs.of(spec, q, k, v))
    return kernels_alone((forward, backward_keys, backward_queries), call, g)[kernel]


def kernels_alone(modules: tuple[Any, Any, Any], call: Any, g: Tensor) -> dict[str, Callable[[], Any]]:
    """Each kernel of a Problem by itself: those of the modules forward, backward_keys and backward_queries; row statistics are made up."""
    from attnzoo.backends.triton.delta import RowStatistics

    forward, backward_keys, backward_queries = modules
    inputs = call.inputs
    lse = torch.full(inputs.q.shape[:-1], 8.0, device=g.device)
    stats = RowStatistics(lse, torch.zeros_like(lse), None)
    o, dk, dv = [torch.empty_like(tensor) for tensor in (inputs.q, inputs.k, inputs.v)]
    return {
        "forward": lambda: forward.forward(call, o, lse),
        "backward_keys": lambda: backward_keys.backward_keys(call, g, stats, dk, dv),
        "backward_queries": lambda: backward_queries.backward_queries(call, g, stats, o),
    }


def adopt(rows: list[tuple[str, int, bool, Found]]) -> None:
    """Put the tiles that are best with and without causal together into the table, for what else runs in this process."""
    from attnzoo.backends.triton import table

    for (kernel, dim), group in itertools.groupby(rows, key=lambda row: row[:2]):
        best = best_of([{tile: rate for rate, tile in found} for _, _, _, found in group])
        if best is not None:
            table.HOPPER[kernel][dim] = table.Tile(*best)
        print(f"adopted {kernel} D={dim}: {best}", flush=True)
    forget_tiles()


def best_of(ways: list[dict[Sizes, float]]) -> Sizes | None:
    """The tile of the largest geometric mean of rates, of those that ran in every way; None if there is none."""
    common = [tile for tile in ways[0] if all([tile in way for way in ways])]
    return max(common, key=lambda tile: statistics.geometric_mean([way[tile] for way in ways]), default=None)
