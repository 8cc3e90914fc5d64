"""The portable Triton kernels of `flash` on a GPU: right first, then how fast. The Hopper kernels are off, unless said.

    python benchmarks/flash_gpu.py check          every feature against naive in fp32, and what only a GPU can show
    python benchmarks/flash_gpu.py recheck        the part of it that a change of tiles can break
    python benchmarks/flash_gpu.py tune           each kernel under many tiles, for the tables in triton/table.py
    python benchmarks/flash_gpu.py tune_short     the forward under many tiles at 512 to 2048 keys
    python benchmarks/flash_gpu.py compare        against SDPA (FA2, cuDNN) and torch.compile(flex_attention)
    python benchmarks/flash_gpu.py decode         few queries over long caches
    python benchmarks/flash_gpu.py host           the host's share of a call, Hopper kernels included
    python benchmarks/flash_gpu.py route          against the Hopper kernels on small calls: where flash changes over
    python benchmarks/flash_gpu.py subsets        both backwards where some of q, k and v need no gradient
    python benchmarks/flash_gpu.py probes         what only a GPU can show, alone
    python benchmarks/flash_gpu.py compile        the portable kernels of every kind of call, on all cores, into Triton's cache
    python benchmarks/flash_gpu.py variants       every kind of call once, Hopper kernels included, for compute-sanitizer
    python benchmarks/flash_gpu.py repeats        5,000 deterministic backward passes with the memory nearly full

Several words run one after the other. `--json FILE`, or `$OUT/flash_gpu.json` if OUT is set, gets their results as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

WORDS = {
    "check": ("flash_check", "check"),
    "recheck": ("flash_check", "recheck"),
    "tune": ("flash_tune", "tune"),
    "tune_short": ("flash_tune", "tune_short"),
    "compare": ("flash_compare", "compare"),
    "decode": ("flash_decode", "decode"),
    "host": ("flash_host", "host"),
    "route": ("flash_route", "route"),
    "subsets": ("flash_subsets", "subsets"),
    "probes": ("flash_probes", "probes"),
    "compile": ("flash_compile", "compile_features"),
    "variants": ("flash_check", "variants"),
    "repeats": ("flash_repeats", "repeats"),
}
"""Module and function, `function(save)`; imported only when asked for, since compute-sanitizer slows every import."""


def action(word: str) -> Callable[[Callable[[str, Any], None]], None]:
    module, function = WORDS[word]
    found: Callable[[Callable[[str, Any], None]], None] = getattr(import_module(module), function)
    return found


def machine() -> list[str]:
    """The card, torch's version and Triton's."""
    import triton

    return [torch.cuda.get_device_name(), torch.__version__, triton.__version__]


def saving(path: Path | None) -> Callable[[str, Any], None]:
    """`save(name, what)`, which writes all results so far; a run that is killed leaves a whole file."""
    results: dict[str, Any] = {}

    def save(name: str, what: Any) -> None:
        results[name] = what
        if path is not None:
            draft = path.with_name(path.name + ".part")
            draft.write_text(json.dumps(results, indent=1) + "\n")
            os.replace(draft, path)

    return save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", choices=WORDS)
    parser.add_argument("--json", type=Path, default=Path(os.environ["OUT"], "flash_gpu.json") if "OUT" in os.environ else None)
    arguments = parser.parse_args()
    save = saving(arguments.json)
    save("machine", found := machine())
    print(found[0], "torch", found[1], "triton", found[2], flush=True)
    for word in arguments.words:
        began = time.time()
        try:
            action(word)(save)
        finally:
            print(f"[{word}: {time.time() - began:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
