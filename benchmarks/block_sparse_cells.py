"""One cell of `block_sparse_gpu.py compare`: a pattern at one length and head dim. First every contender is checked, then all
that are right are timed in alternating rounds, beside the dense forwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from block_sparse_inputs import DEVICE, FAMILIES, HEADS, Pattern, qkv
from block_sparse_peers import DENSE, SPARSE, Attend
from block_sparse_summary import OURS
from card_clock import interleaved_ms
from hopper_gpu import relative
from torch import Tensor

FORWARD_LIMIT, BACKWARD_LIMIT = 5e-3, 1e-2  # relative error in norm, bf16
ROWS_AT_ONCE = 2048


class DeviceLostError(RuntimeError):
    """A contender left the GPU context unusable."""


@dataclass(frozen=True)
class Job:
    """The cells that one process prepares and times."""

    dim: int
    length: int
    family: str

    @property
    def name(self) -> str:
        return f"D={self.dim} S={self.length} {self.family}"

    @property
    def patterns(self) -> dict[str, Callable[[int], Pattern]]:
        return FAMILIES[self.family]


@dataclass
class Prepared:
    """A checked cell: what may be timed, errors relative to float64, and why the others may not."""

    name: str
    pattern: Pattern
    forward: dict[str, Attend] = field(default_factory=dict)
    backward: dict[str, Attend] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def visible(pattern: Pattern | None, rows: slice, length: int) -> Tensor | None:
    """`(rows, length)` bool, from the pattern's blocks and the peers' form of its rule; None where all attend."""
    if pattern is None:
        return None
    layout = pattern.layout
    exists, is_full = [torch.zeros(layout.rows, layout.columns, dtype=torch.bool, device=DEVICE) for _ in range(2)]
    for lists, tables in ((layout.full, (exists, is_full)), (layout.partial, (exists,))):
        for table in tables:
            table[lists.row_of_each(), lists.indices.long()] = True
    i, j = torch.arange(length, device=DEVICE)[rows, None], torch.arange(length, device=DEVICE)[None, :]
    of_block = i // layout.block_q, j // layout.block_kv
    if pattern.mask_mod is None:
        return exists[of_block]
    kept = pattern.mask_mod(i, i, i, j)
    if bool((kept & ~exists[of_block]).any() | (~kept & is_full[of_block]).any()):
        raise AssertionError("the layout's blocks are not those of its rule")
    return kept


def truth(pattern: Pattern | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    """o, dq, dk and dv of one head, `(length, dim)` each, in float64, some rows at a time. Every row sees a key."""
    q, k, v, g = (t.detach().double() for t in (q, k, v, g))
    length, scale = len(q), q.shape[1] ** -0.5
    o, dq, dk, dv = (torch.zeros_like(q) for _ in range(4))
    for first in range(0, length, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        s = q[rows] @ k.mT * scale
        mask = visible(pattern, rows, length)
        p = torch.softmax(s if mask is None else s.masked_fill_(~mask, float("-inf")), -1)
        del s, mask
        o[rows] = p @ v
        dv += p.mT @ g[rows]
        dp = g[rows] @ v.mT
        dp -= (g[rows] * o[rows]).sum(-1, keepdim=True)
        ds = dp.mul_(p).mul_(scale)
        dq[rows] = ds @ k
        dk += ds.mT @ q[rows]
    return [o, dq, dk, dv]


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def require_device(problem: Exception) -> None:
    """Raise DeviceLostError if nothing can run any more after this exception."""
    try:
        synchronize()
    except Exception as lost:
        raise DeviceLostError(f"{type(problem).__name__}: {problem}"[:400]) from lost


def demand(what: str, error: float, limit: float) -> float:
    if not error <= limit:
        raise ArithmeticError(f"relative error of {what} is {error:.1e}, at most {limit:.0e} is right")
    return error


class Cells:
    """The tensors of a job, and its cells."""

    def __init__(self, job: Job, excluded: dict[str, str], trying: Callable[[str], None]) -> None:
        torch.manual_seed(job.dim + job.length)
        self.job, self.excluded, self.trying = job, excluded, trying
        self.leaves = list(qkv(job.length, job.dim).values())
        self.plain = [t.detach() for t in self.leaves]
        self.g = torch.randn_like(self.leaves[0])
        self.dense: dict[str, Attend] = {}
        self.dense_reasons: dict[str, str] = {}

    def guarded(self, name: str, reasons: dict[str, str], key: str, step: Callable[[], Any]) -> Any:
        """What the step gives; an exception becomes the reason of that key."""
        if name in self.excluded:
            reasons[key] = self.excluded[name]
            return None
        self.trying(name)
        try:
            found = step()
            synchronize()
            return found
        except Exception as problem:
            reasons[key] = f"{type(problem).__name__}: {problem}"[:400]
            require_device(problem)
        return None

    def prepare_dense(self) -> None:
        o = truth(None, *(t[0, -1] for t in (*self.plain, self.g)))[0]
        for name, attend in DENSE.items():

            def check(attend: Attend = attend) -> float:
                return demand("o", relative(attend(*self.plain)[0, -1], o), FORWARD_LIMIT)

            if self.guarded(name, self.dense_reasons, name, check) is not None:
                self.dense[name] = attend

    def prepare(self, name: str) -> Prepared:
        """Compile and check every contender on one pattern: its last head against float64, all heads against ours."""
        cell = Prepared(name, self.job.patterns[name](self.job.length))
        wanted = truth(cell.pattern, *(t[0, -1] for t in (*self.plain, self.g)))
        own: list[Tensor] = []
        for contender, make in SPARSE.items():
            attend = self.guarded(contender, cell.reasons, contender, partial(make, cell.pattern))
            if attend is None:
                continue
            steps = (("forward", self.forward_of, wanted[:1], cell.forward), ("backward", self.backward_of, wanted[1:], cell.backward))
            for way, step, right, accepted in steps:
                key = f"{contender} {way}"
                found = self.guarded(contender, cell.reasons, key, partial(step, attend))
                if found is None:
                    continue
                others = own[:1] if way == "forward" else own[1:]
                error = self.guarded(contender, cell.reasons, key, partial(self.worst_error, found, right, others, way))
                if error is not None:
                    cell.errors[key] = error
                    accepted[contender] = attend
                if contender == OURS:
                    own += found
        return cell

    def forward_of(self, attend: Attend) -> list[Tensor]:
        with torch.no_grad():
            return [attend(*self.plain)]

    def backward_of(self, attend: Attend) -> list[Tensor]:
        return list(torch.autograd.grad(attend(*self.leaves), self.leaves, self.g))

    def worst_error(self, found: list[Tensor], right: list[Tensor], own: list[Tensor], way: str) -> float:
        limit = FORWARD_LIMIT if way == "forward" else BACKWARD_LIMIT
        names = ("o",) if way == "forward" else ("dq", "dk", "dv")
        worst = max(demand(name, relative(one[0, -1], other), limit) for name, one, other in zip(names, found, right))
        for name, one, other in zip(names, found, own):
            demand(f"{name} of all heads against {OURS}", relative(one, other.double()), 2 * limit)
        return worst

    def backwards(self, cell: Prepared) -> dict[str, Callable[[], Any]]:
        """The backward alone of each that was right, its forward done."""
        runs: dict[str, Callable[[], Any]] = {}
        for name, attend in cell.backward.items():
            o = self.guarded(name, cell.reasons, f"{name} backward", partial(attend, *self.leaves))
            if o is not None:
                runs[name] = partial(torch.autograd.grad, o, self.leaves, self.g, retain_graph=True)
        return runs

    def repeatable(self, runs: dict[str, Callable[[], Any]], way: str, reasons: dict[str, str]) -> dict[str, Callable[[], Any]]:
        """Those that can be called twice, as a clock calls them; of the others the reason, so that they cost nobody else the cell."""

        def twice(run: Callable[[], Any]) -> bool:
            run()
            run()
            return True

        kept = {name: run for name, run in runs.items() if self.guarded(name, reasons, f"{name} {way}", partial(twice, run))}
        self.trying("")
        return kept

    def time(self, cell: Prepared) -> dict[str, Any]:
        """The row of a cell."""
        with torch.no_grad():
            runs = {name: partial(attend, *self.plain) for name, attend in (cell.forward | self.dense).items()}
            forward, late = interleaved_ms(self.repeatable(runs, "forward", cell.reasons))
        backward, late_backward = interleaved_ms(self.repeatable(self.backwards(cell), "backward", cell.reasons))
        layout = cell.pattern.layout
        return {
            "dim": self.job.dim,
            "length": self.job.length,
            "heads": HEADS,
            "layout": cell.name,
            "density": layout.density,
            "partial_blocks": len(layout.partial.indices),
            "ms": {"forward": forward, "backward": backward},
            "late": [f"{name} forward" for name in late] + [f"{name} backward" for name in late_backward],
            "errors": cell.errors,
            "reasons": cell.reasons | self.dense_reasons,
        }


JOBS = [Job(dim, length, family) for family, dim, length in itertools.product(FAMILIES, (128, 64), (32768, 8192))]
"""The most wanted first."""
