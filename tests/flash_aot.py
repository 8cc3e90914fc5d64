"""Compiles flash's Triton kernels without a GPU and prints, as JSON, what each needs.

    python tests/flash_aot.py 90-128-causal 80-64-featured-few
    python tests/flash_aot.py --entries 90-128-causal 80-64-featured-few

A name is compute capability, head dim and variant, of one part or more; all kernels that such a call launches, forward
and backward, are compiled, each once. With --entries none is, and the entries of the tables are printed whose tiles the
launches have. A process of its own, because the tests run triton in its interpreter. On CPU tensors the launchers build
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
from attnzoo.backends.triton import launch, launchers, problem, table
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

INSTRUCTIONS = ("HGMMA", "WARPGROUP", "HMMA", "UTCHMMA", "LDGSTS", "LDL", "STL")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
LENGTH = 512
TABLES = {name: kernels for name, kernels in vars(table).items() if name.isupper() and isinstance(kernels, dict)}
ENTRIES = {
    id(tile): (name, kernel, head_dim)
    for name, kernels in TABLES.items()
    for kernel, tiles in kernels.items()
    for head_dim, tile in tiles.items()
}
"""Table, kernel and largest head dim of a tile of the tables, by identity: others may equal it."""
KNOWN: dict[Any, dict[str, Any]] = {}
"""What is compiled already; other calls may launch it too."""


def featured(q_len: int = LENGTH) -> dict[str, Any]:
    """Everything that takes registers and shared memory in one call."""
    needs_grads = q_len == LENGTH
    return {
        "causal": True,
        "align": "bottom_right",
        "window": (100, None),
        "mask": torch.ones(1, 4, q_len, LENGTH, dtype=torch.bool),
        "bias": torch.zeros(1, 4, q_len, LENGTH).requires_grad_(needs_grads),
        "segment_ids": (torch.zeros(1, q_len, dtype=torch.int64), torch.zeros(1, LENGTH, dtype=torch.int64)),
        "softcap": 5.0,
        "sinks": torch.zeros(4).requires_grad_(needs_grads),
        "dropout_p": 0.5,
        "dropout_seed": 1,
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 0)},
    "segments": {"segment_ids": torch.zeros(1, LENGTH, dtype=torch.int64)},
    "grouped": {"causal": True, "kv_heads": 1},
    "featured": {"is_featured": True},
    "fp32": {"dtype": torch.float32},
    "decode": {"q_len": 1, "kv_heads": 1},
    "few": {"q_len": 48, "kv_heads": 1},
    "narrow": {"value_dim": 17},
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
    is_featured: bool = False,
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
    options |= featured(q_len) if is_featured else {}
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
    key = (source.hash(), target, plan.tile)
    if key not in KNOWN:
        KNOWN[key] = measured(triton.compile(source, target=target, options=plan.tile.options))
    return KNOWN[key]


def measured(compiled: Any) -> dict[str, Any]:
    """What one compiled kernel needs, and its instructions."""
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


def launches_of(name: str) -> dict[str, tuple[Any, ...]]:
    """The launches of the call that a name stands for, by kernel."""
    capability, head_dim, *parts = name.split("-")
    options: dict[str, Any] = {}
    for part in parts:
        options |= VARIANTS[part]
    launches = record(divmod(int(capability), 10), int(head_dim), **options)
    return {kernel.fn.__name__.removesuffix("_kernel"): (kernel, *rest) for kernel, *rest in launches}


def facts(name: str) -> dict[str, Any]:
    launches = launches_of(name).items()
    return {called: facts_of(kernel, plan, *rest) | {"rows": score_rows(called, plan.tile)} for called, (kernel, plan, *rest) in launches}


def score_rows(kernel: str, tile: table.Tile) -> int:
    """Rows of the products that are scores, which are keys where the gradients of keys are summed."""
    return tile.block_n if kernel == "backward_keys" else tile.block_m


def entries(name: str) -> list[str]:
    """The entries of the tables whose tiles the call's kernels have."""
    found = [entry_of(kernel, plan.tile) for kernel, (_, plan, *_) in launches_of(name).items()]
    return [entry for entry in found if entry is not None]


def entry_of(kernel: str, tile: table.Tile) -> str | None:
    """The entry that holds this tile for the kernel, in words; None where no table does."""
    name, held_for, head_dim = ENTRIES.get(id(tile), ("", "", 0))
    return f"{name} {held_for} {head_dim}" if held_for.removesuffix("_wide") == kernel.removesuffix("_wide") else None


if __name__ == "__main__":
    is_listing = sys.argv[1] == "--entries"
    of = entries if is_listing else facts
    print(json.dumps({name: of(name) for name in sys.argv[1 + is_listing :]}))
