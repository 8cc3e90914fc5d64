"""Right before fast: the conformance kit's rule on the results of a workload, of any length.

Every head is judged in every element, or of problems too large for that as many heads as are affordable, evenly spread; no
element of any head may be infinite or nan. The float64 truth and the yardstick come from the kit, some heads and a range of
queries at a time: dk and dv, and what rounding may cost them, are sums over queries, so no `Sq x Skv` matrix is held.
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
from attnzoo.testing.failure import ConformanceError, require
from attnzoo.testing.inputs import Call

__all__ = ["assert_right"]

LARGEST = {"cpu": 2**20, "cuda": 2**25}  # scores held at once, of each of some twenty float64 matrices
JUDGED = {"cpu": 2**23, "cuda": 2**29}  # scores that a problem's truth may take: seconds
FEWEST, MOST = 2, 256  # key-value heads, however long or short they are

Parts = dict[str, list[list[Tensor]]]
"""Name -> truth, yardstick, A and A', of each range of queries; one that sums them up for dk and dv."""


def assert_right(
    workload: Workload, spec: AttentionSpec, inputs: dict[str, Tensor], layout: BlockLayout | None, found: dict[str, Tensor]
) -> None:
    """Judge the results of one call.

    Args:
        spec: of the call.
        inputs: q, k, v, grad_o.
        layout: of the call.
        found: o, and dq, dk, dv where the backward ran; or some of them.

    Raises:
        ConformanceError: a result is beyond the accuracy rule, or of another dtype or shape; the message names it.
    """
    for name, tensor in found.items():
        like = inputs[{"o": "grad_o"}.get(name, name.removeprefix("d"))]
        require(tensor.dtype == spec.dtype, f"{name} is {tensor.dtype}, q is {spec.dtype}")
        require(tensor.shape == like.shape, f"{name} has shape {tuple(tensor.shape)}, it should have {tuple(like.shape)}")
        require(bool(tensor.isfinite().all()), f"{name} is not finite in {int((~tensor.isfinite()).sum())} of {tensor.numel()} elements")
    heads = judged_heads(workload, spec.device.type)
    step = max(1, LARGEST.get(spec.device.type, LARGEST["cpu"]) // (spec.group * spec.q_len * spec.kv_len))
    for start in range(0, len(heads), step):
        chosen = heads[start : start + step]
        _judge(spec, {name: _of_heads(spec, tensor, chosen) for name, tensor in {**inputs, **found}.items()}, layout, tuple(found), chosen)


def judged_heads(workload: Workload, device: str) -> list[int]:
    """Of the `batch * kv_heads` key-value heads: all, or as many as can be afforded, from the first to the last."""
    count = workload.batch * workload.kv_heads
    scores = workload.heads // workload.kv_heads * workload.length * workload.kv_length
    affordable = min(max(FEWEST, JUDGED.get(device, JUDGED["cpu"]) // scores), MOST)
    if affordable >= count:
        return list(range(count))
    return [round(place * (count - 1) / (affordable - 1)) for place in range(affordable)]


def _of_heads(spec: AttentionSpec, tensor: Tensor, heads: list[int]) -> Tensor:
    """`(B, H, S, D)` -> `(len(heads), H / kv_heads, S, D)`: key-value heads as a batch, each with its query heads."""
    by_head: Tensor = tensor.detach().unflatten(1, (spec.kv_heads, -1))
    return by_head.flatten(0, 1)[heads]


def _judge(spec: AttentionSpec, of: dict[str, Tensor], layout: BlockLayout | None, names: tuple[str, ...], heads: list[int]) -> None:
    grads = tuple(name for name in ("q", "k", "v") if f"d{name}" in names)
    parts: Parts = {}
    for call in _calls(spec, of, layout, grads, heads):
        truth, measured = oracle.solve(call), yardstick.solve(call).named()
        for name, expected in truth.results.named().items():
            found = [expected, measured[name], *truth.amounts[name]]
            if name in ("dk", "dv") and name in parts:
                found = [one + other for one, other in zip(parts[name][0], found)]
                parts[name] = []
            parts.setdefault(name, []).append(found)
    for name in names:
        expected, by_yardstick, first, second = [torch.cat(pieces, 2) for pieces in zip(*parts[name])]
        for each in range(len(heads)):  # alone: one head's large numbers excuse no other's error
            amounts = (first[each], second[each])
            try:
                assert_within_budget(of[name][each], expected[each], by_yardstick[each].to(spec.dtype), amounts, name, dtype=spec.dtype)
            except ConformanceError as error:
                batch, head = divmod(heads[each], spec.kv_heads)
                raise ConformanceError(f"{error}, in batch {batch}, key-value head {head}") from None


def _calls(
    spec: AttentionSpec, of: dict[str, Tensor], layout: BlockLayout | None, grads: tuple[str, ...], heads: list[int]
) -> Iterator[Call]:
    """A call for each range of queries; its k and v are wide, so that the yardstick's sums are rounded once, at the end."""
    k, v = (of[name].to(spec.accumulator_dtype) for name in ("k", "v"))
    step = max(1, LARGEST.get(spec.device.type, LARGEST["cpu"]) // (spec.kv_len * spec.group * len(heads)))
    for start in range(0, spec.q_len, step):
        rows = slice(start, min(start + step, spec.q_len))
        mask = _pairs(spec, layout, rows, heads)
        options = {} if mask is None else {"mask": mask}
        grad_o = of["grad_o"][:, :, rows] if grads else None
        yield Call(of["q"][:, :, rows], k, v, options, grads, grad_o, None)


def _pairs(spec: AttentionSpec, layout: BlockLayout | None, rows: slice, heads: list[int]) -> Tensor | None:
    """Bool, broadcastable to `(len(heads), group, rows, Skv)`: the pairs that attend; None where all do."""
    kept = band_mask(spec, rows, slice(0, spec.kv_len), spec.device)
    if layout is None:
        return kept
    i = torch.arange(rows.start, rows.stop, device=spec.device)[:, None]
    j = torch.arange(spec.kv_len, device=spec.device)[None, :]
    of_all = torch.tensor(heads, device=spec.device)[:, None, None, None]
    b, h = of_all // spec.kv_heads, of_all % spec.kv_heads * spec.group + torch.arange(spec.group, device=spec.device)[:, None, None]
    by_layout = mask_mod_of(layout)(b.expand_as(h), h, i, j)
    return by_layout if kept is None else by_layout & kept
