"""How a tensor lies in memory: dim order, slack, steps, expanded dims, offsets. Slack is poisoned with NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["STORAGES", "Storage", "bits", "bytes_of", "stored"]

POISON_BYTE = 0xFF  # NaN in every float dtype, -1 in every integer dtype, True in bool
ALIGNMENT = 64  # elements in front of offset 0, so that an offset is what it says
HUGE = 2**31


@dataclass(frozen=True)
class Storage:
    """A layout in memory of a tensor whose dims are named b, h, s, d.

    Attributes:
        order: dims from slowest to fastest in memory, each of them once.
        pad: dim letter -> slack elements behind the logical ones.
        lead: dim letter -> slack elements in front.
        step: dim letter -> every n-th element is a logical one.
        expand: dims that are stored once and repeated with stride 0.
        overlap: rows along s begin one element apart.
        far: dim letter -> its stride, so large that an index times it is beyond 2^31; the memory between is never touched.
    """

    order: str = "bhsd"
    pad: tuple[tuple[str, int], ...] = ()
    lead: tuple[tuple[str, int], ...] = ()
    step: tuple[tuple[str, int], ...] = ()
    expand: str = ""
    overlap: bool = False
    far: tuple[tuple[str, int], ...] = ()


STORAGES: dict[str, Storage] = {
    "contiguous": Storage(),
    "bshd": Storage("bshd"),
    "sbhd": Storage("sbhd"),
    "hbsd": Storage("hbsd"),
    "packed": Storage("bshd", lead=(("h", 2),), pad=(("h", 3),)),
    "packed_dim": Storage("bshd", lead=(("d", 8),), pad=(("d", 16),)),
    "slack": Storage(lead=(("s", 3),), pad=(("s", 9),)),
    "odd_rows": Storage(pad=(("d", 3),)),
    "step": Storage(step=(("s", 2),)),
    "step_heads": Storage(step=(("h", 2),)),
    "last_dim": Storage("bhds"),
    "step_dim": Storage(step=(("d", 2),)),
    "expand_batch": Storage(expand="b"),
    "expand_heads": Storage(expand="h"),
    "expand_length": Storage(expand="s"),
    "expand_all": Storage(expand="bhs"),
    "overlap": Storage(overlap=True),
    "far_batches": Storage(far=(("b", 2**31),)),
    "far_rows": Storage(far=(("s", 2**26),)),
}
"""Name -> layout in memory. Every one gives a legal input; some give equal values along a dim."""


def stored(values: Tensor, storage: str, *, offset: int = 0) -> Tensor:
    """A tensor of the shape of `values`, with its numbers, laid out in memory as named.

    Args:
        values: 4 dims, any of them 0; the dims are named b, h, s, d.
        storage: a key of `STORAGES`.
        offset: elements by which the first one is moved from an aligned address.
    """
    rule = STORAGES[storage]
    sizes = dict(zip("bhsd", values.shape))
    pad, lead, step = dict(rule.pad), dict(rule.lead), dict(rule.step)
    strides: dict[str, int] = {}
    start, extent = ALIGNMENT + offset, 1
    for dim in reversed(rule.order):
        strides[dim] = 0 if dim in rule.expand else extent * step.get(dim, 1)
        start += extent * lead.get(dim, 0)
        if dim not in rule.expand:
            extent *= max(1, lead.get(dim, 0) + sizes[dim] * step.get(dim, 1) + pad.get(dim, 0))
    if rule.overlap:
        strides["s"] = 1
        extent = extent + sizes["s"]
    for dim, stride in rule.far:
        strides[dim] = stride
        extent = extent + stride * max(0, sizes[dim] - 1)
    buffer = torch.empty(start + extent + ALIGNMENT, dtype=values.dtype, device=values.device)
    if not rule.far:
        buffer.view(torch.uint8).fill_(POISON_BYTE)
    tensor = torch.as_strided(buffer, tuple(values.shape), [strides[dim] for dim in "bhsd"], start)
    if values.numel():
        _fill(tensor, values, rule)
    return tensor


def _fill(tensor: Tensor, values: Tensor, rule: Storage) -> None:
    for place, dim in enumerate("bhsd"):
        if dim in rule.expand:
            tensor, values = tensor.narrow(place, 0, 1), values.narrow(place, 0, 1)
    if rule.overlap:
        for row in range(values.shape[2]):  # later rows overwrite all but the first element of earlier ones
            tensor[:, :, row] = values[:, :, row]
        return
    tensor.copy_(values)


def bits(tensor: Tensor) -> Tensor:
    """The logical elements as a flat uint8 tensor: equal exactly where every bit is."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def bytes_of(tensor: Tensor) -> Tensor:
    """A copy of the bits of a tensor: of its whole memory, slack included, unless that is huge."""
    storage = tensor.untyped_storage()
    if storage.nbytes() > HUGE:
        return bits(tensor).clone()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(storage).clone()
