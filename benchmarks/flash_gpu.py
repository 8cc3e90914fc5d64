"""The portable Triton kernels of `flash` on a GPU: right first, then how fast. The Hopper kernels are off, unless said.

    python benchmarks/flash_gpu.py check          every feature against naive in fp32, and what only a GPU can show
    python benchmarks/flash_gpu.py tune           each kernel under many tiles, for the tables in triton/table.py
    python benchmarks/flash_gpu.py compare        against SDPA (FA2, cuDNN) and torch.compile(flex_attention)
    python benchmarks/flash_gpu.py decode         few queries over long caches
    python benchmarks/flash_gpu.py host           the host's share of a call, Hopper kernels included
    python benchmarks/flash_gpu.py route          against the Hopper kernels on small calls: where flash changes over
    python benchmarks/flash_gpu.py probes         what only a GPU can show, alone
    python benchmarks/flash_gpu.py compile        the portable kernels of every kind of call, on all cores, into Triton's cache
    python benchmarks/flash_gpu.py variants       every kind of call once, Hopper kernels included, for compute-sanitizer
    python benchmarks/flash_gpu.py repeats        5,000 deterministic backward passes with the memory nearly full

Several words run one after the other. Results go to `$OUT/flash_gpu.json` too, if OUT is set.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.flash import Flash
from attnzoo.backends.naive import Naive
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

RESULTS: dict[str, Any] = {}
DEVICE = "cuda"
TOKENS, WIDTH = 16384, 2048
EXTRAS = ("mask", "bias", "sinks", "segment_ids", "dropout_seed", "layout")
PROBES = (
    "far_elements",
    "many_heads",
    "odd_strides",
    "graph_replay",
    "graph_replay_of_gradients",
    "side_stream",
    "bitwise",
    "million",
    "shifts",
)
PORTABLE = Flash(kernels="portable")
TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


# Correctness


def attend(backend: Any, tensors: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    spec = AttentionSpec.of(**tensors, **options)
    extras = {name: value for name, value in {**tensors, **options}.items() if name in EXTRAS}
    reasons = backend.unsupported_reasons(spec)
    if reasons:
        raise RuntimeError(f"refused: {reasons}")
    o, lse = backend.attend(spec, AttentionInputs.of(spec, tensors["q"], tensors["k"], tensors["v"], **extras))
    return o, lse


def values_and_grads(backend: Any, tensors: dict[str, Tensor], options: dict[str, Any], upstream: tuple[Tensor, Tensor]) -> list[Tensor]:
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    o, lse = attend(backend, leaves, {**options, "return_lse": True})
    wanted = [t for t in leaves.values() if t.requires_grad]
    return [o, lse, *torch.autograd.grad([o, lse], wanted, [upstream[0].to(o.dtype), upstream[1]])]


def worst_error(found: list[Tensor], truth: list[Tensor]) -> float:
    worst = 0.0
    for one, other in zip(found, truth):
        one, other = one.float(), other.float()
        if not torch.equal(one.isneginf(), other.isneginf()):
            return float("inf")
        one, other = one.nan_to_num(neginf=0.0, nan=float("inf")), other.nan_to_num(neginf=0.0)
        if one.numel():
            worst = max(worst, ((one - other).abs().max() / other.abs().max().clamp(min=1e-2)).item())
    return worst


def feature_cases() -> dict[str, dict[str, Any]]:
    ids = torch.tensor([[0] * 130 + [1] * 150 + [-7] * 53, [3] * 333], device=DEVICE)
    return {
        "plain": {},
        "causal": {"causal": True},
        "d64": {"D": 64, "causal": True},
        "d128": {"D": 128, "causal": True, "S": 700},
        "d256": {"D": 256, "causal": True},
        "d96-dv160": {"D": 96, "Dv": 160},
        "d5-dv1": {"D": 5, "Dv": 1},
        "short": {"Sq": 3, "S": 1000},
        "short-causal": {"Sq": 5, "S": 3000, "causal": True, "align": "bottom_right", "D": 128},
        "one-query": {"Sq": 1, "S": 4097, "D": 64},
        "top-left": {"Sq": 400, "S": 200, "causal": True, "align": "top_left"},
        "bottom-right": {"Sq": 400, "S": 200, "causal": True, "align": "bottom_right"},
        "window": {"window": (70, 17)},
        "causal-window": {"window": (90, None), "causal": True, "D": 128},
        "mask": {"mask": (2, 4, 333, 333)},
        "mask-keys": {"mask": (2, 1, 1, 333)},
        "bias": {"bias": (2, 4, 333, 333)},
        "bias-heads": {"bias": (1, 4, 333, 333), "causal": True, "D": 128},
        "bias-keys": {"bias": (2, 1, 1, 333)},
        "bias-rows": {"bias": (1, 4, 333, 1)},
        "sinks": {"sinks": True, "causal": True},
        "softcap": {"softcap": 2.0, "bias": (1, 1, 333, 333)},
        "negative-scale": {"scale": -0.3},
        "zero-scale": {"scale": 0.0},
        "dropout": {"dropout_p": 0.3, "dropout_seed": 77, "D": 64},
        "dropout-short": {"dropout_p": 0.3, "dropout_seed": 2**63 + 5, "Sq": 7, "S": 900},
        "segments": {"segment_ids": ids},
        "segments-causal": {"segment_ids": ids, "causal": True, "D": 128},
        "one-kv-head": {"Hkv": 1, "D": 128, "causal": True},
    }


def problem_of(
    name: str, dtype: torch.dtype, *, Sq: int | None = None, S: int = 333, D: int = 32, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Any], tuple[Tensor, Tensor]]:
    """Tensors, other options, and the gradients of o and lse, of a call described as in `feature_cases`."""
    generator = torch.Generator(DEVICE).manual_seed(len(name))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator)

    Sq, Hkv, Dv = Sq or S, options.pop("Hkv", 2), options.pop("Dv", D)
    tensors = {"q": randn(2, 4, Sq, D).to(dtype), "k": randn(2, Hkv, S, D).to(dtype), "v": randn(2, Hkv, S, Dv).to(dtype)}
    if "mask" in options:
        tensors["mask"] = randn(*options.pop("mask")) < 0.3
    if "bias" in options:
        tensors["bias"] = randn(*options.pop("bias"))
    if options.pop("sinks", False):
        tensors["sinks"] = randn(4)
    return tensors, options, (randn(2, 4, Sq, Dv).to(dtype), randn(2, 4, Sq))


def check_feature(name: str, dtype: torch.dtype, **sizes: Any) -> tuple[str, float]:
    tensors, options, upstream = problem_of(name, dtype, **sizes)
    found = values_and_grads(PORTABLE, tensors, options, upstream)
    if DEVICE == "cpu":  # only compiled
        return name, 0.0
    exact = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
    return name, worst_error(found, values_and_grads(Naive(), exact, options, upstream))


def only_compile(capability: tuple[int, int], processors: int) -> None:
    """Make this process fill Triton's cache on disk where it would launch; it never touches the GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    from attnzoo.backends.triton import launch, launchers, problem

    def compile_source(self: Any, plan: Any, arguments: Any, aligned: Any, types: Any) -> None:
        target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        triton.compile(self.source(arguments, plan.constants, aligned), target=target, options=plan.tile.options)

    launch.Kernel.launch = compile_source  # type: ignore[method-assign]
    problem.capability_of = lambda device: capability
    launchers.processors_of = lambda device: processors
    Flash.unsupported_reasons = lambda self, spec: []  # type: ignore[method-assign]
    global DEVICE
    DEVICE = "cpu"
    torch.set_num_threads(1)


