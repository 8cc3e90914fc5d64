"""Mutants of the Triton kernels of flash and block_sparse: one change of their source, run by Triton's interpreter.

Imports no triton.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import attnzoo
from attnzoo.testing.case import run_case
from attnzoo.testing.cases import case_named
from attnzoo.testing.failure import ConformanceError

if TYPE_CHECKING:
    from attnzoo.backends.flash import Flash

BACKENDS = Path(attnzoo.__file__).parent / "backends"


@dataclass(frozen=True)
class KernelMutant:
    """One change of one file.

    Attributes:
        wrong: what the change does, as a sentence.
        file: of the kernels; old: a text that occurs in it once; new: what stands there instead.
        caught_by: id of the case that must catch it.
        in_memory: it is the memory checker that must catch it, on that case.
        package: of the kernels, below attnzoo.backends.
    """

    name: str
    wrong: str
    file: str
    old: str
    new: str
    caught_by: str
    in_memory: bool = False
    package: str = "triton"

    def source(self) -> str:
        text = (BACKENDS / self.package / self.file).read_text()
        found = text.count(self.old)
        assert found == 1, f"{self.file} holds {self.old!r} {found} times: the kernel has changed, write the mutation {self.name} anew"
        return text.replace(self.old, self.new)


@contextlib.contextmanager
def mutated(folder: Path, mutant: KernelMutant | None, kernels: str = "triton") -> Iterator[Flash]:
    """flash or block_sparse with their kernels loaded from a copy in `folder`; of None, an unchanged copy of `kernels`."""
    from attnzoo.backends.block_sparse import BlockSparse
    from attnzoo.backends.flash import Flash
    from attnzoo.backends.recompute import Gradients, empty_output

    kernels = mutant.package if mutant else kernels
    package = f"mutated_kernels_{mutant.name if mutant else 'none'}"
    launchers = _load(folder / package, package, kernels, mutant)
    original: type[Flash] = Flash if kernels == "triton" else BlockSparse

    class Mutated(original):  # type: ignore[misc, valid-type]
        def forward(self, spec, inputs):
            return launchers.forward(spec, inputs, empty_output(spec, inputs.q))

        def backward(self, spec, inputs, o, lse, grad_o, grad_lse):
            return Gradients(**launchers.backward(spec, inputs, o, lse, grad_o, grad_lse))

    try:
        yield Mutated()
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]


def _load(folder: Path, package: str, kernels: str, mutant: KernelMutant | None):
    """Write the copy, import it as a package of its own; returns its launchers."""
    folder.mkdir()
    for path in (BACKENDS / kernels).glob("*.py"):
        text = mutant.source() if mutant and path.name == mutant.file else path.read_text()
        (folder / path.name).write_text(text.replace(f"attnzoo.backends.{kernels}", package))
    spec = importlib.util.spec_from_file_location(package, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None
    sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{package}.launchers")


def kernel_catcher(mutant: KernelMutant, folder: Path) -> str:
    """What caught it: the case, and the memory checker where it is that. Raises AssertionError if nothing did."""
    with mutated(folder, mutant) as backend:
        if mutant.in_memory:
            caught = f"the memory checker on `{mutant.caught_by}`" if touches_foreign_memory(backend, mutant.caught_by) else None
        else:
            caught = f"`{mutant.caught_by}`" if fails(backend, mutant.caught_by) else None
    assert caught, f"{mutant.name} survived {mutant.caught_by}. It is wrong in this: {mutant.wrong}"
    return caught


def fails(backend: Flash, case: str) -> bool:
    """Whether the backend fails the case; a refusal is an error of ours."""
    from attnzoo.testing.subject import Subject

    try:
        outcome = run_case(Subject(backend), case_named(case), "cpu")
    except ConformanceError:
        return True
    assert outcome.kind == "passed", f"{case}: {outcome}"
    return False


def touches_foreign_memory(backend: Flash, case: str) -> bool:
    """Whether a kernel goes out of bounds in the call of the case."""
    from attnzoo.testing.inputs import make_call
    from attnzoo.testing.memory_check import MemoryFaults, checked_memory
    from attnzoo.testing.subject import Subject

    try:
        with checked_memory():
            Subject(backend).run(make_call(case_named(case).problem))
    except MemoryFaults:
        return True
    return False


KERNEL_MUTANTS = (
    KernelMutant(
        "TailMaskDeleted",
        "The keys that pad the last tile take part.",
        "steps.py",
        "    kept = j < kv_len\n",
        "    kept = j < kv_len + 16\n",
        "T10-length-17-full-fp32",
    ),
    KernelMutant(
        "RescaleDropped",
        "The forward adds a tile without rescaling what came before.",
        "steps.py",
        "v_tile, acc * alpha[:, None], PRECISION)",
        "v_tile, acc, PRECISION)",
        "T10-length-65-full-fp32",
    ),
    KernelMutant(
        "MaximumForgottenInSplit",
        "The split forward forgets the largest score of the tiles before.",
        "split.py",
        "m_i, l_i, acc = add_values(",
        "_m_i, l_i, acc = add_values(",
        "T10-length-33-full-fp32",
    ),
    KernelMutant(
        "SharesByTheirLse",
        "Shares of the keys are weighed by an lse, which under finfo.min no longer says how many keys each saw.",
        "combine.py",
        "    weights = part_sum * exp_above(part_max, pivot, 1.0, FOLDED)\n",
        "    part_lse = log_sum_exp(part_max, part_sum, FOLDED)\n    weights = tl.exp(part_lse - tl.max(part_lse, 0))\n",
        "T01-min-over-padded-keys-one-query-fp32",
    ),
    KernelMutant(
        "SumNotRescaled",
        "The sum of a row is not rescaled when its maximum rises.",
        "steps.py",
        "l_i * alpha + tl.sum(p, 1)",
        "l_i + tl.sum(p, 1)",
        "T10-length-33-full-fp32",
    ),
    KernelMutant(
        "DiagonalOfSquare",
        "The right bound leaves out the diagonal's place.",
        "steps.py",
        "(j - i <= diagonal + right)",
        "(j - i <= right)",
        "T06-causal-bottom_right-2x5-fp32",
    ),
    KernelMutant(
        "WalkEndsEarly",
        "The walk ends before the last key that a tile sees.",
        "tiles.py",
        "last + shift + after + 1), start)",
        "last + shift + after), start)",
        "T10-length-17-causal-fp32",
    ),
    KernelMutant(
        "StridesSwapped",
        "The strides of batches and heads have changed places.",
        "tiles.py",
        "pointer + batch * batch_stride + head * head_stride, row_stride",
        "pointer + batch * head_stride + head * batch_stride, row_stride",
        "T19-heads-6-2-full-fp32",
        in_memory=True,
    ),
    KernelMutant(
        "LoadMaskDeleted",
        "The last tile of rows is loaded whole.",
        "tiles.py",
        "        return tl.load(addresses, mask=in_length, other=0.0)",
        "        return tl.load(addresses)",
        "T10-length-17-full-fp32",
        in_memory=True,
    ),
    KernelMutant(
        "StoreMaskDeleted",
        "The last tile of a gradient is stored whole.",
        "tiles.py",
        "tile.to(pointer.dtype.element_ty), mask=kept)",
        "tile.to(pointer.dtype.element_ty))",
        "T10-length-17-full-fp32",
        in_memory=True,
    ),
    KernelMutant(
        "HeadDimMaskDeleted",
        "The channels that pad the head dim are stored.",
        "tiles.py",
        "(first + tl.arange(0, ROWS) < end)[:, None] & (tl.arange(0, BLOCK_D) < DIM)[None, :]",
        "(first + tl.arange(0, ROWS) < end)[:, None] & (tl.arange(0, BLOCK_D) < BLOCK_D)[None, :]",
        "T11-odd-dim-3",
        in_memory=True,
    ),
    KernelMutant(
        "MaskRowStrideDropped",
        "Every query reads the first row of the mask.",
        "steps.py",
        "address += i.to(tl.int64) * row_stride",
        "address += i.to(tl.int64) * 0",
        "T18-triangle-and-causal-5",
    ),
    KernelMutant(
        "GuardDropped",
        "A row whose first tile has no key takes -inf from -inf.",
        "steps.py",
        'pivot = tl.where(m_new == -float("inf"), 0.0, m_new)',
        "pivot = m_new",
        "T02-reported-sixteen-invalid-keys-fp32",
    ),
    KernelMutant(
        "SinkNotInSum",
        "A sink raises the maximum, but is missing in the sum.",
        "split.py",
        'l_i = tl.where(sink == -float("inf"), 0.0, 1.0)',
        'l_i = tl.where(sink == -float("inf"), 0.0, 0.0)',
        "T03-sinks-large-fp32",
    ),
    KernelMutant(
        "LseInLog2",
        "The lse stays in powers of two.",
        "steps.py",
        "(m_i + log2_sum) * LN2 if FOLDED",
        "(m_i + log2_sum) if FOLDED",
        "T32-claim-lse-forward",
    ),
    KernelMutant(
        "SplitsAveraged",
        "The shares of a split forward are averaged, not weighted by their lse.",
        "combine.py",
        "tl.sum(parts * weights[:, None], 0) / divisor",
        "tl.sum(parts, 0) / splits",
        "T06-decode-bottom_right-128-group1-fp32",
    ),
    KernelMutant(
        "SegmentWalkEndsEarly",
        "The walk leaves out the last tile that holds a segment.",
        "tiles.py",
        "end_tile * SEGMENT_TILE), start)",
        "(end_tile - 1) * SEGMENT_TILE), start)",
        "T32-claim-segments-forward",
    ),
    KernelMutant(
        "HeadDropsOutOfCounter",
        "The counter of dropout takes head 0 for every head.",
        "steps.py",
        "words = (zero + j // 4, zero + i, zero + head.to(tl.int32)",
        "words = (zero + j // 4, zero + i, zero + 0 * head.to(tl.int32)",
        "T32-claim-dropout-forward",
    ),
    KernelMutant(
        "HeadModuloInBackward",
        "dQ reads kv head h % Hkv.",
        "backward_queries.py",
        "head_of(k, batch, head // group)",
        "head_of(k, batch, head % (q_heads // group))",
        "T19-heads-6-2-full-fp32",
    ),
    KernelMutant(
        "GroupNotWalked",
        "dK and dV are those of the first query head, as often as the group has heads.",
        "backward_keys.py",
        "head = kv_head * group + step // steps if GROUPED else kv_head",
        "head = kv_head * group if GROUPED else kv_head",
        "T19-heads-2-1-full-fp32",
    ),
    KernelMutant(
        "DeltaDropped",
        "dQ is computed without the row sums.",
        "backward_queries.py",
        "ds = p * (dp - delta) * slope",
        "ds = p * dp * slope",
        "T32-plain-backward-fp32",
    ),
    KernelMutant(
        "SlopeDropped",
        "dK takes the derivative of the soft cap for 1.",
        "backward_keys.py",
        "[None, :]) * slope",
        "[None, :])",
        "T32-claim-softcap-backward",
    ),
    KernelMutant(
        "LseGradientSign",
        "The gradient of the lse is added where it is to be subtracted.",
        "delta.py",
        "        delta -= tl.load(",
        "        delta += tl.load(",
        "T32-claim-lse-backward",
    ),
    KernelMutant(
        "EmptyRowsWeighed",
        "A row with no key keeps a pivot of -inf in the backward.",
        "delta.py",
        'pivot = tl.where(lse == -float("inf"), float("inf"), lse * LOG2E if FOLDED else lse)',
        "pivot = lse * LOG2E if FOLDED else lse",
        "T01-bool-last-half-fp32",
    ),
    KernelMutant(
        "BiasGradientNotSummed",
        "The gradient of a bias that all batch entries share is that of one of them.",
        "calls.py",
        "facts.band, walk, facts.scale",
        "facts.band, (1, *walk[1:]), facts.scale",
        "T15-grads-bias-fp32",
    ),
    KernelMutant(
        "PartialMaskDeleted",
        "Every pair of a partial block takes part.",
        "tiles.py",
        "kept = kept | (is_partial == 0)",
        "kept = kept | (is_partial == is_partial)",
        "T23-pairs-17x33",
        package="block_sparse_triton",
    ),
    KernelMutant(
        "BandOfLayoutDropped",
        "A partial block that stores a band is not cut at its right bound.",
        "tiles.py",
        "kept = kept & (j - i <= high)",
        "kept = kept & (j - i <= high + 100)",
        "T23-band_rule-17x33",
        package="block_sparse_triton",
    ),
    KernelMutant(
        "BitsInTheOrderOfRows",
        "The walk along a column takes its bits in the order of the rows.",
        "schedule.py",
        "places = None if rule.bits is None else order.to(torch.int32)",
        "places = None",
        "T23-pairs-17x33",
        package="block_sparse_triton",
    ),
    KernelMutant(
        "RowsTakenForColumns",
        "dK and dV walk the lists of the rows.",
        "schedule.py",
        "columns=_lists(by_column, by_column_partial, column_work,",
        "columns=_lists(layout.full, layout.partial, row_work,",
        "T23-random-16x16",
        package="block_sparse_triton",
    ),
    KernelMutant(
        "OneRowForAll",
        "Every program of a head takes its longest row.",
        "schedule.py",
        "order = work.argsort(dim=1, descending=True, stable=True).to(torch.int32)",
        "order = work.argsort(dim=1, descending=True, stable=True).to(torch.int32) * 0",
        "T23-random-17x33",
        package="block_sparse_triton",
    ),
    KernelMutant(
        "SumOfBlocksForgotten",
        "The forward forgets the sum of the blocks' weights.",
        "forward.py",
        "m_i, l_i, acc = add_values(",
        "m_i, _l_i, acc = add_values(",
        "T23-random-64x48",
        package="block_sparse_triton",
    ),
    KernelMutant(
        "LastBlockSkipped",
        "The walk leaves out the last full block of a line.",
        "tiles.py",
        "partials + lefts + full_end - free_end, free, free_end - free\n",
        "partials + lefts + full_end - free_end, free, free_end - free - 1\n",
        "T23-random-64x48",
        package="block_sparse_triton",
    ),
    KernelMutant(
        "LastPartialBlockSkipped",
        "The walk leaves out the last partial block of a line.",
        "tiles.py",
        "partials = partial_end - partial\n",
        "partials = partial_end - partial - 1\n",
        "T23-pairs-17x33",
        package="block_sparse_triton",
    ),
    KernelMutant(
        "EdgeNotTested",
        "A full block on the call's diagonal is taken whole.",
        "tiles.py",
        "free_end = first_from(lists[1], free, full_end, bounds[2] // STEP)",
        "free_end = full_end",
        "T23-empty_rows-with-causal",
        package="block_sparse_triton",
    ),
    KernelMutant(
        "TailNotTested",
        "A full block that the end of the keys cuts is taken whole.",
        "launch.py",
        "or (free and spec.kv_len % layout.block_kv != 0)",
        "or (free and False)",
        "T23-last_column-17x33",
        package="block_sparse_triton",
    ),
    KernelMutant(
        "HeadOfLayoutDropped",
        "Every head walks the blocks of the first.",
        "tiles.py",
        "first_line = batch * batch_stride + head * head_stride",
        "first_line = batch * batch_stride",
        "T23-random-per-1h-fp32",
        package="block_sparse_triton",
    ),
    KernelMutant(
        "GroupWalksOneColumn",
        "dK and dV walk the blocks of the group's first head for all of its heads.",
        "backward_keys.py",
        "walk_of(lists, line + member * head_stride,",
        "walk_of(lists, line,",
        "T23-random-per-1h-fp32",
        package="block_sparse_triton",
    ),
    KernelMutant(
        "BiasGradientEverywhere",
        "The gradient of a bias has values where the layout has no block.",
        "tiles.py",
        "return is_full | is_partial, is_partial, partial",
        "return is_full | (is_full == 0), is_partial, partial",
        "T23-random-with-bias",
        package="block_sparse_triton",
    ),
    KernelMutant(
        "BlockLoadedBeyondTheKeys",
        "A block that the end of the keys cuts is loaded whole.",
        "tiles.py",
        "block * BLOCK + within, tl.minimum(length, (block + 1) * BLOCK), within",
        "block * BLOCK + within, (block + 1) * BLOCK, within",
        "T23-last_column-17x33",
        in_memory=True,
        package="block_sparse_triton",
    ),
)
