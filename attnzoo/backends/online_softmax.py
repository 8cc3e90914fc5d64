"""The online softmax: softmax(S) V over tiles of keys, with a running maximum, sum and accumulator a row.

Dao et al., "FlashAttention", arXiv 2205.14135, algorithm 1. Tiles are `(n, rows, columns)`, n heads side by side.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


class SoftmaxState(NamedTuple):
    """What a row remembers of the keys it has seen.

    Attributes:
        m: `(n, rows, 1)` largest score so far, -inf before the first.
        l: `(n, rows, 1)` sum of `exp(score - m)`.
        acc: `(n, rows, Dv)` sum of `exp(score - m) * value`.
    """

    m: Tensor
    l: Tensor  # noqa: E741  the papers' letter
    acc: Tensor


def sink_state(sinks: Tensor, value_dim: int) -> SoftmaxState:
    """The state of rows that have seen their sink and nothing else; `sinks` is `(n, rows, 1)`."""
    return SoftmaxState(sinks, torch.ones_like(sinks), sinks.new_zeros(*sinks.shape[:2], value_dim))


def online_softmax_step(
    state: SoftmaxState | None, scores: Tensor, values: Tensor, kept: Tensor | None = None
) -> tuple[SoftmaxState, Tensor | None]:
    """Take in one tile of keys.

    Args:
        state: before the tile; None before the first.
        scores: `(n, rows, columns)`, -inf where a pair may not attend; overwritten, so that no tile is allocated.
        values: `(n, columns, Dv)`.
        kept: `(n, rows, columns)` 1 where dropout keeps the element, 0 where it drops it; None without dropout.

    Returns:
        The state after the tile, and `(n, rows, 1)` the factor that rescaled the old `l` and `acc` (None for the first tile).
    """
    m = scores.amax(-1, keepdim=True)
    if state is not None:
        m = torch.maximum(m, state.m)
    pivot = finite_pivot(m)
    p = exp_(scores.sub_(pivot))
    l = p.sum(-1, keepdim=True)  # noqa: E741
    if kept is not None:
        p.mul_(kept)  # after the sum: dropout leaves the denominator alone
    if state is None:
        return SoftmaxState(m, l, torch.bmm(p, values)), None
    rescale = exp_(state.m - pivot)
    return SoftmaxState(m, l.addcmul_(state.l, rescale), torch.baddbmm(state.acc * rescale, p, values)), rescale


def finish(state: SoftmaxState) -> tuple[Tensor, Tensor]:
    """Output `(n, rows, Dv)` and log-sum-exp `(n, rows, 1)`; 0 and -inf for a row that has seen no key."""
    return state.acc / positive_sum(state.l), state.m + state.l.log()


def finite_pivot(m: Tensor) -> Tensor:
    """`m`, but finite where it is -inf: `-inf - -inf` would give nan. Changes no real score: none is lower."""
    return m.clamp_min(torch.finfo(m.dtype).min)


def positive_sum(l: Tensor) -> Tensor:  # noqa: E741
    """`l`, but positive where it is 0: a row that has seen no key would give nan."""
    return l.clamp_min(torch.finfo(l.dtype).tiny)


def exp_(x: Tensor) -> Tensor:
    """`exp(x)` in place. As a power of two: torch's exp on CPU is up to 100 times slower at -inf and near underflow."""
    return x.mul_(LOG2_E).exp2_()
