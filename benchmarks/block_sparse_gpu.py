"""The kernels of `block_sparse` on a GPU: right first, then how fast.

    python benchmarks/block_sparse_gpu.py check      layouts and features against naive in fp32
    python benchmarks/block_sparse_gpu.py probe      what only a GPU can show
    python benchmarks/block_sparse_gpu.py quick      time against density, without a peer
    python benchmarks/block_sparse_gpu.py tune       each kernel under many tiles
    python benchmarks/block_sparse_gpu.py build      layouts made on the device: from_mask_mod, topk, presets
    python benchmarks/block_sparse_gpu.py compare    against torch.compile(flex_attention) over the same blocks

Several words run one after the other. Results go to `$OUT/block_sparse_gpu.json` too, if OUT is set.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import flash_gpu
import torch
from flash_gpu import TOLERANCE, attend, in_parallel, interleaved_ms, require, time_ms, values_and_grads, worst_error
from torch import Tensor

from attnzoo import layouts
from attnzoo.backends.block_sparse import BlockSparse
from attnzoo.backends.naive import Naive
from attnzoo.inputs import AttentionInputs
from attnzoo.layout import BlockLayout
from attnzoo.spec import AttentionSpec

RESULTS: dict[str, Any] = {}
HEADS = 16
SHORT = 8192  # lengths up to which the host would be part of an eager call's time
SECONDS = float(os.environ.get("SECONDS_AT_MOST", "1000"))
BEGAN = time.time()


# Correctness


def random_mask(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.4


def random_blocks(batch: int, heads: int, length: int, block: tuple[int, int], density: float = 0.4) -> BlockLayout:
    rows, columns = -(-length // block[0]), -(-length // block[1])
    table = torch.rand(batch, heads, rows, columns, generator=torch.Generator().manual_seed(5)) < density
    table[:, :, rows // 2] = False
    return BlockLayout.from_blocks(table, block=block, q_len=length, kv_len=length)


def sparse_rows(length: int) -> Tensor:
    """Rows without a key, also whole blocks of them."""
    rows = torch.arange(length)[:, None]
    return (rows % 7 == 0) & (rows // 128 % 2 == 0) & (torch.arange(length) > 200)


def feature_cases() -> dict[str, dict[str, Any]]:
    """Layout by a function of the length, and options as in `flash_gpu.feature_cases`."""
    ids = torch.tensor([[0] * 130 + [1] * 150 + [-7] * 53, [3] * 333], device=flash_gpu.DEVICE)
    sized = {
        f"random-{m}x{n}": {"layout": lambda S, m=m, n=n: random_blocks(1, 1, S, (m, n))}
        for m, n in ((16, 16), (32, 64), (64, 32), (64, 64), (128, 128), (256, 256), (64, 128), (48, 16), (20, 24), (256, 64))
    }
    return {
        **sized,
        "hopper-random-d128": {"layout": lambda S: random_blocks(1, 1, S, (128, 128)), "D": 128, "S": 1000},
        "hopper-random-d64": {"layout": lambda S: random_blocks(1, 4, S, (128, 128)), "D": 64, "S": 1100},
        "hopper-random-d96": {"layout": lambda S: random_blocks(2, 4, S, (128, 64)), "D": 96, "S": 900},
        "hopper-256": {"layout": lambda S: random_blocks(1, 1, S, (256, 256)), "D": 64, "S": 1500},
        "hopper-causal": {"layout": lambda S: layouts.causal(S, block=128), "D": 64, "S": 1000},
        "hopper-window": {"layout": lambda S: layouts.sliding_window(S, window=(300, 100), block=128), "D": 128, "S": 1024},
        "hopper-documents": {"layout": lambda S: layouts.documents([90, 430, S - 520], block=128), "D": 64, "S": 1000},
        "hopper-documents-causal": {"layout": lambda S: layouts.documents([90, 430, S - 520], causal=True, block=128), "D": 128, "S": 1024},
        "hopper-bits": {"layout": lambda S: BlockLayout.from_dense(random_mask(1, 4, S, S), block=128), "D": 64, "S": 900},
        "hopper-bits-d128": {"layout": lambda S: BlockLayout.from_dense(random_mask(S, S), block=(128, 64)), "D": 128, "S": 900, "Hkv": 1},
        "large-and-causal": {"layout": lambda S: random_blocks(1, 4, S, (128, 128)), "D": 128, "S": 1000, "causal": True},
        "large-and-right": {"layout": lambda S: random_blocks(1, 1, S, (256, 64)), "D": 64, "S": 1000, "window": (None, 77)},
        "large-bits-and-causal": {
            "layout": lambda S: BlockLayout.from_dense(random_mask(S, S), block=128) | random_blocks(1, 1, S, (128, 128)),
            "D": 64,
            "S": 900,
            "causal": True,
        },
        "hopper-few-pairs": {"layout": lambda S: BlockLayout.from_dense(random_mask(S, S) & sparse_rows(S), block=128), "D": 128, "S": 640},
        "per-head": {"layout": lambda S: random_blocks(1, 4, S, (64, 64))},
        "per-batch": {"layout": lambda S: random_blocks(2, 1, S, (64, 64)), "Hkv": 1},
        "per-batch-and-head": {"layout": lambda S: random_blocks(2, 4, S, (64, 64)), "D": 128},
        "causal-d64": {"layout": lambda S: layouts.causal(S, block=64), "D": 64},
        "causal-d128": {"layout": lambda S: layouts.causal(S, block=128), "D": 128, "S": 700},
        "causal-d256": {"layout": lambda S: layouts.causal(S, block=128), "D": 256, "S": 500},
        "window": {"layout": lambda S: layouts.sliding_window(S, window=(100, 30), block=32), "D": 64},
        "documents": {"layout": lambda S: layouts.documents([90, 130, S - 220], causal=True, block=64), "D": 128},
        "butterfly": {"layout": lambda S: layouts.butterfly(S, block=32)},
        "bigbird": {"layout": lambda S: layouts.bigbird(S, block=16), "D": 64},
        "bits-64": {"layout": lambda S: BlockLayout.from_dense(random_mask(S, S), block=64)},
        "bits-128": {"layout": lambda S: BlockLayout.from_dense(random_mask(S, S), block=128), "D": 128},
        "bits-16-per-head": {"layout": lambda S: BlockLayout.from_dense(random_mask(1, 4, S, S), block=(16, 16))},
        "bits-20x24-dropout": {
            "layout": lambda S: BlockLayout.from_dense(random_mask(S, S), block=(20, 24)),
            "dropout_p": 0.3,
            "dropout_seed": 4,
        },
        "and-causal": {"layout": lambda S: random_blocks(1, 1, S, (64, 64)), "causal": True, "D": 128},
        "and-window": {"layout": lambda S: random_blocks(1, 1, S, (32, 32)), "window": (70, 17)},
        "and-mask": {"layout": lambda S: random_blocks(1, 1, S, (64, 64)), "mask": (2, 4, 333, 333)},
        "and-bias": {"layout": lambda S: random_blocks(1, 4, S, (64, 64)), "bias": (1, 4, 333, 333), "D": 64},
        "and-bias-keys": {"layout": lambda S: random_blocks(1, 1, S, (64, 64)), "bias": (2, 1, 1, 333)},
        "and-bias-rows": {"layout": lambda S: random_blocks(1, 1, S, (64, 64)), "bias": (1, 4, 333, 1)},
        "and-segments": {"layout": lambda S: random_blocks(1, 1, S, (64, 64)), "segment_ids": ids},
        "and-softcap": {"layout": lambda S: random_blocks(1, 1, S, (64, 64)), "softcap": 2.0},
        "and-sinks": {"layout": lambda S: random_blocks(1, 1, S, (64, 64)), "sinks": True},
        "and-dropout": {"layout": lambda S: random_blocks(1, 1, S, (64, 64)), "dropout_p": 0.3, "dropout_seed": 77, "D": 64},
        "and-value-dim": {"layout": lambda S: random_blocks(1, 1, S, (64, 64)), "D": 96, "Dv": 160},
        "one-kv-head": {"layout": lambda S: random_blocks(1, 4, S, (64, 64)), "Hkv": 1, "causal": True, "D": 128},
    }


def check_feature(name: str, dtype: torch.dtype) -> float:
    options = dict(feature_cases()[name])
    S, D, Hkv = options.pop("S", 333), options.pop("D", 32), options.pop("Hkv", 2)
    Dv = options.pop("Dv", D)
    device = flash_gpu.DEVICE
    generator = torch.Generator(device).manual_seed(len(name))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    tensors = {"q": randn(2, 4, S, D).to(dtype), "k": randn(2, Hkv, S, D).to(dtype), "v": randn(2, Hkv, S, Dv).to(dtype)}
    options["layout"] = options["layout"](S).to(device)
    if "mask" in options:
        tensors["mask"] = randn(*options.pop("mask")) < 0.3
    if "bias" in options:
        tensors["bias"] = randn(*options.pop("bias"))
    if options.pop("sinks", False):
        tensors["sinks"] = randn(4)
    upstream = randn(2, 4, S, Dv).to(dtype), randn(2, 4, S)
    exact = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
    truth = values_and_grads(Naive(), exact, options, upstream)
    ways = ("fastest",) if name.startswith("hopper") else ("portable", "fastest")
    return max(worst_error(values_and_grads(BlockSparse(kernels=way), tensors, options, upstream), truth) for way in ways)


def check_job(name: str, dtype: torch.dtype) -> str:
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        error = check_feature(name, dtype)
    except Exception as failure:
        return f"{name} {dtype}: {type(failure).__name__} {str(failure)[:300]}"
    return "" if error <= TOLERANCE[dtype] else f"{name} {dtype}: {error:.2e}"


def check() -> None:
    """Each case in one of several processes, since nearly all of its time is compiling."""
    jobs = [(name, torch.bfloat16) for name in feature_cases()]
    jobs += [(name, torch.float32) for name in feature_cases() if not name.startswith("hopper")]
    jobs += [(name, torch.float16) for name in ("random-64x64", "bits-128", "hopper-causal", "hopper-bits")]
    jobs.sort(key=lambda job: not job[0].startswith("hopper"))
    jobs = [job for job in jobs if fnmatch(job[0], os.environ.get("CASES", "*"))]
    workers = int(os.environ.get("WORKERS", min(12, os.cpu_count() or 1)))
    bad = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(check_job, *job): job for job in jobs}
        for done in as_completed(running):
            name, dtype = running[done]
            print(done.result() or f"ok {name} {dtype}", flush=True)
            bad += [done.result()] if done.result() else []
    print(f"{len(jobs)} cases, {len(bad)} bad", flush=True)
    RESULTS["check"] = bad


def probe() -> None:
    """What only a GPU can show."""
    bad = []
    probes: tuple[Callable[[], None], ...] = (no_waiting, graph_replay, side_stream, bitwise, skipped_nan, long_rows)
    for each in probes:
        try:
            each()
        except Exception as failure:
            bad.append(f"{each.__name__}: {type(failure).__name__} {str(failure)[:300]}")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    print(f"probes: {len(probes)}, {len(bad)} bad", *bad, sep="\n  ", flush=True)
    RESULTS["probe"] = bad


def qkv(length: int, dim: int, heads: int = HEADS, batch: int = 1) -> dict[str, Tensor]:
    def made() -> Tensor:
        return torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    return {"q": made(), "k": made(), "v": made()}


def grads_of(tensors: dict[str, Tensor], options: dict[str, Any], g: Tensor) -> list[Tensor]:
    o, _ = attend(BlockSparse(), tensors, options)
    return [o, *torch.autograd.grad(o, list(tensors.values()), g)]


def no_waiting() -> None:
    """A layout chosen on the device, its schedule and both passes: nothing waits for the device."""
    tensors, scores = qkv(2048, 64, 4), torch.randn(1, 4, 16, 16, device="cuda")
    g = torch.randn_like(tensors["q"])
    grads_of(tensors, {"layout": layouts.topk(scores, 5, q_len=2048, kv_len=2048), "causal": True}, g)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grads_of(tensors, {"layout": layouts.topk(scores, 5, q_len=2048, kv_len=2048), "causal": True}, g)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def graph_replay() -> None:
    """Captured with a layout that no call has seen, then used eagerly, then replayed on fresh data."""
    tensors = {n: t.detach() for n, t in qkv(1000, 64, 4).items()}
    layout = layouts.random(1000, density=0.4, block=64, device="cuda")
    attend(BlockSparse(), tensors, {"layout": layouts.random(1000, density=0.5, block=64, device="cuda")})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = attend(BlockSparse(), tensors, {"layout": layout})
    for _ in range(20):
        for tensor in tensors.values():
            tensor.normal_()
        eager = attend(BlockSparse(), tensors, {"layout": layout})[0]
        graph.replay()
        if not torch.equal(o, eager):
            raise AssertionError("a graph replay differs from eager")


def side_stream() -> None:
    tensors = {n: t.detach() for n, t in qkv(3000, 64, 4).items()}
    layout = layouts.random(3000, density=0.4, block=64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        o, _ = attend(BlockSparse(), tensors, {"layout": layout})
    other, _ = attend(BlockSparse(), tensors, {"layout": layout})  # its schedule is still being made on the side stream
    torch.cuda.synchronize()
    if not torch.equal(o, other):
        raise AssertionError("differs on a side stream")


def bitwise() -> None:
    tensors, g = qkv(1500, 64, 4), torch.randn(1, 4, 1500, 64, device="cuda", dtype=torch.bfloat16)
    layout = random_blocks(1, 4, 1500, (64, 64)).to("cuda")
    first = grads_of(tensors, {"layout": layout}, g)
    for _ in range(100):
        if not all(map(torch.equal, first, grads_of(tensors, {"layout": layout}, g))):
            raise AssertionError("two equal calls differ")


def skipped_nan() -> None:
    """NaN in keys, values and queries that no block reaches."""
    tensors, g = qkv(1024, 64, 2), torch.randn(1, 2, 1024, 64, device="cuda", dtype=torch.bfloat16)
    table = torch.zeros(8, 8, dtype=torch.bool)
    table[:4, :3] = True
    layout = BlockLayout.from_blocks(table, block=128).to("cuda")
    poisoned = {n: t.detach().clone() for n, t in tensors.items()}
    poisoned["k"][:, :, 384:] = torch.nan
    poisoned["v"][:, :, 384:] = torch.nan
    found = grads_of({n: t.requires_grad_() for n, t in poisoned.items()}, {"layout": layout}, g)
    for name, one, other in zip(("o", "dq", "dk", "dv"), found, grads_of(tensors, {"layout": layout}, g)):
        if not torch.equal(one, other):
            raise AssertionError(f"{name} reads blocks that are skipped")


def long_rows() -> None:
    """S = 1,048,576 under a window: the memory and the time are those of the window."""
    tensors = qkv(2**20, 64, 1)
    layout = layouts.sliding_window(2**20, window=1024, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = grads_of(tensors, {"layout": layout}, torch.randn_like(tensors["q"]))
    extra = torch.cuda.max_memory_allocated() - before
    spec = {"window": (1024, 0)}
    o, _ = attend(BlockSparse(), tensors, spec)
    require(worst_error([found[0]], [o]), 3e-2, "the layout of a window against the window")
    print(f"long rows: {extra / 2**20:.0f} MiB beyond the inputs of {3 * 2**20 * 128 / 2**20:.0f} MiB")


# Speed


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


def run_of(kernel: str, dim: int, tile: tuple[int, ...], length: int = 8192) -> Callable[[], Any]:
    """A closure that runs one kernel under one tile over random blocks."""
    from attnzoo.backends.block_sparse_triton import backward_keys, backward_queries, forward
    from attnzoo.backends.block_sparse_triton.launch import SMALLER, SparseProblem
    from attnzoo.backends.block_sparse_triton.schedule import Schedule
    from attnzoo.backends.triton import problem, table
    from attnzoo.backends.triton.delta import RowStatistics

    SMALLER.clear()
    table.HOPPER[kernel] = {256: table.Tile(*tile)}
    table.tile_for.cache_clear()
    problem.facts_of.cache_clear()
    device = flash_gpu.DEVICE
    length, heads = (length, HEADS) if device == "cuda" else (512, 2)
    q, k, v, g = [torch.randn(1, length, heads, dim, device=device).to(torch.bfloat16).transpose(1, 2) for _ in range(4)]
    layout = layouts.random(length, density=0.25, block=128, device=device)
    spec = AttentionSpec.of(q, k, v, layout=layout)
    call = SparseProblem(problem.Problem(spec, AttentionInputs.of(spec, q, k, v, layout=layout)), Schedule.of(layout))
    lse = torch.full((1, heads, length), 8.0, device=device)
    stats = RowStatistics(lse, torch.zeros_like(lse), None)
    o, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    return {
        "forward": lambda: forward.forward(call, o, lse),
        "backward_keys": lambda: backward_keys.backward_keys(call, g, stats, dk, dv),
        "backward_queries": lambda: backward_queries.backward_queries(call, g, stats, o),
    }[kernel]


def compile_tile(kernel: str, dim: int, tile: tuple[int, ...]) -> str:
    try:
        run_of(kernel, dim, tile)()
    except Exception as failure:
        return f"compiling {kernel} {dim} {tile}: {type(failure).__name__} {str(failure)[:300]}"
    return ""


def tune() -> None:
    """Rank the tiles, and put the best into the table for what else runs here."""
    from attnzoo.backends.triton import problem, table

    before = {kernel: dict(table.HOPPER[kernel]) for kernel in CANDIDATES}
    jobs = [(kernel, dim, tile) for kernel, dims in CANDIDATES.items() for dim, tiles in dims.items() for tile in tiles]
    in_parallel(compile_tile, jobs)
    RESULTS["tune"] = {}
    best: dict[str, dict[int, Any]] = {kernel: {} for kernel in CANDIDATES}
    for (kernel, dim), group in itertools.groupby(jobs, key=lambda job: job[:2]):
        found = []
        for _, _, tile in group:
            try:
                found.append((time_ms(run_of(kernel, dim, tile), rounds=3, budget_ms=10.0), tile))
            except Exception as failure:
                print(kernel, dim, tile, type(failure).__name__, str(failure)[:80])
        found.sort()
        RESULTS["tune"][f"{kernel} {dim}"] = found
        best[kernel][dim] = table.Tile(*found[0][1])
        print(f"{kernel:17s} D={dim}", "  ".join(f"{tile}: {1000 * ms:.0f} us" for ms, tile in found), flush=True)
    for kernel, tiles in best.items():
        table.HOPPER[kernel] = {**before[kernel], **tiles}
    table.tile_for.cache_clear()
    problem.facts_of.cache_clear()


def build() -> None:
    """Times of making layouts on the device, and of the schedule that their first call makes."""
    from attnzoo.backends.block_sparse_triton.schedule import Schedule

    length = 131072
    ids = torch.arange(length, device="cuda") // 5000
    scores = torch.randn(1, HEADS, 256, 256, device="cuda")
    makers: dict[str, Callable[[], BlockLayout]] = {
        "from_mask_mod, documents, S=131072": lambda: layouts.from_mask_mod(
            lambda b, h, i, j: ids[i] == ids[j], length, length, device="cuda"
        ),
        "documents, S=131072": lambda: layouts.documents(ids, device="cuda"),
        "topk, 16 heads, 32 of 256 blocks, S=32768": lambda: layouts.topk(scores, 32, q_len=32768, kv_len=32768),
        "causal, S=131072": lambda: layouts.causal(length, device="cuda"),
        "sliding_window 1024, S=1048576": lambda: layouts.sliding_window(2**20, window=1024, device="cuda"),
    }
    for name, make in makers.items():
        times, schedules = [], []
        for _ in range(6):
            torch.cuda.synchronize()
            began = time.perf_counter()
            layout = make()
            torch.cuda.synchronize()
            middle = time.perf_counter()
            Schedule.of(layout)
            torch.cuda.synchronize()
            times.append(1000 * (middle - began))
            schedules.append(1000 * (time.perf_counter() - middle))
        RESULTS[f"build {name}"] = {"ms": min(times), "schedule ms": min(schedules)}
        print(f"build {name}: {min(times):.2f} ms, schedule {min(schedules):.2f} ms", flush=True)


def compared_layouts(length: int) -> dict[str, tuple[BlockLayout, Any]]:
    """Name -> layout on the device, and the mask function of its partial blocks, None where all blocks are full."""
    ids = torch.arange(length, device="cuda") // (length // 12 + 37)
    window = length // 16
    return {
        **{f"random 1/{n}": (layouts.random(length, density=1 / n, device="cuda"), None) for n in (1, 2, 4, 8, 16, 32)},
        "butterfly": (layouts.butterfly(length, device="cuda"), None),
        "bigbird": (layouts.bigbird(length, device="cuda"), None),
        "sliding_window": (layouts.sliding_window(length, window=window, device="cuda"), lambda b, h, i, j: (i >= j) & (i - j <= window)),
        "documents": (layouts.documents(ids, device="cuda"), lambda b, h, i, j: ids[i] == ids[j]),
    }


def quick() -> None:
    """Hopper and portable kernels over random blocks, beside the dense forward and backward of cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    ways = {"hopper": BlockSparse(), "portable": BlockSparse(kernels="portable")}
    rows = RESULTS["quick"] = []
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


