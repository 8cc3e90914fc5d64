"""Random problems for the accuracy tests: arguments for attention, and the same in the oracle's terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import torch
from hypothesis import strategies as st

from attnzoo import BlockLayout
from attnzoo.layout import BlockLists, ElementRule
from attnzoo.testing.inputs import Call

LAYOUTS = ("bits", "blocks", "band", "segments")


@dataclass(frozen=True)
class Drawn:
    """Sizes and options of one problem; its tensors follow from `seed`."""

    dtype: str = "float32"
    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    q_len: int = 19
    kv_len: int = 19
    head_dim: int = 8
    value_dim: int = 8
    causal: bool = False
    align: str | None = None
    window: tuple[int | None, int | None] | None = None
    mask: str | None = None
    bias: str | None = None
    bias_dtype: str | None = None
    segments: bool = False
    layout: str | None = None
    block: tuple[int, int] = (4, 4)
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout_p: float = 0.0
    loss: str = "o"
    size: float = 1.0
    heads_inside: bool = False
    grads: tuple[str, ...] = ("q", "k", "v", "bias", "sinks")
    seed: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.kv_heads * self.group, self.q_len, self.kv_len


bounds = st.none() | st.integers(0, 20)
tables = st.sampled_from([None, None, "bhqk", "1h1k", "b1q1", "qk", "11qk", "1k"])
drawn = st.builds(
    Drawn,
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    q_len=st.integers(1, 36),
    kv_len=st.integers(1, 36),
    head_dim=st.sampled_from([1, 5, 8, 16]),
    value_dim=st.sampled_from([1, 4, 8, 20]),
    causal=st.booleans(),
    align=st.sampled_from(["top_left", "bottom_right"]),
    window=st.none() | st.tuples(bounds, bounds),
    mask=tables,
    bias=tables,
    bias_dtype=st.sampled_from([None, "float16", "float32", "float64"]),
    segments=st.booleans(),
    layout=st.sampled_from([None, None, None, *LAYOUTS]),
    block=st.tuples(st.sampled_from([1, 3, 8, 40]), st.sampled_from([2, 5, 8, 40])),
    scale=st.sampled_from([None, None, 0.0, -0.3, 1.0]),
    softcap=st.sampled_from([None, None, 0.5, 20.0]),
    sinks=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.0, 0.0, 0.3, 0.9]),
    loss=st.sampled_from(["o", "o+lse", "lse"]),
    size=st.sampled_from([1.0, 1.0, 4.0]),
    heads_inside=st.booleans(),
    grads=st.sampled_from([("q", "k", "v", "bias", "sinks"), ("q",), ("k",), ("v", "sinks"), ("bias",), ("sinks",), ()]),
    seed=st.integers(0, 2**32 - 1),
)


def make(problem: Drawn) -> tuple[Call, oracle.Solution]:
    """The call, and the truth about it."""
    rng = np.random.default_rng(problem.seed)
    q, k, v = (_values(problem, rng, name) for name in "qkv")
    rules = {"causal": problem.causal, "align": problem.align, "window": problem.window}
    options: dict[str, Any] = dict(rules, scale=problem.scale, softcap=problem.softcap, return_lse=True)
    known: dict[str, Any] = dict(rules, scale=problem.scale, softcap=problem.softcap)
    if problem.mask:
        options["mask"] = torch.from_numpy(rng.random(_table_shape(problem, problem.mask)) < 0.7)
        known["mask"] = options["mask"].numpy()
    if problem.bias:
        bias = rng.standard_normal(_table_shape(problem, problem.bias))
        bias[rng.random(bias.shape) < 0.1] = -np.inf
        options["bias"] = torch.from_numpy(bias).to(getattr(torch, problem.bias_dtype or problem.dtype))
        known["bias"] = options["bias"].double().numpy()
    if problem.segments:
        known["segment_ids"] = [np.sort(rng.integers(-1, 2, (problem.batch, n)), 1) for n in (problem.q_len, problem.kv_len)]
        options["segment_ids"] = tuple(torch.from_numpy(ids) for ids in known["segment_ids"])
    if problem.layout:
        options["layout"], known["dense"] = make_layout(problem, rng)
    if problem.sinks:
        options["sinks"] = torch.from_numpy(rng.standard_normal(problem.shape[1])).to(getattr(torch, problem.dtype))
        known["sinks"] = options["sinks"].double().numpy()
    if problem.dropout_p:
        options |= {"dropout_p": problem.dropout_p, "dropout_seed": problem.seed - 2**31}
        known["factors"] = oracle.dropout_factors(options["dropout_seed"], problem.dropout_p, problem.shape)
    grad_o, grad_lse = _output_gradients(problem, rng)
    grads = tuple(name for name in problem.grads if name in ("q", "k", "v") or name in options)
    call = Call(q, k, v, options, grads, grad_o if grads else None, grad_lse if grads else None)
    for name in grads:
        call.leaf(name).requires_grad_()
    arrays = [None if t is None else t.detach().double().numpy() for t in (q, k, v, call.grad_o, call.grad_lse)]
    return call, oracle.solve(*arrays, **known)


def _values(problem: Drawn, rng: np.random.Generator, name: str) -> torch.Tensor:
    batch, heads, q_len, kv_len = problem.shape
    shapes = {
        "q": (batch, heads, q_len, problem.head_dim),
        "k": (batch, problem.kv_heads, kv_len, problem.head_dim),
        "v": (batch, problem.kv_heads, kv_len, problem.value_dim),
    }
    values = torch.from_numpy(rng.standard_normal(shapes[name]) * (1.0 if name == "v" else problem.size))
    values = values.to(getattr(torch, problem.dtype))
    return values.transpose(1, 2).contiguous().transpose(1, 2) if problem.heads_inside else values


def _table_shape(problem: Drawn, dims: str) -> list[int]:
    """`dims` names the full dims, "1" where the table is broadcast."""
    full = dict(zip("bhqk", problem.shape))
    return [full.get(dim, 1) for dim in dims]


def _output_gradients(problem: Drawn, rng: np.random.Generator) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    dtype = getattr(torch, problem.dtype)
    batch, heads, q_len, _ = problem.shape
    grad_o = torch.from_numpy(rng.standard_normal((batch, heads, q_len, problem.value_dim))).to(dtype)
    grad_lse = torch.from_numpy(rng.standard_normal((batch, heads, q_len)))
    grad_lse = grad_lse if problem.dtype == "float64" else grad_lse.float()
    return (grad_o if "o" in problem.loss.split("+") else None), (grad_lse if "lse" in problem.loss else None)


def make_layout(problem: Drawn, rng: np.random.Generator) -> tuple[BlockLayout, np.ndarray]:
    """A layout of the problem's kind, and the mask it stands for, put together block by block."""
    batch, heads, q_len, kv_len = problem.shape
    batch, heads = (size if rng.random() < 0.5 else 1 for size in (batch, heads))
    block_q, block_kv = problem.block
    rows, columns = -(-q_len // block_q), -(-kv_len // block_kv)
    kinds = rng.integers(0, 3, (batch, heads, rows, columns))  # absent, full, partial
    if problem.layout == "blocks":
        dense = np.kron(kinds > 0, np.ones((block_q, block_kv), dtype=bool))[:, :, :q_len, :kv_len]
        return BlockLayout.from_blocks(torch.from_numpy(kinds > 0), block=problem.block, q_len=q_len, kv_len=kv_len), dense
    dense = np.kron(kinds == 1, np.ones((block_q, block_kv), dtype=bool))[:, :, :q_len, :kv_len]
    partial = np.kron(kinds == 2, np.ones((block_q, block_kv), dtype=bool))[:, :, :q_len, :kv_len]
    if problem.layout == "bits":
        dense = dense | (partial & (rng.random(dense.shape) < 0.5))
        return BlockLayout.from_dense(torch.from_numpy(dense), block=problem.block), dense
    rule, kept = _band_rule(rng, q_len, kv_len) if problem.layout == "band" else _segment_rule(rng, batch, q_len, kv_len)
    lists = {
        name: BlockLists.from_bool(torch.from_numpy(kinds.reshape(-1, columns) == kind)) for name, kind in (("full", 1), ("partial", 2))
    }
    layout = BlockLayout(q_len, kv_len, block_q, block_kv, **lists, rule=rule, batch=batch, heads=heads)
    return layout, dense | (partial & kept)


def _band_rule(rng: np.random.Generator, q_len: int, kv_len: int) -> tuple[ElementRule, np.ndarray]:
    left, right, diagonal = int(rng.integers(0, 9)), (None if rng.random() < 0.5 else 2), int(rng.integers(-9, 9))
    kept = np.zeros((q_len, kv_len), dtype=bool)
    for i, j in np.ndindex(q_len, kv_len):
        kept[i, j] = i + diagonal - left <= j and (right is None or j <= i + diagonal + right)
    return ElementRule(band=(left, right, diagonal)), kept


def _segment_rule(rng: np.random.Generator, batch: int, q_len: int, kv_len: int) -> tuple[ElementRule, np.ndarray]:
    q_ids, kv_ids = rng.integers(-1, 2, (batch, q_len)), rng.integers(-1, 2, (batch, kv_len))
    rule = ElementRule(segments=(torch.from_numpy(q_ids).int(), torch.from_numpy(kv_ids).int()))
    return rule, (q_ids[:, :, None] == kv_ids[:, None, :])[:, None]
