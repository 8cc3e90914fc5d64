"""block_sparse's Triton kernels compiled without a GPU: spills, serialised products, shared memory, tensor-core instructions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compiled import compile_all, needs_triton, triton_problems

SCRIPT = Path(__file__).with_name("block_sparse_aot.py")

PROCESSES = (  # one process a line
    ("90-64-64-random", "90-64-128-causal", "90-64-64-bits"),
    ("90-128-128-random", "90-128-128-bits", "90-128-128-grouped"),
    ("90-128-128-featured", "90-64-128-fp32"),
    ("90-64-16-featured", "80-32-16-featured"),
    ("80-64-64-causal", "80-128-128-random", "100-128-128-causal"),
)

# Bytes of stack that may be used under Triton 3.6 and 3.7, kernel -> bytes; "*" for every kernel of the call. None elsewhere.
SPILLS: dict[str, dict[str, int]] = {
    "90-128-128-random": {"backward_keys": 64},
    "90-128-128-bits": {"backward_keys": 64},
    "90-128-128-grouped": {"backward_keys": 96},
    "90-128-128-featured": {"*": 640},
    "90-64-128-fp32": {"backward_keys": 320},
    "80-32-16-featured": {"backward_keys": 32},
    "80-64-64-causal": {"backward_keys": 32},
    "80-128-128-random": {"forward": 32},
    "100-128-128-causal": {"forward": 160},
}


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


def problems_of(name: str, kernel: str, facts: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel."""
    capability, _, block, variant = name.split("-")
    allowed = SPILLS.get(name, {})
    spill = allowed.get(kernel, allowed.get("*", 0))
    return triton_problems(kernel, facts, capability=capability, variant=variant, spill=spill, rows=int(block))


def test_problems_are_seen() -> None:
    counts = {"HGMMA": 8, "WARPGROUP": 16, "HMMA": 0}
    facts = {"unset": ["UR5"], "doubled": ["64x16 with kWidth 8"], "spilled_bytes": 8, "shared_bytes": 232449, "counts": counts}
    assert len(problems_of("90-64-64-random", "forward", facts)) == 5
