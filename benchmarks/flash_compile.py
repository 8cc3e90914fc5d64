"""`flash_gpu.py compile`: the portable kernels of every kind of call, on all cores, into Triton's cache on disk."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from flash_calls import PORTABLE, TOLERANCE, values_and_grads
from flash_cases import FEATURES, call_of

from attnzoo.backends.flash import Flash

MOST_WORKERS = 16


def replace_launches(capability: tuple[int, int], processors: int, instead: Callable[[Any, Any, Any], None]) -> None:
    """Make this process plan for such a card, from tensors on the CPU, and call `instead(kernel, plan, source)` for each launch."""
    from attnzoo.backends.triton import launch, launchers, problem

    def called(kernel: Any, plan: Any, arguments: Any, aligned: Any, types: Any) -> None:
        instead(kernel, plan, kernel.source(arguments, plan.constants, aligned))

    launch.Kernel.launch = called  # type: ignore[method-assign]
    problem.capability_of = lambda device: capability  # type: ignore[assignment]
    launchers.processors_of = lambda device: processors  # type: ignore[assignment]
    torch.set_num_threads(1)


def compile_source(capability: tuple[int, int], plan: Any, source: Any) -> None:
    """Into Triton's cache on disk."""
    import triton
    from triton.backends.compiler import GPUTarget

    triton.compile(source, target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32), options=plan.tile.options)


def only_compile(capability: tuple[int, int], processors: int) -> None:
    """Make this process compile for such a card wherever it would launch; it never touches the GPU."""
    replace_launches(capability, processors, lambda kernel, plan, source: compile_source(capability, plan, source))
    Flash.unsupported_reasons = lambda self, spec: []  # type: ignore[method-assign]


def in_parallel(compile_one: Callable[..., None], jobs: list[tuple[Any, ...]]) -> list[str]:
    """Call it with the arguments of each job, in processes that `only_compile`, before the GPU is asked for anything.

    Returns:
        What went wrong.
    """
    began = time.time()
    facts = torch.cuda.get_device_capability(), torch.cuda.get_device_properties().multi_processor_count
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=only_compile, initargs=facts) as pool:
        failures = [failure for failure in pool.map(attempt, itertools.repeat(compile_one), jobs) if failure]
    print(f"compiled {len(jobs)} jobs in {time.time() - began:.0f} s", *failures, sep="\n  ", flush=True)
    return failures


def attempt(compile_one: Callable[..., None], job: tuple[Any, ...]) -> str:
    try:
        compile_one(*job)
    except Exception as failure:
        return f"compiling {' '.join(map(str, job))}: {type(failure).__name__} {str(failure)[:300]}"
    return ""


def compile_feature(name: str, dtype: torch.dtype) -> None:
    values_and_grads(PORTABLE, *call_of(name, dtype, "cpu"))


def compile_features(save: Callable[[str, Any], None], dtypes: Iterable[torch.dtype] = tuple(TOLERANCE)) -> None:
    save("compile", in_parallel(compile_feature, list(itertools.product(FEATURES, dtypes))))
