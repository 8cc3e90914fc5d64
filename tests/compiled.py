"""What the tests of compiled kernels share: the process that compiles, and what is wrong with a compiled Triton kernel."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, which compiles the kernels")

SHARED_BYTES = {"80": 163 * 1024, "89": 99 * 1024, "90": 227 * 1024, "100": 227 * 1024}
SERIALISED = "featured"  # with a mask, ptxas (12.8) waits for every wgmma (C7515)
PRODUCTS = {"80": "HMMA", "89": "HMMA", "90": "HGMMA", "100": "UTCHMMA"}
MOST_ROWS_OF_HMMA = 63  # wgmma and tcgen05 take 64 and more
WITHOUT_PRODUCTS = ("delta", "combine", "segment_bounds")


def compile_all(script: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """What the script prints of these names; a process of its own, because the tests run triton in its interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, script, *names], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"compiling {', '.join(names)} failed:\n{done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def triton_problems(kernel: str, facts: dict[str, Any], *, capability: str, variant: str, spill: int, rows: int) -> list[str]:
    """What is wrong with a compiled Triton kernel; its products have so many `rows`."""
    counts, parts, found = facts["counts"], variant.split("-"), []
    if facts["spilled_bytes"] > spill:
        found.append(f"{facts['spilled_bytes']} bytes spill, {spill} allowed")
    if capability == "90" and facts["unset"]:  # where wgmma takes its descriptors from uniform registers
        found.append(f"ptxas forgot to set what it reads: {'; '.join(facts['unset'])}")
    if facts["doubled"]:
        found.append(f"products count elements twice: {'; '.join(facts['doubled'])}")
    if facts["shared_bytes"] > SHARED_BYTES[capability]:
        found.append(f"{facts['shared_bytes']} bytes of shared memory, {SHARED_BYTES[capability]} at most")
    if kernel in WITHOUT_PRODUCTS:
        return found
    if SERIALISED not in parts and counts["HGMMA"] and counts["WARPGROUP"] >= counts["HGMMA"]:
        found.append(f"ptxas serialises wgmma: {counts['WARPGROUP']} waits and fences for {counts['HGMMA']} HGMMA")
    wanted = "HMMA" if rows <= MOST_ROWS_OF_HMMA else PRODUCTS[capability]
    if "fp32" not in parts and not counts[wanted]:
        found.append(f"no {wanted}: its products don't run on tensor cores")
    return found
