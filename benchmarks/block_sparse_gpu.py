"""The kernels of `block_sparse` on a GPU: right first, then how fast.

    python benchmarks/block_sparse_gpu.py check      layouts and features against naive in fp32
    python benchmarks/block_sparse_gpu.py probe      what only a GPU can show
    python benchmarks/block_sparse_gpu.py quick      time against density, without a peer
    python benchmarks/block_sparse_gpu.py tune       each portable kernel under many tiles
    python benchmarks/block_sparse_gpu.py build      layouts made on the device: from_mask_mod, topk, presets
    python benchmarks/block_sparse_gpu.py compare    beside FlexAttention and FlashAttention 4 over the same blocks

Several words run one after the other. `--json FILE` gets their results as they come; `compare` keeps to `--seconds`.
`block_sparse_report.py` makes the page and the figure of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from provenance import machine

PACKAGES = ("torch", "triton", "flash-attn-4", "fa3-fwd", "nvidia-cutlass-dsl", "nvidia-cudnn-cu13")
WORDS = ("check", "probe", "quick", "tune", "build", "compare")

Save = Callable[[str, Any], None]


def action(word: str, save: Save, seconds: float) -> None:
    """Run one word; its module is imported only now, since each needs other packages."""
    if word == "compare":
        from block_sparse_compare import compare

        compare(save, seconds=seconds)
    elif word == "build":
        from block_sparse_build import build

        build(save)
    elif word in ("quick", "tune"):
        import block_sparse_tune

        getattr(block_sparse_tune, word)(save)
    elif word == "check":
        from block_sparse_check import check

        check(save)
    else:
        from block_sparse_probe import probe

        probe(save)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", choices=WORDS)
    parser.add_argument("--seconds", type=float, default=220.0, help="at most for compare")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(PACKAGES, arguments.json)}
    print(results["machine"], flush=True)

    def save(name: str, what: Any) -> None:
        results[name] = what
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")

    for word in arguments.words:
        began = time.time()
        try:
            action(word, save, arguments.seconds)
        finally:
            print(f"[{word}: {time.time() - began:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
