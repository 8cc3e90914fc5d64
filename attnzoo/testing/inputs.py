"""make_call: the tensors of a problem, seeded, laid out as it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnzoo.layout import BlockLayout
from attnzoo.testing.blocks import block_layout
from attnzoo.testing.problem import Problem, Table
from attnzoo.testing.storage import STORAGES, stored
from attnzoo.testing.tables import BIASES, MASKS, SEGMENTS, SINKS

__all__ = ["GRADIENTS", "VALUES", "Call", "make_call"]


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call, and the gradients of its outputs.

    Attributes:
        q, k, v: with requires_grad set where the problem asks for it.
        options: every other argument of `attnzoo.attention`, those that are not at their default.
        grads: names of the inputs that need a gradient.
        grad_o, grad_lse: gradients of the outputs; None for an output that the loss doesn't read.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    grads: tuple[str, ...]
    grad_o: Tensor | None
    grad_lse: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that goes in, by name."""
        named: dict[str, Tensor] = {"q": self.q, "k": self.k, "v": self.v}
        for name, value in self.options.items():
            parts = value if isinstance(value, tuple) else value.tensors() if isinstance(value, BlockLayout) else [value]
            named |= {f"{name}[{place}]": part for place, part in enumerate(parts) if isinstance(part, Tensor)}
        for name, gradient in (("the gradient of o", self.grad_o), ("the gradient of lse", self.grad_lse)):
            if gradient is not None:
                named[name] = gradient
        return named

    def leaf(self, name: str) -> Tensor:
        """The input of that name."""
        return getattr(self, name) if name in ("q", "k", "v") else self.options[name]  # type: ignore[no-any-return]


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "small": lambda x: x * 2**-6,
    "large": lambda x: x * 4,
    "fp16_overflow": lambda x: x.sign() * 480,
    "outliers": lambda x: torch.cat([x[..., :1] * 40, x[..., 1:]], -1),
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "equal": torch.ones_like,
    "ones_of_v": lambda x: x,
    "far": lambda x: x.sign() * 300,
}
"""How q and k are made from standard normal numbers."""

OF_V = {name: VALUES[name] for name in ("small", "large", "zeros", "ones")} | {"ones_of_v": torch.ones_like}
"""How v is made, where not of normal numbers."""

GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.new_ones(()).expand(x.shape),
    "mean": lambda x: x.new_full((), 1 / max(1, x.numel())).expand(x.shape),
    "zeros": torch.zeros_like,
    "row": lambda x: x[..., :1].expand(x.shape),
    "column": lambda x: x[:, :, :1].expand(x.shape),
    "transpose": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}
"""Gradients of o as a loss would make them, from a tensor of normal numbers."""


def make_call(problem: Problem, device: str | torch.device = "cpu") -> Call:
    """Draw on the CPU, so that a problem means the same everywhere; then move, then lay out."""
    rng = torch.Generator().manual_seed(problem.seed)
    dtype = getattr(torch, problem.dtype)
    q, k, v = _qkv(problem, rng)
    q, k, v = [stored(t.to(dtype).to(device), how, offset=problem.offset) for t, how in zip((q, k, v), problem.storage)]
    options = _options(problem) | _inputs(problem, rng, device)
    o_shape = (problem.batch, problem.q_heads, problem.q_len, problem.v_dim)
    grad_o = torch.randn(o_shape, generator=rng).to(dtype).to(device)
    lse_dtype = torch.float64 if problem.dtype == "float64" else torch.float32
    grad_lse = torch.randn(o_shape[:3], generator=rng).to(lse_dtype).to(device)
    call = Call(
        q,
        k,
        v,
        options,
        problem.grads,
        _gradient(grad_o, problem.grad_storage, problem) if "o" in problem.loss.split("+") and problem.grads else None,
        _gradient(grad_lse[..., None], problem.lse_grad_storage, problem)[..., 0] if "lse" in problem.loss and problem.grads else None,
    )
    for name in problem.grads:
        call.leaf(name).requires_grad_()
    return call


def _qkv(problem: Problem, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(problem.batch, problem.q_heads, problem.q_len, problem.head_dim, generator=rng)
    k = torch.randn(problem.batch, problem.k_heads, problem.k_len, problem.head_dim, generator=rng)
    v = torch.randn(problem.batch, problem.k_heads, problem.k_len, problem.v_dim, generator=rng)
    if problem.values == "far":  # every score is far below zero, and alike for all keys
        q, k = torch.full_like(q, 300), -300 + k
    else:
        q, k = VALUES[problem.values](q), VALUES[problem.values](k)
    if problem.values in OF_V:
        v = OF_V[problem.values](v)
    if problem.shift:
        scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
        size = (abs(problem.shift) / abs(scale)) ** 0.5
        q[..., -1], k[..., -1] = size, size if (problem.shift > 0) == (scale > 0) else -size
    return q, k, v


def _options(problem: Problem) -> dict[str, Any]:
    names = ("causal", "align", "window", "scale", "softcap", "dropout_p", "dropout_seed", "return_lse", "deterministic")
    return {name: getattr(problem, name) for name in names if getattr(problem, name) != Problem.__dataclass_fields__[name].default}


def _inputs(problem: Problem, rng: torch.Generator, device: str | torch.device) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if problem.mask is not None:
        made["mask"] = _table(
            problem, problem.mask, MASKS[problem.mask.kind](_shape(problem, problem.mask), rng, problem.mask.size), device
        )
    if problem.bias is not None:
        dtype = getattr(torch, problem.bias.dtype or problem.dtype)
        numbers = BIASES[problem.bias.kind](_shape(problem, problem.bias), rng, problem.bias.size, dtype)
        made["bias"] = _table(problem, problem.bias, numbers.to(dtype), device)
    if problem.segments is not None:
        ids = SEGMENTS[problem.segments.kind](problem.batch, problem.q_len, problem.k_len, rng)
        columns = [part.to(getattr(torch, problem.segments.dtype)).to(device)[:, None, :, None] for part in ids]  # (B, 1, S, 1)
        pair = tuple([stored(part, problem.segments.storage, offset=problem.offset)[:, 0, :, 0] for part in columns])
        made["segment_ids"] = pair[0] if problem.q_len == problem.k_len and torch.equal(*pair) else pair
    if problem.layout is not None:
        made["layout"] = block_layout(problem, problem.layout, rng).to(device)
    if problem.sinks is not None:
        logits = SINKS[problem.sinks.kind](problem.q_heads, rng).to(getattr(torch, problem.sinks.dtype or problem.dtype)).to(device)
        made["sinks"] = stored(logits.view(1, 1, 1, -1), problem.sinks.storage, offset=problem.offset)[0, 0, 0]
    if problem.as_tensor_seed:
        made["dropout_seed"] = torch.tensor([problem.dropout_seed or 0], dtype=torch.int64, device=device)
    return made


def _shape(problem: Problem, table: Table) -> tuple[int, int, int, int]:
    letters = table.dims.rjust(4, "1")
    batch, heads, rows, columns = (1 if letter == "1" else problem.sizes[letter] for letter in letters)
    return batch, heads, rows, columns


def _table(problem: Problem, table: Table, values: Tensor, device: str | torch.device) -> Tensor:
    made = stored(values.to(device), table.storage, offset=problem.offset)
    return made[0, 0] if len(table.dims) == 2 else made


def _gradient(numbers: Tensor, storage: str, problem: Problem) -> Tensor:
    return stored(numbers, storage, offset=problem.offset) if storage in STORAGES else GRADIENTS[storage](numbers)
