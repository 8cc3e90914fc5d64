"""Seeded masks, biases, segment ids and sinks that hit a family of faults."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BIASES", "MASKS", "SEGMENTS", "SINKS"]

Shape = tuple[int, int, int, int]


def _uniform(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng)


def _normal(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng)


def _queries(shape: Shape) -> Tensor:
    return torch.arange(shape[2])[None, None, :, None].expand(shape)


def _keys(shape: Shape) -> Tensor:
    return torch.arange(shape[3])[None, None, None, :].expand(shape)


def _lengths(shape: Shape) -> Tensor:
    """A different number of real keys for each batch entry and head."""
    batch, heads = shape[:2]
    cut = 3 * torch.arange(batch)[:, None] + torch.arange(heads)[None, :] + 1
    return (shape[3] - cut)[:, :, None, None]


MASKS: dict[str, Callable[[Shape, torch.Generator, float], Tensor]] = {
    "random": lambda shape, rng, size: _uniform(shape, rng) < 0.6,
    "sparse": lambda shape, rng, size: _uniform(shape, rng) < 0.1,
    "all": lambda shape, rng, size: torch.ones(shape, dtype=torch.bool),
    "none": lambda shape, rng, size: torch.zeros(shape, dtype=torch.bool),
    "empty_rows": lambda shape, rng, size: (_uniform(shape, rng) < 0.7) & (_queries(shape) % 3 != 1),
    "last_rows": lambda shape, rng, size: _queries(shape) >= shape[2] // 2,
    "padding": lambda shape, rng, size: _keys(shape) < _lengths(shape),
    "left_padding": lambda shape, rng, size: _keys(shape) >= shape[3] - _lengths(shape),
    "empty_prefix": lambda shape, rng, size: _keys(shape) >= int(size),
    "empty_suffix": lambda shape, rng, size: _keys(shape) < int(size),
    "empty_middle": lambda shape, rng, size: (_keys(shape) < 5) | (_keys(shape) >= 5 + int(size)),
    "triangle": lambda shape, rng, size: _keys(shape) <= _queries(shape),
    "anti_triangle": lambda shape, rng, size: _keys(shape) >= _queries(shape),
    "one_key": lambda shape, rng, size: _keys(shape) == (7 * _queries(shape) + 3) % max(1, shape[3]),
    "last_key": lambda shape, rng, size: _keys(shape) == shape[3] - 1,
    "checker": lambda shape, rng, size: (_keys(shape) + _queries(shape)) % 2 == 0,
}
"""Kind -> maker of a bool table (True = may attend) of a shape `(b, h, q, k)`, each full or 1."""

BIASES: dict[str, Callable[[Shape, torch.Generator, float, torch.dtype], Tensor]] = {
    "random": lambda shape, rng, size, dtype: _normal(shape, rng),
    "zeros": lambda shape, rng, size, dtype: torch.zeros(shape),
    "constant": lambda shape, rng, size, dtype: torch.full(shape, float(size)),
    "shifted": lambda shape, rng, size, dtype: _normal(shape, rng) + size,
    "alibi": lambda shape, rng, size, dtype: -0.1 * (_queries(shape) - _keys(shape)).abs().float(),
    "minus_inf": lambda shape, rng, size, dtype: _normal(shape, rng).masked_fill(_uniform(shape, rng) < 0.3, -torch.inf),
    "minus_inf_rows": lambda shape, rng, size, dtype: _normal(shape, rng).masked_fill(_queries(shape) % 3 == 1, -torch.inf),
    "minus_inf_all": lambda shape, rng, size, dtype: torch.full(shape, -torch.inf),
    "minus_inf_prefix": lambda shape, rng, size, dtype: torch.zeros(shape).masked_fill(_keys(shape) < size, -torch.inf),
    "min": lambda shape, rng, size, dtype: _least(_normal(shape, rng), _uniform(shape, rng) < 0.3, dtype),
    "min_rows": lambda shape, rng, size, dtype: _least(_normal(shape, rng), _queries(shape) % 3 == 1, dtype),
    "min_all": lambda shape, rng, size, dtype: torch.full(shape, torch.finfo(dtype).min),
    "min_prefix": lambda shape, rng, size, dtype: _least(torch.zeros(shape), _keys(shape) < size, dtype),
}
"""Kind -> maker of a float table; `dtype` is the one that it will have."""

SEGMENTS: dict[str, Callable[[int, int, int, torch.Generator], tuple[Tensor, Tensor]]] = {
    "documents": lambda batch, q_len, k_len, rng: (_runs(batch, q_len, 11), _runs(batch, k_len, 11)),
    "single": lambda batch, q_len, k_len, rng: (torch.zeros(batch, q_len), torch.zeros(batch, k_len)),
    "disjoint": lambda batch, q_len, k_len, rng: (torch.zeros(batch, q_len), torch.ones(batch, k_len)),
    "negative": lambda batch, q_len, k_len, rng: (_runs(batch, q_len, 9) - 2, _runs(batch, k_len, 9) - 2),
    "interleaved": lambda batch, q_len, k_len, rng: (_modulo(batch, q_len, 3), _modulo(batch, k_len, 3)),
    "some_empty": lambda batch, q_len, k_len, rng: (_modulo(batch, q_len, 4), _modulo(batch, k_len, 3)),
    "beyond_fp32": lambda batch, q_len, k_len, rng: (2**24 + _modulo(batch, q_len, 3), 2**24 + _modulo(batch, k_len, 3)),
    "beyond_fp64": lambda batch, q_len, k_len, rng: (2**53 + _modulo(batch, q_len, 3), 2**53 + _modulo(batch, k_len, 3)),
    "wide": lambda batch, q_len, k_len, rng: (_modulo(batch, q_len, 3) << 32, _modulo(batch, k_len, 3) << 32),
}
"""Kind -> maker of the ids of the queries and of the keys, `(batch, length)`."""

SINKS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "random": lambda heads, rng: _normal((heads,), rng),
    "zeros": lambda heads, rng: torch.zeros(heads),
    "minus_inf": lambda heads, rng: torch.full((heads,), -torch.inf),
    "some_minus_inf": lambda heads, rng: torch.arange(heads).float().masked_fill(torch.arange(heads) % 2 == 0, -torch.inf),
    "above": lambda heads, rng: 10 + _normal((heads,), rng),
    "large": lambda heads, rng: 30 + _normal((heads,), rng),
    "far_above": lambda heads, rng: 200 + _normal((heads,), rng),
    "far_below": lambda heads, rng: -200 + _normal((heads,), rng),
}


def _least(numbers: Tensor, where: Tensor, dtype: torch.dtype) -> Tensor:
    """The least number of the dtype where `where` holds."""
    return numbers.to(dtype).masked_fill(where, torch.finfo(dtype).min)


def _runs(batch: int, length: int, run: int) -> Tensor:
    """Documents of `run` tokens, cut differently for each batch entry."""
    return (torch.arange(length)[None, :] + 4 * torch.arange(batch)[:, None]) // run


def _modulo(batch: int, length: int, count: int) -> Tensor:
    return (torch.arange(length)[None, :] + torch.arange(batch)[:, None]) % count
