"""The order in which kernels run: forward, whole or split over the keys, and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.triton.backward_bias import backward_bias
from attnzoo.backends.triton.backward_keys import backward_keys
from attnzoo.backends.triton.backward_queries import backward_queries
from attnzoo.backends.triton.combine import MOST_SPLITS, combine
from attnzoo.backends.triton.delta import row_statistics
from attnzoo.backends.triton.forward import forward as forward_whole
from attnzoo.backends.triton.norms import row_norms
from attnzoo.backends.triton.problem import Facts, Problem
from attnzoo.backends.triton.split import split_forward
from attnzoo.backends.triton.table import Tile
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

MOST_PACKED = 64
"""Up to so many queries the heads of a group share the rows of a tile."""
FEWEST_BLOCKS = 4
"""A split has at least so many tiles of keys."""


def forward(spec: AttentionSpec, inputs: AttentionInputs, o: Tensor) -> tuple[Tensor, Tensor]:
    """Fill `o`; returns it and the lse."""
    lse = torch.empty(spec.batch, spec.q_heads, spec.q_len, dtype=torch.float32, device=spec.device)
    with on_device(spec.device):
        problem = Problem(spec, inputs)
        plan = split_plan(problem.facts)
        if plan is None:
            forward_whole(problem, o, lse)
            return o, lse
        tile, splits = plan
        if splits == 1:
            split_forward(problem, tile, 1, o[None], lse[None], None)
            return o, lse
        parts = torch.empty(splits, spec.batch, spec.q_heads, spec.q_len, spec.value_dim, dtype=torch.float32, device=spec.device)
        maxima, sums = torch.empty(2, splits, *lse.shape, dtype=torch.float32, device=spec.device)
        split_forward(problem, tile, splits, parts, maxima, sums)
        combine(problem, parts, maxima, sums, o, lse)
    return o, lse


@lru_cache(maxsize=1024)
def split_plan(facts: Facts) -> tuple[Tile, int] | None:
    """Tile and number of splits where few queries or few heads would leave the card idle, else None."""
    spec = facts.spec
    heads = spec.batch * spec.q_heads
    processors = processors_of(spec.device)
    whole_tiles = heads * -(-spec.q_len // facts.tile("forward").block_m)
    if spec.q_len > MOST_PACKED and 2 * whole_tiles > processors:
        return None
    rows = spec.q_len * spec.group
    tile = facts.tile("split" if rows <= facts.tile("split").block_m else "split_wide")
    tiles = heads // spec.group * -(-rows // tile.block_m)
    blocks = -(-spec.kv_len // tile.block_n)
    most = min(MOST_SPLITS, max(1, blocks // FEWEST_BLOCKS))
    splits = best_splits(tiles, most, 2 * processors)
    return None if splits == 1 and spec.q_len > MOST_PACKED else (tile, splits)


def best_splits(tiles: int, most: int, slots: int) -> int:
    """The smallest number of splits that keeps the slots nearly as busy as the best one does."""
    if not 0 < tiles < slots:
        return 1
    busy = {splits: (tiles * splits / slots) / -(-tiles * splits // slots) for splits in range(1, most + 1)}
    return next(splits for splits, share in busy.items() if share >= 0.85 * max(busy.values()))


@dataclass(frozen=True)
class BackwardKernels:
    """What the backward runs of one set of kernels; each takes what `problem` makes of spec and inputs."""

    problem: type[Problem]
    row_norms: Callable[..., Tensor | None]
    keys: Callable[..., None]
    queries: Callable[..., None]
    bias: Callable[..., Tensor]


KERNELS = BackwardKernels(Problem, row_norms, backward_keys, backward_queries, backward_bias)


def backward(
    spec: AttentionSpec,
    inputs: AttentionInputs,
    o: Tensor,
    lse: Tensor,
    grad_o: Tensor,
    grad_lse: Tensor | None,
    kernels: BackwardKernels = KERNELS,
) -> dict[str, Tensor]:
    """The gradients that `spec.grads` names; each kernel writes its own results, no atomics, so equal calls give equal bits."""
    if grad_o.stride(-1) != 1 and spec.value_dim > 1:
        grad_o = grad_o.contiguous()
    grads: dict[str, Any] = {name: empty_rows_like(getattr(inputs, name)) for name in spec.grads if name in ("q", "k", "v")}
    with on_device(spec.device):
        problem = kernels.problem(spec, inputs)
        stats, grad_sinks = row_statistics(problem, o, grad_o, lse, grad_lse, kernels.row_norms(problem, lse))
        if "k" in grads or "v" in grads:
            kernels.keys(problem, grad_o, stats, grads.get("k"), grads.get("v"))
        if "q" in grads:
            kernels.queries(problem, grad_o, stats, grads["q"])
        if "bias" in spec.grads:
            grads["bias"] = kernels.bias(problem, grad_o, stats)
    if grad_sinks is not None:
        grads["sinks"] = grad_sinks
    return grads


def empty_rows_like(tensor: Tensor) -> Tensor:
    """Uninitialised, in the memory order of `tensor`, with neighbours in the last dim."""
    result = torch.empty_like(tensor)
    return result if result.stride(-1) == 1 or result.shape[-1] == 1 else torch.empty_like(tensor, memory_format=torch.contiguous_format)


@lru_cache(maxsize=64)
def processors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


NOWHERE_ELSE = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensors' device the current one, which is where Triton launches."""
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return NOWHERE_ELSE
    return torch.cuda.device(device)
