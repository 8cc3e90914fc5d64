"""flash's Triton kernels compiled without a GPU: spills, serialised products, shared memory, tensor-core instructions."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import compile_all, needs_triton, triton_problems

SCRIPT = Path(__file__).with_name("flash_aot.py")

# Together these calls take every tile of the tables.
CALLS = ("causal", "decode", "few", "featured", "featured-decode", "featured-few", "fp32-featured", "fp32-decode", "fp32-few")
CAPABILITIES = {"80": CALLS, "89": CALLS[3:], "90": CALLS, "100": CALLS}  # on sm_89 plain and featured calls share their tiles
HEAD_DIMS = (64, 128, 256)
# What else a call may be. Not at every capability and head dim: those left out differ from a neighbour by a number alone.
VARIATIONS = (
    ("90-64-full", "90-64-segments", "90-64-fp32", "90-33-narrow", "90-33-narrow-few"),
    ("90-128-full", "90-128-window", "90-128-grouped", "90-100-narrow", "89-128-causal"),
)
PROCESSES = (  # one process a line
    *[tuple(f"{capability}-{dim}-{call}" for call in calls) for capability, calls in CAPABILITIES.items() for dim in HEAD_DIMS],
    *VARIATIONS,
)

# Bytes of stack that may be used under Triton 3.6 and 3.7, kernel -> bytes. None elsewhere.
SPILLS: dict[str, dict[str, int]] = {
    "80-64-causal": {"backward_keys": 32, "backward_queries": 32},
    "80-64-featured": {"backward_keys": 576, "backward_queries": 160, "backward_bias": 32},
    "80-64-featured-few": {"split": 64},
    "80-64-fp32-featured": {"forward": 32, "backward_keys": 640, "backward_queries": 32},
    "80-64-fp32-few": {"split": 32},
    "80-128-causal": {"forward": 32},
    "80-128-featured": {"forward": 288, "backward_keys": 416, "backward_queries": 448, "backward_bias": 384},
    "80-128-featured-few": {"split": 1824},
    "80-128-fp32-featured": {"backward_keys": 640},
    "80-128-fp32-few": {"split": 736},
    "80-256-causal": {"forward": 64},
    "80-256-few": {"split": 64},
    "80-256-featured": {"forward": 224, "backward_keys": 416, "backward_queries": 32, "backward_bias": 96},
    "80-256-featured-decode": {"split": 256},
    "80-256-featured-few": {"split": 96},
    "80-256-fp32-featured": {"forward": 32, "backward_keys": 3264},
    "80-256-fp32-decode": {"split": 32},
    "80-256-fp32-few": {"split": 32},
    "89-64-featured": {"forward": 480, "norms": 192, "backward_keys": 256, "backward_queries": 192, "backward_bias": 32},
    "89-64-featured-few": {"split": 64},
    "89-64-fp32-featured": {"forward": 32, "backward_keys": 544, "backward_bias": 32},
    "89-128-featured": {"forward": 128, "backward_keys": 224, "backward_queries": 64},
    "89-128-featured-decode": {"split": 32},
    "89-128-featured-few": {"split": 576},
    "89-128-fp32-featured": {"forward": 512, "norms": 352, "backward_keys": 608, "backward_bias": 704},
    "89-128-fp32-few": {"split": 768},
    "89-256-featured": {"forward": 160, "backward_keys": 32},
    "89-256-featured-few": {"split": 384},
    "89-256-fp32-featured": {"forward": 3264, "backward_keys": 3200},
    "89-256-fp32-decode": {"split": 32},
    "89-256-fp32-few": {"split": 2880},
    "90-64-decode": {"split": 32},
    "90-64-featured": {"backward_keys": 416, "backward_queries": 96},
    "90-64-featured-few": {"split": 64},
    "90-64-fp32-featured": {"forward": 64, "backward_keys": 640, "backward_bias": 32},
    "90-128-causal": {"backward_keys": 64},
    "90-128-featured": {"forward": 64, "backward_keys": 544, "backward_queries": 416, "backward_bias": 64},
    "90-128-featured-decode": {"split": 64},
    "90-128-featured-few": {"split": 1984},
    "90-128-fp32-featured": {"norms": 320, "backward_keys": 704, "backward_bias": 512},
    "90-128-fp32-few": {"split": 864},
    "90-256-causal": {"backward_keys": 224, "backward_queries": 288},
    "90-256-featured": {"forward": 224, "backward_keys": 1312, "backward_queries": 608, "backward_bias": 96},
    "90-256-featured-decode": {"split": 320},
    "90-256-featured-few": {"split": 320},
    "90-256-fp32-featured": {"norms": 32, "backward_keys": 3200},
    "90-256-fp32-decode": {"split": 32},
    "90-256-fp32-few": {"split": 2880},
    "100-64-decode": {"split": 32},
    "100-64-featured": {"backward_keys": 352},
    "100-64-fp32-featured": {"forward": 64, "backward_keys": 640},
    "100-128-causal": {"forward": 160},
    "100-128-featured": {"delta": 32, "backward_keys": 32},
    "100-128-featured-decode": {"split": 32},
    "100-128-featured-few": {"split": 1920},
    "100-128-fp32-featured": {"norms": 352, "backward_keys": 704, "backward_bias": 544},
    "100-128-fp32-few": {"split": 960},
    "100-256-causal": {"forward": 64, "backward_queries": 32},
    "100-256-featured": {"forward": 96, "backward_keys": 32, "backward_bias": 96},
    "100-256-featured-decode": {"split": 320},
    "100-256-featured-few": {"split": 64},
    "100-256-fp32-featured": {"backward_keys": 1728},
    "100-256-fp32-decode": {"split": 32},
    "100-256-fp32-few": {"split": 2848},
    "90-64-fp32": {"forward": 32, "backward_keys": 288},
    "90-33-narrow-few": {"split": 352},  # rows of odd length come in by single elements, each with its address
    "90-128-full": {"backward_keys": 32},
    "90-128-window": {"forward": 96, "backward_keys": 128},
    "90-128-grouped": {"backward_keys": 96},
    "90-100-narrow": {"forward": 128, "backward_keys": 64},
    "89-128-causal": {"forward": 32, "backward_queries": 32},
}


def problems_of(name: str, kernel: str, facts: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel."""
    capability, _, variant = name.split("-", 2)
    spill = SPILLS.get(name, {}).get(kernel, 0)
    return triton_problems(kernel, facts, capability=capability, variant=variant, spill=spill, rows=facts["rows"])


