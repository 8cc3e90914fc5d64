"""Right before fast: the conformance kit's rule on the results of a workload, of any length.

The first and the last key-value head, with all their query heads, are judged in every element. The float64 truth and
the yardstick come from the kit, a range of queries at a time: dk and dv, and what rounding may cost them, are sums over
queries, so no `Sq x Skv` matrix is held.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnzoo.bench.workload import Workload
from attnzoo.layout import BlockLayout
from attnzoo.layouts.convert import mask_mod_of
from attnzoo.masks import band_mask
from attnzoo.spec import AttentionSpec
from attnzoo.testing import oracle, yardstick
from attnzoo.testing.budget import assert_within_budget
from attnzoo.testing.inputs import Call

__all__ = ["assert_right"]

LARGEST = {"cpu": 2**20, "cuda": 2**25}  # scores held at once, of each of some twenty float64 matrices

Parts = dict[str, list[list[Tensor]]]
"""Name -> truth, yardstick, A and A', of each range of queries; one that sums them up for dk and dv."""


def assert_right(workload: Workload, spec: AttentionSpec, inputs: dict[str, Tensor], layout: BlockLayout | None, o: Tensor) -> None:
    """Judge the results of one call.

    Args:
        spec: of the call.
        inputs: q, k, v, grad_o, and dq, dk, dv where the backward ran.
        layout: of the call.
        o: its output.

    Raises:
        ConformanceError: a result is beyond the accuracy rule; the message names it.
    """
    grads = tuple(name for name in ("q", "k", "v") if f"d{name}" in inputs)
    heads = {(0, 0), (workload.batch - 1, workload.kv_heads - 1)}
    for batch, kv_head in sorted(heads):
        queries = (slice(batch, batch + 1), slice(kv_head * spec.group, (kv_head + 1) * spec.group))
        keys = (slice(batch, batch + 1), slice(kv_head, kv_head + 1))
        of = {name: tensor[keys if name.lstrip("d") in ("k", "v") else queries].detach() for name, tensor in {**inputs, "o": o}.items()}
        _judge(spec, of, layout, grads, batch, range(*queries[1].indices(spec.q_heads)))


def _judge(
    spec: AttentionSpec, of: dict[str, Tensor], layout: BlockLayout | None, grads: tuple[str, ...], batch: int, heads: range
) -> None:
    parts: Parts = {}
    for call in _calls(spec, of, layout, grads, batch, heads):
        truth, measured = oracle.solve(call), yardstick.solve(call).named()
        for name, expected in truth.results.named().items():
            found = [expected, measured[name], *truth.amounts[name]]
            if name in ("dk", "dv") and name in parts:
                found = [one + other for one, other in zip(parts[name][0], found)]
                parts[name] = []
            parts.setdefault(name, []).append(found)
    for name, ranges in parts.items():
        expected, by_yardstick, first, second = [torch.cat(pieces, 2) for pieces in zip(*ranges)]
        assert_within_budget(of[name], expected, by_yardstick.to(spec.dtype), (first, second), name, dtype=spec.dtype)


def _calls(
    spec: AttentionSpec, of: dict[str, Tensor], layout: BlockLayout | None, grads: tuple[str, ...], batch: int, heads: range
) -> Iterator[Call]:
    """A call for each range of queries; its k and v are wide, so that the yardstick's sums are rounded once, at the end."""
    k, v = (of[name].to(spec.accumulator_dtype) for name in ("k", "v"))
    step = max(1, LARGEST.get(spec.device.type, 2**20) // (spec.kv_len * spec.group))
    for start in range(0, spec.q_len, step):
        rows = slice(start, min(start + step, spec.q_len))
        mask = _pairs(spec, layout, rows, batch, heads)
        options = {} if mask is None else {"mask": mask}
        grad_o = of["grad_o"][:, :, rows] if grads else None
        yield Call(of["q"][:, :, rows], k, v, options, grads, grad_o, None)


def _pairs(spec: AttentionSpec, layout: BlockLayout | None, rows: slice, batch: int, heads: range) -> Tensor | None:
    """Bool, broadcastable to `(1, heads, rows, Skv)`: the pairs that attend; None where all do."""
    kept = band_mask(spec, rows, slice(0, spec.kv_len), spec.device)
    if layout is None:
        return kept
    i = torch.arange(rows.start, rows.stop, device=spec.device)[:, None]
    j = torch.arange(spec.kv_len, device=spec.device)[None, :]
    h = torch.arange(heads.start, heads.stop, device=spec.device)[:, None, None]
    by_layout = mask_mod_of(layout)(torch.full_like(h, batch), h, i, j)[None]
    return by_layout if kept is None else by_layout & kept
