"""flash's Triton kernels compiled without a GPU: spills, serialised products, shared memory, tensor-core instructions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compiled import compile_all, needs_triton, triton_problems

SCRIPT = Path(__file__).with_name("flash_aot.py")

# One process a line. Not every variant at every head dim: those left out differ from a neighbour by a number alone.
PROCESSES = (
    ("90-64-full", "90-64-causal", "90-64-segments"),
    ("90-128-full", "90-128-causal", "90-128-window"),
    ("90-128-grouped", "90-128-decode", "90-128-few", "90-256-causal"),
    ("90-64-featured", "90-128-featured", "90-64-fp32"),
    ("90-33-narrow", "90-33-narrow-few", "90-100-narrow"),
    ("80-64-causal", "80-128-causal", "80-128-featured"),
    ("89-128-causal", "89-256-featured", "100-128-causal"),
)

# Bytes of stack that may be used, kernel -> bytes; "*" for every kernel of the call. None elsewhere.
SPILLS: dict[str, dict[str, int]] = {
    "90-33-narrow-few": {"split": 288},  # rows of odd length come in by single elements, each with its address
    "90-100-narrow": {"*": 160},
    "90-64-featured": {"*": 448},
    "90-64-fp32": {"*": 512},
    "90-128-full": {"backward_keys": 16},
    "90-128-causal": {"backward_keys": 96},
    "90-128-window": {"*": 192},
    "90-128-grouped": {"backward_keys": 96},
    "90-128-featured": {"*": 640},
    "90-256-causal": {"backward_keys": 256, "backward_queries": 288},
    "80-64-causal": {"*": 32},
    "80-128-causal": {"forward": 32},
    "80-128-featured": {"*": 640},
    "89-128-causal": {"*": 32},
    "89-256-featured": {"*": 320},
    "100-128-causal": {"forward": 192},
}


def problems_of(name: str, kernel: str, facts: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel."""
    capability, _, variant = name.split("-", 2)
    allowed = SPILLS.get(name, {})
    spill = allowed.get(kernel, allowed.get("*", 0))
    instruction = "HMMA" if kernel == "split" and variant == "decode" else ""  # 16 rows: too few for wgmma
    return triton_problems(kernel, facts, capability=capability, variant=variant, spill=spill, instruction=instruction)


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


def test_problems_are_seen() -> None:
    counts = {"HGMMA": 8, "WARPGROUP": 16, "HMMA": 0}
    facts = {"spilled_bytes": 8, "shared_bytes": 232449, "counts": counts, "unset": ["UR16"], "doubled": ["64x16 with kWidth 8"]}
    assert len(problems_of("90-64-full", "forward", facts)) == 5
    assert problems_of("90-128-decode", "split", facts)[-1].startswith("no HMMA")