def compile_feature(name: str, dtype: torch.dtype) -> str:
    try:
        check_feature(name, dtype, **feature_cases()[name])
    except Exception as failure:
        return f"compiling {name} {dtype}: {type(failure).__name__} {str(failure)[:300]}"
    return ""


def compile_tile(kernel: str, dim: int, causal: bool, tile: tuple[int, ...]) -> str:
    try:
        runs_of(kernel, dim, causal, tile, "cpu", 256)()
    except Exception as failure:
        return f"compiling {kernel} {dim} {tile}: {type(failure).__name__} {str(failure)[:300]}"
    return ""


def in_parallel(compile_one: Callable[..., str], jobs: list[tuple[Any, ...]]) -> None:
    """Compile on all cores before the GPU is asked for anything."""
    began = time.time()
    facts = torch.cuda.get_device_capability(), torch.cuda.get_device_properties().multi_processor_count
    workers = min(16, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=only_compile, initargs=facts) as pool:
        failures = [failure for failure in pool.map(compile_one, *zip(*jobs)) if failure]
    print(f"compiled {len(jobs)} jobs in {time.time() - began:.0f} s", *failures, sep="\n  ", flush=True)


def compile_features(dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCE)) -> None:
    in_parallel(compile_feature, [(name, dtype) for name, dtype in itertools.product(feature_cases(), dtypes)])


