"""Compiles flash's Triton kernels without a GPU and prints, as JSON, what each needs.

    python tests/flash_aot.py 90-128-causal 80-64-featured

A name is compute capability, head dim and variant; all kernels that such a call launches, forward and backward, are
compiled. A process of its own, because the tests run triton in its interpreter. On CPU tensors the launchers build
exactly the launches that they make on a GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from sass import unset_uniform_registers
from triton.backends.compiler import GPUTarget

from attnzoo.backends.flash import Flash
from attnzoo.backends.triton import launch, launchers, problem
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

INSTRUCTIONS = ("HGMMA", "WARPGROUP", "HMMA", "UTCHMMA", "LDGSTS", "LDL", "STL")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
LENGTH = 512


def featured() -> dict[str, Any]:
    """Everything that takes registers and shared memory in one call."""
    return {
        "causal": True,
        "window": (100, None),
        "mask": torch.ones(1, 4, LENGTH, LENGTH, dtype=torch.bool),
        "bias": torch.zeros(1, 4, LENGTH, LENGTH).requires_grad_(),
        "segment_ids": torch.zeros(1, LENGTH, dtype=torch.int64),
        "softcap": 5.0,
        "sinks": torch.zeros(4).requires_grad_(),
        "dropout_p": 0.5,
        "dropout_seed": 1,
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 0)},
    "segments": {"segment_ids": torch.zeros(1, LENGTH, dtype=torch.int64)},
    "grouped": {"causal": True, "kv_heads": 1},
    "featured": featured(),
    "fp32": {"dtype": torch.float32},
    "decode": {"q_len": 1, "kv_heads": 1},
    "few": {"q_len": 48, "kv_heads": 1},
    "narrow": {"value_dim": 17},
    "narrow-few": {"value_dim": 17, "q_len": 48},
}
EXTRAS = ("mask", "bias", "sinks", "segment_ids", "dropout_seed")


def record(
    capability: tuple[int, int],
    head_dim: int,
    *,
    q_len: int = LENGTH,
    kv_heads: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    value_dim: int | None = None,
    **options: Any,
) -> list[tuple[Any, ...]]:
    """The launches of one call, forward and backward: kernel, plan, arguments, what is aligned, types."""
    launches: list[tuple[Any, ...]] = []
    launch.Kernel.launch = lambda *parts: launches.append(parts)  # type: ignore[method-assign]
    problem.facts_of.cache_clear()
    problem.capability_of = lambda device: capability
    launchers.processors_of = lambda device: 132 if q_len < LENGTH else 4
    q = torch.zeros(1, 4, q_len, head_dim, dtype=dtype, requires_grad=q_len == LENGTH)
    dims = (head_dim, value_dim or head_dim)
    k, v = [torch.zeros(1, kv_heads, LENGTH, dim, dtype=dtype, requires_grad=q.requires_grad) for dim in dims]
    spec = AttentionSpec.of(q, k, v, **options)
    inputs = AttentionInputs.of(spec, q, k, v, **{name: options[name] for name in EXTRAS if name in options})
    o, _ = Flash().attend(spec, inputs)
    if o.requires_grad:
        o.sum().backward()
    return launches


def facts_of(kernel: Any, plan: Any, arguments: Any, aligned: Any, _types: Any) -> dict[str, Any]:
    """Registers, spills, shared memory and instruction counts of one launch."""
    source = kernel.source(arguments, plan.constants, aligned)
    target = GPUTarget("cuda", 10 * plan.capability[0] + plan.capability[1], 32)
    compiled = triton.compile(source, target=target, options=plan.tile.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage, sass = [
            subprocess.run([TOOLS / "cuobjdump", flag, cubin.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        ]
    used = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert used is not None, usage
    counts = {instruction: len(re.findall(rf"\b{instruction}\b", sass)) for instruction in INSTRUCTIONS}
    return {
        "registers": int(used[1]),
        "spilled_bytes": int(used[2]),
        "shared_bytes": compiled.metadata.shared,
        "counts": counts,
        "unset": unset_uniform_registers(sass),
        "doubled": doubled_products(compiled.asm["ttgir"]),
    }


def doubled_products(ttgir: str) -> list[str]:
    """Operands of products whose layout holds more elements along the inner dim than there are, so that some count twice.

    Triton gives each of four threads `kWidth` neighbours, twice as many where a `tl.join` lies before the product and twice
    again where a load of 8 bits does, and never asks whether the tile is as wide.
    """
    operands = re.findall(r"tensor<(\d+)x(\d+)x\w+, #ttg.dot_op<\{opIdx = ([01]), parent = #\w+, kWidth = (\d+)\}>>", ttgir)
    return sorted({f"{m}x{n} with kWidth {width}" for m, n, operand, width in operands if 4 * int(width) > int((n, m)[int(operand)])})


def facts(name: str) -> dict[str, Any]:
    capability, head_dim, variant = name.split("-", 2)
    launches = record(divmod(int(capability), 10), int(head_dim), **VARIANTS[variant])
    return {kernel.fn.__name__.removesuffix("_kernel"): facts_of(kernel, *rest) for kernel, *rest in launches}


if __name__ == "__main__":
    print(json.dumps({name: facts(name) for name in sys.argv[1:]}))