@pytest.mark.kernels
@needs_triton
@pytest.mark.parametrize("names", PROCESSES, ids=[names[0] for names in PROCESSES])
def test_kernels_compile_tight(names: tuple[str, ...]) -> None:
    compiled = compile_all(SCRIPT, names)
    found = [
        f"{name} {kernel}: {p}" for name in names for kernel, facts in compiled[name].items() for p in problems_of(name, kernel, facts)
    ]
    assert not found, "\n".join(found)
    kernels = {kernel for name in names for kernel in compiled[name]}
    assert kernels >= {"forward", "delta", "backward_keys", "backward_queries"}, f"only {sorted(kernels)} were compiled"


@needs_triton
def test_every_tile_of_the_tables_is_compiled() -> None:
    names = tuple(name for names in PROCESSES for name in names)
    compiled = {(name.split("-")[0], entry) for name, entries in compile_all(SCRIPT, ("--entries", *names)).items() for entry in entries}
    missing = sorted(f"sm_{capability} {entry}" for capability, entry in entries_in_use() - compiled)
    assert not missing, f"compiled by none of the calls, name one that takes it: {', '.join(missing)}"


def entries_in_use() -> set[tuple[str, str | None]]:
    """Capability and entry of every tile that a call can get from the tables."""
    from flash_aot import ENTRIES, entry_of

    from attnzoo.backends.triton.table import tile_for

    _, kernels, head_dims = [set(parts) for parts in zip(*ENTRIES.values(), strict=True)]
    calls = itertools.product(CAPABILITIES, kernels, head_dims, (torch.bfloat16, torch.float32), (False, True))
    return {
        (capability, entry_of(kernel, tile_for(kernel, head_dim, head_dim, dtype, divmod(int(capability), 10), is_featured)))
        for capability, kernel, head_dim, dtype, is_featured in calls
        if is_featured or kernel != "backward_bias"  # a bias makes a call a featured one
    }


def test_problems_are_seen() -> None:
    counts = {"HGMMA": 8, "WARPGROUP": 16, "HMMA": 0}
    facts = {"rows": 64, "spilled_bytes": 8, "shared_bytes": 232449, "counts": counts, "unset": ["UR16"], "doubled": ["64x16"]}
    assert len(problems_of("90-64-full", "forward", facts)) == 5
    assert problems_of("90-128-decode", "split", facts | {"rows": 16})[-1].startswith("no HMMA")
