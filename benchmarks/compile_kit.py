"""Fill Triton's cache with the portable kernels that the conformance kit asks of a card, on a machine without one.

    TRITON_CACHE_DIR=/tmp/cache python benchmarks/compile_kit.py flash --processes 2
    TRITON_CACHE_DIR=/tmp/cache python benchmarks/compile_kit.py flash --processes 2 --profile deep

The cache serves a machine with the same Triton for the same Python, at the same path: the kit's first run on a card then compiles
little. Every problem is drawn as the kit draws it there, with tensors on the CPU, and each launch compiles instead. What checks
launch beyond the problem's own call, the Hopper kernels and the launchers' stubs are left to the card. `--most 0` only counts.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

CAPABILITY, PROCESSORS = (9, 0), 132
BIGGEST = 2**26  # elements of a tensor; bigger problems have the kernels of smaller ones
BACKENDS = {"flash": ("attnzoo.backends.flash", "Flash"), "block_sparse": ("attnzoo.backends.block_sparse", "BlockSparse")}


def each_problem(subject: Any, profile: str, call: Callable[[Any], None]) -> None:
    """Give every problem of the profile to `call`: the cases and the quick random ones, or the deep ones."""
    from attnzoo.pytest_plugin import DEEP_CHUNKS, QUICK_CHUNKS
    from attnzoo.testing import random_problems
    from attnzoo.testing.case import judged_problem
    from attnzoo.testing.cases import CASES
    from attnzoo.testing.outcome import Outcome
    from attnzoo.testing.variants import VARIANTS

    def run_case(subject: Any, case: Any, device: Any) -> Outcome:
        call(case.problem)
        return Outcome("passed")

    random_problems.run_case = run_case
    if profile == "quick":
        for case in CASES:
            call(judged_problem(subject, case, "cpu"))
    else:
        for place in range(len(VARIANTS)):
            random_problems.run_variant(subject, "cpu", place)
    for chunk in range(QUICK_CHUNKS if profile == "quick" else DEEP_CHUNKS):
        random_problems.run_chunk(subject, "cpu", profile=profile, chunk=chunk)


def compile_share(backend: str, profile: str, share: int, shares: int, most: int | None) -> None:
    """Compile those of the kernels that fall to this share, and say how many there are in all."""
    import importlib

    from flash_compile import compile_source, replace_launches

    from attnzoo.testing.inputs import make_call
    from attnzoo.testing.subject import Subject

    module, name = BACKENDS[backend]
    subject = Subject(getattr(importlib.import_module(module), name)(is_interpreted=True, kernels="portable"))
    seen: set[str] = set()
    kinds: Counter[str] = Counter()
    began, compiled = time.time(), 0

    def compile_mine(kernel: Any, plan: Any, source: Any) -> None:
        nonlocal compiled
        key = f"{source.hash()} {plan.tile.options}"
        if not plan.programs or key in seen:
            return
        seen.add(key)
        kinds[kernel.fn.__name__] += 1
        is_mine = int(hashlib.md5(key.encode()).hexdigest(), 16) % shares == share
        if is_mine and (most is None or compiled < most):
            compile_source(CAPABILITY, plan, source)
            compiled += 1

    def attempt(asked: Any) -> None:
        rows = asked.batch * max(asked.q_heads * asked.q_len, asked.k_heads * asked.k_len)
        if rows * max(asked.head_dim, asked.v_dim) > BIGGEST:
            return
        try:
            subject.run(make_call(asked, "cpu"))
        except Exception as error:  # a refusal, or a compiler's: the card will say so
            kinds[type(error).__name__] += 1

    replace_launches(CAPABILITY, PROCESSORS, compile_mine)
    each_problem(subject, profile, attempt)
    print(f"share {share}: {len(seen)} kernels, {compiled} compiled in {time.time() - began:.0f} s; {dict(kinds)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("--profile", choices=("quick", "deep"), default="quick")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--most", type=int, help="kernels a process")
    asked = parser.parse_args()
    workers = [
        get_context("spawn").Process(target=compile_share, args=(asked.backend, asked.profile, share, asked.processes, asked.most))
        for share in range(asked.processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    raise SystemExit(max(worker.exitcode or 0 for worker in workers))


if __name__ == "__main__":
    main()
