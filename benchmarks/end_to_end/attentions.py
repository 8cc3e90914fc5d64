"""Attentions for the models, by name: `eager` and `stock`, what people run without attnzoo, and every backend of attnzoo."""

from __future__ import annotations

import math

import torch
from model import Attention
from torch import Tensor

import attnzoo

WITHOUT_ATTNZOO = ("eager", "stock")


def eager(causal: bool) -> Attention:
    """The three steps, all scores in memory: what transformers calls eager."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])
        if causal:
            length = q.shape[-2]
            scores = scores.masked_fill(~torch.ones(length, length, device=q.device, dtype=torch.bool).tril(), -torch.inf)
        return scores.softmax(-1).to(v.dtype) @ v

    return attend


def stock(causal: bool) -> Attention:
    """torch's scaled_dot_product_attention, its own choice of a kernel."""
    return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def of(name: str, *, causal: bool, length: int, device: str) -> Attention:
    """`eager`, `stock`, a backend's name, or `NAME+butterfly`: that backend on the FlashAttention paper's block pattern."""
    if name in WITHOUT_ATTNZOO:
        return {"eager": eager, "stock": stock}[name](causal)
    backend, _, pattern = name.partition("+")
    if not pattern:
        return lambda q, k, v: attnzoo.attention(q, k, v, causal=causal, backend=backend)  # type: ignore[return-value]
    layout = attnzoo.layouts.butterfly(length, block=128, device=device)
    return lambda q, k, v: attnzoo.attention(q, k, v, causal=causal, layout=layout, backend=backend)  # type: ignore[return-value]
