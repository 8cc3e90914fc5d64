"""`block_sparse_gpu.py check`: layouts and features against naive in fp32."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from fnmatch import fnmatch
from multiprocessing import get_context
from typing import Any

import torch
from block_sparse_inputs import DEVICE, random_blocks
from flash_calls import TOLERANCE, values_and_grads, worst_error
from torch import Tensor

from attnzoo import BlockLayout, layouts
from attnzoo.backends.block_sparse import BlockSparse
from attnzoo.backends.naive import Naive


def random_mask(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.4


def sparse_rows(length: int) -> Tensor:
    """Rows without a key, also whole blocks of them."""
    rows = torch.arange(length)[:, None]
    return (rows % 7 == 0) & (rows // 128 % 2 == 0) & (torch.arange(length) > 200)


def feature_cases() -> dict[str, dict[str, Any]]:
    """Layout by a function of the length, and options as in `flash_cases.FEATURES`."""
    ids = torch.tensor([[0] * 130 + [1] * 150 + [-7] * 53, [3] * 333], device=DEVICE)
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
    generator = torch.Generator(DEVICE).manual_seed(len(name))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator)

    tensors = {"q": randn(2, 4, S, D).to(dtype), "k": randn(2, Hkv, S, D).to(dtype), "v": randn(2, Hkv, S, Dv).to(dtype)}
    options["layout"] = options["layout"](S).to(DEVICE)
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


def check(save: Callable[[str, Any], None]) -> None:
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
    save("check", bad)
