"""Compiles block_sparse's Triton kernels without a GPU and prints, as JSON, what each needs.

    python tests/block_sparse_aot.py 90-128-128-random 80-64-64-featured

A name is compute capability, head dim, block size and variant. Otherwise as `flash_aot.py`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from flash_aot import EXTRAS, LENGTH, facts_of, featured

from attnzoo import layouts
from attnzoo.backends.block_sparse import BlockSparse
from attnzoo.backends.triton import launch, problem
from attnzoo.inputs import AttentionInputs
from attnzoo.layout import BlockLayout
from attnzoo.spec import AttentionSpec


def bits(block: int) -> BlockLayout:
    return BlockLayout.from_dense(torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5, block=block)


def random(block: int) -> BlockLayout:
    return layouts.random(LENGTH, density=0.5, block=block)


VARIANTS: dict[str, dict[str, Any]] = {
    "random": {"make": random},
    "causal": {"make": lambda block: layouts.causal(LENGTH, block=block)},
    "bits": {"make": bits},
    "documents": {"make": lambda block: layouts.documents([200, 312], block=block)},
    "grouped": {"make": random, "kv_heads": 1, "causal": True},
    "featured": {"make": bits, **featured()},
    "fp32": {"make": random, "dtype": torch.float32},
}


def record(capability: tuple[int, int], head_dim: int, layout: BlockLayout, kv_heads: int, dtype: torch.dtype, **options: Any) -> list[Any]:
    """The launches of one call, forward and backward."""
    launches: list[tuple[Any, ...]] = []
    launch.Kernel.launch = lambda *parts: launches.append(parts)  # type: ignore[method-assign]
    problem.facts_of.cache_clear()
    problem.capability_of = lambda device: capability
    q, k, v = [torch.zeros(1, heads, LENGTH, head_dim, dtype=dtype, requires_grad=True) for heads in (4, kv_heads, kv_heads)]
    spec = AttentionSpec.of(q, k, v, layout=layout, **options)
    inputs = AttentionInputs.of(spec, q, k, v, layout=layout, **{name: options[name] for name in EXTRAS if name in options})
    BlockSparse().attend(spec, inputs)[0].sum().backward()
    return launches


def facts(name: str) -> dict[str, Any]:
    capability, head_dim, block, variant = name.split("-")
    options = {"kv_heads": 4, "dtype": torch.bfloat16, **VARIANTS[variant]}
    layout = options.pop("make")(int(block))
    launches = record(divmod(int(capability), 10), int(head_dim), layout, **options)
    return {kernel.fn.__name__.removeprefix("sparse_").removesuffix("_kernel"): facts_of(kernel, *rest) for kernel, *rest in launches}


if __name__ == "__main__":
    print(json.dumps({name: facts(name) for name in sys.argv[1:]}))