def block_mask_of(layout: BlockLayout, mask_mod: Any) -> Any:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    from attnzoo.layouts.convert import padded_lists

    if mask_mod is not None:
        return create_block_mask(mask_mod, None, None, layout.q_len, layout.kv_len, device="cuda")
    lists = padded_lists(layout)
    counts = (lists.partial_counts, lists.partial_indices, lists.full_counts, lists.full_indices)
    return BlockMask.from_kv_blocks(*counts, BLOCK_SIZE=(128, 128), seq_lengths=(layout.q_len, layout.kv_len))


GRAPH_CALLS = 10


def on_card(call: Callable[[], Any]) -> Callable[[], Any]:
    """GRAPH_CALLS calls as one graph, which leaves the host out of their time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    return graph.replay


def times_of(calls: dict[str, Callable[[], Tensor]], tensors: dict[str, Tensor], g: Tensor) -> dict[str, tuple[float, float]]:
    """Milliseconds forward and backward of each call, in alternating rounds. Short ones as graphs of forward, and of both, whose
    difference is the backward."""
    leaves = list(tensors.values())
    outputs = {name: call() for name, call in calls.items()}
    if g.shape[2] > SHORT:
        backwards = {
            name: lambda o=o: torch.autograd.grad(o, leaves, g, retain_graph=True)  # type: ignore[misc]
            for name, o in outputs.items()
        }
        with torch.no_grad():
            forward_ms = interleaved_ms(calls, rounds=3)
        backward_ms = interleaved_ms(backwards, rounds=3)
        return {name: (forward_ms[name], backward_ms[name]) for name in calls}
    del outputs
    with torch.no_grad():
        forward_ms = interleaved_ms({name: on_card(call) for name, call in calls.items()}, rounds=3)
    both = {name: on_card(lambda call=call: torch.autograd.grad(call(), leaves, g)) for name, call in calls.items()}  # type: ignore[misc]
    both_ms = interleaved_ms(both, rounds=3)
    return {name: (forward_ms[name] / GRAPH_CALLS, (both_ms[name] - forward_ms[name]) / GRAPH_CALLS) for name in calls}


def compare(lengths: tuple[int, ...] = (32768, 8192), dims: tuple[int, ...] = (128, 64)) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import flex_attention
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch._dynamo.config.recompile_limit = 1000  # beyond it flex falls back to its unfused path, and is no peer
    sparse, portable, flex = BlockSparse(), BlockSparse(kernels="portable"), torch.compile(flex_attention, dynamic=False)
    rows = RESULTS["compare"] = []
    for dim, length in itertools.product(dims, lengths):
        tensors = qkv(length, dim)
        q, k, v = tensors.values()
        g = torch.randn_like(q)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]), torch.no_grad():
            dense = time_ms(lambda: sdpa(q, k, v), rounds=3, budget_ms=15.0)  # noqa: B023
        for name, (layout, mask_mod) in compared_layouts(length).items():
            if time.time() - BEGAN > SECONDS:
                print("out of time", flush=True)
                return
            blocks = block_mask_of(layout, None if (dim, length) != (dims[0], lengths[0]) else mask_mod)
            calls: dict[str, Callable[[], Tensor]] = {
                "block_sparse": lambda: attend(sparse, tensors, {"layout": layout})[0],  # noqa: B023
                "flex": lambda: flex(q, k, v, block_mask=blocks),  # noqa: B023
            }
            if mask_mod is not None and (dim, length) != (dims[0], lengths[0]):  # each mask function costs flex two compilations
                calls["portable"] = lambda: attend(portable, tensors, {"layout": layout})[0]  # noqa: B023
                del calls["flex"]
            row: dict[str, Any] = {"dim": dim, "length": length, "layout": name, "density": layout.density, "dense": dense}
            try:
                found = [[o := call(), *torch.autograd.grad(o, [q, k, v], g)] for call in calls.values()]
                row["difference"] = worst_error(*found)
                del found, o
                require(row["difference"], 3e-2, "block_sparse against its peer")
                row |= times_of(calls, tensors, g)
            except Exception as failure:
                print(f"D={dim} S={length} {name}: {type(failure).__name__} {str(failure)[:200]}", flush=True)
                continue
            rows.append(row)
            useful = 4e-9 * HEADS * length * length * dim * layout.density
            forward, backward = row["block_sparse"]
            peer = next(name for name in calls if name != "block_sparse")
            cells = (
                f"D={dim:3d} S={length:5d} {name:14s} density {layout.density:.4f}",
                f"forward {forward:.3f} ms {useful / forward:.0f} TFLOP/s, {peer}/ours {row[peer][0] / forward:.2f}",
                f"over density x dense {forward / layout.density / dense:.2f}",
                f"backward {backward:.3f} ms {2.5 * useful / backward:.0f} TFLOP/s, {peer}/ours {row[peer][1] / backward:.2f}",
                f"difference {row['difference']:.1e}",
            )
            print(*cells, sep="  ", flush=True)
    for way, place in (("forward", 0), ("backward", 1)):
        ratios = [row["flex"][place] / row["block_sparse"][place] for row in rows if "flex" in row]
        summary = f"{statistics.geometric_mean(ratios):.3f}, worst {min(ratios):.3f}"
        RESULTS[f"flex/block_sparse {way}"] = summary
        print(f"flex/block_sparse {way}: geometric mean {summary}", flush=True)


def main(words: list[str]) -> None:
    import triton

    RESULTS["machine"] = [torch.cuda.get_device_name(), torch.__version__, triton.__version__]
    print(*RESULTS["machine"], flush=True)
    actions = {"check": check, "probe": probe, "quick": quick, "tune": tune, "build": build, "compare": compare}
    for word in words:
        began = time.time()
        try:
            actions[word]()
        finally:
            print(f"[{word}: {time.time() - began:.0f} s]", flush=True)
            if "OUT" in os.environ:
                Path(os.environ["OUT"], "block_sparse_gpu.json").write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