def check(dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCE), names: tuple[str, ...] = PROBES) -> None:
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    compile_features(dtypes)
    bad = []
    for dtype, (name, options) in itertools.product(dtypes, feature_cases().items()):
        try:
            _, error = check_feature(name, dtype, **dict(options))
        except Exception as failure:
            bad.append(f"{name} {dtype}: {type(failure).__name__} {str(failure)[:300]}")
            continue
        if not error <= TOLERANCE[dtype]:
            bad.append(f"{name} {dtype}: {error:.2e}")
    for name in names:
        try:
            globals()[name]()
        except Exception as failure:
            bad.append(f"{name}: {type(failure).__name__} {str(failure)[:300]}")
        torch.cuda.empty_cache()
    print(f"check: {len(dtypes) * len(feature_cases()) + len(names)} cases, {len(bad)} bad", *bad, sep="\n  ", flush=True)
    RESULTS["check"] = bad


def recheck() -> None:
    check((torch.bfloat16,), ("far_elements", "shifts", "bitwise"))


def probes() -> None:
    check(())


def variants() -> None:
    """Forward and backward of every kind of call in both half precisions and fp32; results are looked at for NaN alone."""
    calls = list(itertools.product(feature_cases().items(), TOLERANCE))
    calls += [((f"hopper-{name}", options), torch.bfloat16) for name, options in HOPPER_CALLS.items()]
    for (name, options), dtype in calls:
        backend = Flash(kernels="hopper") if name.startswith("hopper") else PORTABLE
        tensors, others, upstream = problem_of(name, dtype, **dict(options))
        for value in values_and_grads(backend, tensors, others, upstream):
            if value.isnan().any():
                raise AssertionError(f"{name} {dtype}: nan")
        print(f"ran {name} {dtype}", flush=True)
    print(f"{len(calls)} variants", flush=True)


HOPPER_CALLS: dict[str, dict[str, Any]] = {
    "d64": {"D": 64, "S": 1200},
    "d64-causal": {"D": 64, "S": 1200, "causal": True},
    "d128": {"D": 128, "S": 700},
    "d128-causal": {"D": 128, "S": 700, "causal": True, "Hkv": 1},
    "d96-window": {"D": 96, "S": 700, "window": (100, 50)},
    "d128-bottom-right": {"D": 128, "Sq": 300, "S": 700, "causal": True, "align": "bottom_right"},
    "d256": {"D": 256, "S": 500, "causal": True},
}


def require(error: float, allowed: float, what: str) -> None:
    if not error <= allowed:
        raise AssertionError(f"{what}: error {error:.2e}, allowed {allowed:.0e}")


