"""Mutants of the Triton kernels, in the interpreter: each is caught by its case, or by the memory checker; the original by none."""

from __future__ import annotations

import os

import pytest
from mutants.kernels import KERNEL_MUTANTS, fails, kernel_catcher, mutated, touches_foreign_memory
from mutants.table import REGENERATE, committed, kernel_cells

pytest.importorskip("triton", reason="triton is not installed (extra triton)")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("triton compiles its kernels in this process (a GPU is here)", allow_module_level=True)

# of numpy, which the interpreter computes with: of lanes that are masked out afterwards, and of what triton takes from an array
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),  # a mutant that reads past its rows may find NaN there
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

CASES = {(mutant.caught_by, mutant.in_memory, mutant.package): None for mutant in KERNEL_MUTANTS}


@pytest.mark.parametrize(("case", "in_memory", "package"), CASES, ids=[f"{case}{'-in-memory' * in_memory}" for case, in_memory, _ in CASES])
def test_the_original_passes_every_case_that_catches_a_mutant(case, in_memory, package, tmp_path):
    with mutated(tmp_path, None, package) as backend:
        assert not (touches_foreign_memory(backend, case) if in_memory else fails(backend, case))


@pytest.mark.parametrize("mutant", KERNEL_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught_as_the_table_says(mutant, tmp_path):
    found = kernel_cells(mutant, kernel_catcher(mutant, tmp_path))
    assert [found[0], *committed().get(found[0], [])] == found, f"docs/mutants.md is out of date; write it anew: {REGENERATE}"


def test_the_table_names_every_mutant_and_no_other():
    names = [mutant.name for mutant in KERNEL_MUTANTS]
    listed = [name.removeprefix("kernel ") for name in committed() if name.startswith("kernel ")]
    assert listed == names, f"docs/mutants.md is out of date; write it anew: {REGENERATE}"