def qkv(batch: int, heads: int, length: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return {n: torch.randn(batch, length, heads, dim, device="cuda", dtype=dtype).transpose(1, 2) for n in ("q", "k", "v")}


def both(tensors: dict[str, Tensor], **options: Any) -> float:
    o = tensors["q"].shape[:3]
    upstream = torch.randn(*o, tensors["v"].shape[3], device="cuda"), torch.zeros(o, device="cuda")
    exact = {name: t.float() for name, t in tensors.items()}
    return worst_error(values_and_grads(PORTABLE, tensors, options, upstream), values_and_grads(Naive(), exact, options, upstream))


def far_elements() -> None:
    """Rows 2^25 elements apart: within one tile, offsets go beyond 2^31."""
    storage = torch.zeros(2**25 * 100, device="cuda", dtype=torch.bfloat16)
    far = storage.as_strided((1, 1, 100, 64), (2**25, 64, 2**25, 1))
    far.copy_(torch.randn(1, 1, 100, 64))
    other = torch.randn(1, 1, 100, 64, device="cuda", dtype=torch.bfloat16)
    require(both({"q": far, "k": far, "v": far}), 3e-2, "far rows")
    require(both({"q": other, "k": far, "v": other}, causal=True), 3e-2, "far keys")


def many_heads() -> None:
    tensors = {n: torch.randn(70000, 1, 4, 16, device="cuda", dtype=torch.float16) for n in "qkv"}
    require(both(tensors, causal=True), 4e-3, "70000 batches")
    tensors = {n: torch.randn(1, 70000, 100, 16, device="cuda", dtype=torch.float16) for n in "qkv"}
    require(both(tensors), 4e-3, "70000 heads")


def odd_strides() -> None:
    packed = torch.randn(2, 130, 3, 4, 72, device="cuda", dtype=torch.float16)
    q, k, v = [packed[:, :, n, :, 3:67].transpose(1, 2) for n in range(3)]
    require(both({"q": q, "k": k, "v": v}), 4e-3, "packed slices")
    require(both({"q": q, "k": k[:, :1].expand(2, 4, 130, 64), "v": v}), 4e-3, "expanded keys")
    require(both({"q": q.contiguous(), "k": k.mT.contiguous().mT, "v": v.contiguous()}), 4e-3, "transposed keys")


def graph_replay() -> None:
    """Captured cold (nothing compiled for this head dim yet), replayed on fresh data."""
    tensors = {n: torch.randn(1, 2, 200, 72, device="cuda", dtype=torch.float16) for n in "qkv"}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = attend(PORTABLE, tensors, {"causal": True})
    for _ in range(100):
        for tensor in tensors.values():
            tensor.normal_()
        graph.replay()
        if not torch.equal(o, attend(PORTABLE, tensors, {"causal": True})[0]):
            raise AssertionError("a graph replay differs from eager")


def graph_replay_of_gradients() -> None:
    """Forward and backward, warm, of both kinds of kernels: 100 replays on fresh data equal eager."""
    for kernels in ("portable", "hopper"):
        backend = Flash(kernels=kernels)  # type: ignore[arg-type]
        tensors = qkv(1, 2, 300, 72)
        upstream = torch.randn(1, 2, 300, 72, device="cuda"), torch.randn(1, 2, 300, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                values_and_grads(backend, tensors, {"causal": True}, upstream)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = values_and_grads(backend, tensors, {"causal": True}, upstream)
        for _ in range(100):
            for tensor in tensors.values():
                tensor.normal_()
            graph.replay()
            eager = values_and_grads(backend, tensors, {"causal": True}, upstream)
            differ = [n for n, (one, other) in enumerate(zip(captured, eager)) if worst_error([one], [other]) > 1e-2]
            if differ:  # the Hopper kernels add up dq in an order that varies, hence no bits
                raise AssertionError(f"{kernels}: results {differ} of a graph replay differ from eager")


def side_stream() -> None:
    tensors = qkv(2, 4, 1000, 64)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            tensors["q"].normal_()
        o, _ = attend(PORTABLE, tensors, {})
    stream.synchronize()
    if not torch.equal(o, attend(PORTABLE, tensors, {})[0]):
        raise AssertionError("differs on a side stream")


def bitwise() -> None:
    tensors = qkv(2, 4, 777, 64)
    upstream = torch.randn(2, 4, 777, 64, device="cuda"), torch.randn(2, 4, 777, device="cuda")
    first = values_and_grads(PORTABLE, tensors, {"deterministic": True}, upstream)
    for _ in range(200):
        again = values_and_grads(PORTABLE, tensors, {"deterministic": True}, upstream)
        if not all([torch.equal(a, b) for a, b in zip(first, again)]):
            raise AssertionError("two equal calls differ")


def million() -> None:
    tensors = {n: t.requires_grad_() for n, t in qkv(1, 1, 2**20, 64).items()}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o, _ = attend(PORTABLE, tensors, {"causal": True})
    o.backward(torch.randn_like(o))
    extra = torch.cuda.max_memory_allocated() - before
    print(f"million: {extra / 2**20:.0f} MiB beyond the inputs of {3 * 2**20 * 128 / 2**20:.0f} MiB")
    rows, statistics_bytes = 128 * 2**20, 3 * 4 * 2**20  # o, its gradient and three gradients; lse, pivot and delta
    require(extra / (5 * rows + statistics_bytes), 1.02, "memory of a forward and backward at S = 1,048,576")
    if not all([t.grad.isfinite().all() for t in tensors.values()]):
        raise AssertionError("not finite")


def shifts() -> None:
    for dtype, shift in itertools.product(TOLERANCE, (1e4, -1e4, torch.finfo(torch.float32).min)):
        tensors = {n: torch.randn(1, 2, 200, 64, device="cuda", dtype=dtype) for n in "qkv"}
        tensors["bias"] = torch.full((1, 1, 200, 200), shift, device="cuda")
        allowed = max(2e-3, TOLERANCE[dtype])
        require(both(tensors), allowed, f"shift by {shift}")


# Speed


def time_ms(run: Callable[[], Any], *, rounds: int = 5, budget_ms: float = 25.0) -> float:
    """Median over rounds of the mean time of a call, by events."""
    run()
    torch.cuda.synchronize()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    calls = max(2, min(200, int(budget_ms / max(start.elapsed_time(stop), 1e-3))))
    times = []
    for _ in range(rounds):
        start.record()
        for _ in range(calls):
            run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / calls)
    return statistics.median(times)


def flops(batch: int, heads: int, length: int, dim: int, causal: bool) -> float:
    return 4.0 * batch * heads * length * length * dim * (0.5 if causal else 1.0)


CANDIDATES: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {
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


def runs_of(kernel: str, dim: int, causal: bool, tile: tuple[int, ...], device: str, length: int) -> Callable[[], Any]:
    """A closure that runs one kernel under one tile."""
    from attnzoo.backends.triton import backward_keys, backward_queries, forward, problem, table
    from attnzoo.backends.triton.delta import RowStatistics

    table.HOPPER[kernel] = {256: table.Tile(*tile)}
    table.tile_for.cache_clear()
    problem.facts_of.cache_clear()
    heads, batch = (WIDTH // dim, max(1, TOKENS // length)) if device == "cuda" else (2, 1)
    q, k, v, g = [torch.randn(batch, length, heads, dim, device=device).to(torch.bfloat16).transpose(1, 2) for _ in range(4)]
    spec = AttentionSpec.of(q, k, v, causal=causal)
    call = problem.Problem(spec, AttentionInputs.of(spec, q, k, v))
    lse = torch.full((batch, heads, length), 8.0, device=device)
    stats = RowStatistics(lse, torch.zeros_like(lse), None)
    o, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    return {
        "forward": lambda: forward.forward(call, o, lse),
        "backward_keys": lambda: backward_keys.backward_keys(call, g, stats, dk, dv),
        "backward_queries": lambda: backward_queries.backward_queries(call, g, stats, o),
    }[kernel]


def tune(length: int = 4096) -> None:
    jobs = [(k, d, c, t) for k, dims in CANDIDATES.items() for d, tiles in dims.items() for c in (False, True) for t in tiles]
    in_parallel(compile_tile, jobs)
    rows = []
    factor = {"forward": 1.0, "backward_keys": 2.0, "backward_queries": 1.5}
    for (kernel, dim, causal), group in itertools.groupby(jobs, key=lambda job: job[:3]):
        found = []
        for _, _, _, tile in group:
            try:
                ms = time_ms(runs_of(kernel, dim, causal, tile, "cuda", length), rounds=3, budget_ms=15.0)
            except Exception as failure:
                print(kernel, dim, tile, type(failure).__name__, str(failure)[:80])
                continue
            found.append((flops(TOKENS // length, WIDTH // dim, length, dim, causal) * factor[kernel] / ms / 1e9, tile))
        found.sort(reverse=True)
        rows.append((kernel, dim, causal, found))
        print(f"{kernel:17s} D={dim} causal={int(causal)}", "  ".join(f"{t}:{n:.0f}" for n, t in found), flush=True)
    RESULTS["tune"] = rows
    adopt(rows)


def adopt(rows: list[tuple[str, int, bool, list[tuple[float, tuple[int, ...]]]]]) -> None:
    """Put the tiles that are best with and without causal together into the table, for what else runs here."""
    from attnzoo.backends.triton import problem, table

    for kernel in CANDIDATES:
        table.HOPPER[kernel] = {}
    for (kernel, dim), group in itertools.groupby(rows, key=lambda row: row[:2]):
        ways = [{tile: rate for rate, tile in found} for _, _, _, found in group]
        best = max(ways[0], key=lambda tile: statistics.geometric_mean([way.get(tile, 1e-9) for way in ways]))
        table.HOPPER[kernel][dim] = table.Tile(*best)
        print(f"adopted {kernel} D={dim}: {best}", flush=True)
    table.tile_for.cache_clear()
    problem.facts_of.cache_clear()


def interleaved_ms(calls: dict[str, Callable[[], Any]], *, rounds: int = 5, budget_ms: float = 12.0) -> dict[str, float]:
    """Medians over rounds in which each is timed once, so that a drift of the card's clock meets them all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(time_ms(call, rounds=1, budget_ms=budget_ms))
    return {name: statistics.median(found) for name, found in times.items()}


def pinned(kinds: list[Any], call: Callable[[], Any]) -> Callable[[], Any]:
    """The call with SDPA held to one of its backends."""
    from torch.nn.attention import sdpa_kernel

    def run() -> Any:
        with sdpa_kernel(kinds):
            return call()

    return run


def compare(lengths: tuple[int, ...] = (512, 2048, 8192, 16384), dims: tuple[int, ...] = (64, 128)) -> None:
    from torch.nn.attention import SDPBackend
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch._dynamo.config.recompile_limit = 1000  # beyond it flex falls back to its unfused path, and is no peer
    flex = torch.compile(flex_attention, dynamic=False)
    rows = []
    for dim, causal, length in itertools.product(dims, (False, True), lengths):
        batch, heads = TOKENS // length, WIDTH // dim
        tensors = {n: t.requires_grad_() for n, t in qkv(batch, heads, length, dim).items()}
        q, k, v = tensors.values()
        blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda") if causal else None
        calls: dict[str, Callable[[], Tensor]] = {
            "flash": lambda: attend(PORTABLE, tensors, {"causal": causal})[0],  # noqa: B023
            "fa2": pinned([SDPBackend.FLASH_ATTENTION], lambda: sdpa(q, k, v, is_causal=causal)),  # noqa: B023
            "cudnn": pinned([SDPBackend.CUDNN_ATTENTION], lambda: sdpa(q, k, v, is_causal=causal)),  # noqa: B023
            "flex": lambda: flex(q, k, v, block_mask=blocks),  # noqa: B023
        }
        outputs = {name: call() for name, call in calls.items()}
        error = worst_error([outputs["flash"]], [outputs["fa2"]])
        require(error, 2e-2, f"flash against fa2, D={dim} S={length} causal={causal}")
        g = torch.randn_like(outputs["flash"])
        backwards = {
            name: lambda o=o: torch.autograd.grad(o, [q, k, v], g, retain_graph=True)  # type: ignore[misc]  # noqa: B023
            for name, o in outputs.items()
        }
        with torch.no_grad():
            forward_ms = interleaved_ms(calls)
        backward_ms = interleaved_ms(backwards)
        useful = flops(batch, heads, length, dim, causal) / 1e9
        row: dict[str, Any] = {"dim": dim, "causal": causal, "length": length}
        row |= {name: (useful / forward_ms[name], 2.5 * useful / backward_ms[name]) for name in calls}
        rows.append(row)
        cells = "  ".join(f"{name} {row[name][0]:.0f}/{row[name][1]:.0f}" for name in calls)
        print(f"D={dim} causal={int(causal)} S={length:6d}  fwd/bwd TFLOP/s  {cells}", flush=True)
        del outputs, backwards
    RESULTS["compare"] = rows
    for peer, place, causal in itertools.product(("flex", "fa2"), (0, 1), (None, False, True)):
        ratios = [row["flash"][place] / row[peer][place] for row in rows if causal in (None, row["causal"])]
        which = {None: "all", False: "full", True: "causal"}[causal]
        summary = f"{statistics.geometric_mean(ratios):.3f}, worst {min(ratios):.3f}"
        RESULTS[f"flash/{peer} {('forward', 'backward')[place]} {which}"] = summary
        print(f"flash/{peer} {('forward', 'backward')[place]}, {which}: geometric mean {summary}", flush=True)


def decode() -> None:
    source = torch.empty(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 2 * source.numel() * 2 / time_ms(lambda: target.copy_(source)) / 1e9
    rows = []
    for batch, queries in itertools.product((1, 8), (1, 8)):
        shapes = {"q": (batch, 64, queries, 128), "k": (batch, 8, 32768, 128), "v": (batch, 8, 32768, 128)}
        tensors = {n: torch.randn(s, device="cuda", dtype=torch.bfloat16) for n, s in shapes.items()}
        run = lambda: attend(PORTABLE, tensors, {"causal": True, "align": "bottom_right"})  # noqa: B023, E731
        us, eager_us = replay_us(run, calls=5), 1000 * time_ms(run)
        rate = 2 * tensors["k"].numel() * 2 / us / 1e6
        rows.append({"batch": batch, "queries": queries, "us": us, "eager us": eager_us, "TB/s": rate, "of copy": rate / copy})
        rates = f"{rate:.2f} TB/s, {rate / copy:.2f} of a copy's {copy:.2f}"
        print(f"decode B={batch} q={queries}: {us:.0f} us in a graph, {eager_us:.0f} us eager; {rates}", flush=True)
    shapes = {"q": (1, 8, 256, 128), "k": (1, 1, 131072, 128), "v": (1, 1, 131072, 128)}
    tensors = {n: torch.randn(s, device="cuda", dtype=torch.bfloat16) for n, s in shapes.items()}
    ms = time_ms(lambda: attend(PORTABLE, tensors, {}))
    rows.append({"few heads": 4 * 8 * 256 * 131072 * 128 / ms / 1e9})
    print(f"256 queries over 131072 keys, 8/1 heads: {rows[-1]['few heads']:.0f} TFLOP/s", flush=True)
    RESULTS["decode"] = rows


def host_us(run: Callable[[], Any], calls: int = 50) -> float:
    """Time on the host of a call, the least of 20 means, with the queue never full enough to wait for."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - began) / calls)
    torch.cuda.synchronize()
    return 1e6 * min(times)


def host() -> None:
    """From `attention()` to its last launch, and what the same launches cost alone, through the kept binaries."""
    import attnzoo
    from attnzoo.backends.hopper import launch as hopper
    from attnzoo.backends.triton import launch as portable

    for name, options in {"hopper": {"causal": True}, "portable": {"causal": True, "softcap": 30.0}}.items():
        plain = list(qkv(2, 64, 128, 64).values())  # bf16; as large as the Hopper kernels want it
        leaves = [t.detach().requires_grad_() for t in plain]
        recorded: list[Callable[[], None]] = []
        with recording(portable.Kernel, "launch", recorded), recording(hopper.Launch, "__call__", recorded):
            attnzoo.attention(*plain, backend="flash", **options)  # type: ignore[arg-type]
        alone = host_us(lambda: [launch() for launch in recorded])  # noqa: B023
        row = {"launches": alone}
        for grads, tensors in (("without grad", plain), ("with grad", leaves)):
            row[grads] = host_us(lambda: attnzoo.attention(*tensors, backend="flash", **options)) - alone  # type: ignore[arg-type]  # noqa: B023
        RESULTS[f"host {name}"] = row
        print(f"host, {name}: " + ", ".join(f"{part} {us:.0f} us" for part, us in row.items()), flush=True)


@contextlib.contextmanager
def recording(owner: Any, method: str, into: list[Callable[[], None]]) -> Iterator[None]:
    """Note every call of a launch as a closure that repeats it."""
    original = getattr(owner, method)

    def note(*arguments: Any) -> None:
        original(*arguments)
        into.append(lambda: original(*arguments))

    setattr(owner, method, note)
    try:
        yield
    finally:
        setattr(owner, method, original)


def replay_us(run: Callable[[], Any], calls: int = 20) -> float:
    """Time on the card of a call, the least of three replays of a graph of many."""
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
    return min(time_ms(graph.replay, rounds=1, budget_ms=1.0) for _ in range(3)) / calls * 1000


def route() -> None:
    """Batch, heads of q and of k, lengths: from so little that the card is idle to where it is full."""
    from attnzoo.backends.flash import reasons_against_hopper
    from attnzoo.backends.hopper import launch as hopper

    sizes = ((1, 8, 8, 65, 65), (8, 16, 16, 128, 128), (4, 16, 16, 256, 256), (8, 16, 16, 256, 256), (1, 16, 16, 512, 512))
    sizes += ((4, 16, 16, 512, 512), (32, 16, 16, 512, 512), (1, 16, 16, 1024, 1024), (4, 16, 16, 1024, 1024), (1, 16, 16, 2048, 2048))
    sizes += ((1, 32, 32, 128, 8192), (1, 16, 16, 512, 8192))
    rows = []
    for dim, (batch, q_heads, kv_heads, q_len, kv_len), causal in itertools.product((64, 128), sizes, (False, True)):
        if causal and q_len != kv_len:
            continue
        shapes = ((batch, q_len, q_heads, dim), (batch, kv_len, kv_heads, dim), (batch, kv_len, kv_heads, dim))
        q, k, v = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for shape in shapes]
        spec = AttentionSpec.of(q, k, v, causal=causal)
        inputs = AttentionInputs.of(spec, q, k, v)
        ours = replay_us(lambda: hopper.forward(spec, q, k, v))  # noqa: B023
        portable = replay_us(lambda: PORTABLE.forward(spec, inputs))  # noqa: B023
        chosen = "portable" if reasons_against_hopper(spec, "forward") else "hopper"
        rows.append(
            {"sizes": (dim, batch, q_heads, q_len, kv_len), "causal": causal, "hopper": ours, "portable": portable, "chosen": chosen}
        )
        lost = {"hopper": ours, "portable": portable}[chosen] / min(ours, portable)
        print(f"route {rows[-1]['sizes']} causal={int(causal)}: hopper {ours:.1f} portable {portable:.1f} us, chosen {chosen}, {lost:.2f}")
    RESULTS["route"] = rows


def repeats(times: int = 5000) -> None:
    """Deterministic backward passes with all of the card's memory but 2 GiB taken: equal bits each time."""
    tensors = qkv(2, 4, 777, 64)
    upstream = torch.randn(2, 4, 777, 64, device="cuda"), torch.randn(2, 4, 777, device="cuda")
    first = values_and_grads(PORTABLE, tensors, {"deterministic": True}, upstream)
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - 2**31, dtype=torch.uint8, device="cuda")
    for n in range(times):
        again = values_and_grads(PORTABLE, tensors, {"deterministic": True}, upstream)
        if not all([torch.equal(a, b) for a, b in zip(first, again)]):
            raise AssertionError(f"repeat {n} differs")
    RESULTS["repeats"] = {"times": times, "bytes taken": taken.numel()}
    print(f"{times} repeats, equal bits, {taken.numel() / 2**30:.0f} GiB taken", flush=True)


def main(words: list[str]) -> None:
    from pathlib import Path

    import triton

    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, flush=True)
    RESULTS["machine"] = [torch.cuda.get_device_name(), torch.__version__, triton.__version__]
    actions = {"check": check, "recheck": recheck, "tune": tune, "compare": compare, "decode": decode, "host": host, "route": route}
    actions |= {"repeats": repeats, "probes": probes, "variants": variants, "compile": compile_features}
    for word in words:
        began = time.time()
        actions[word]()
        print(f"[{word}: {time.time() - began:.0f} s]", flush=True)
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "flash_gpu.json").write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
