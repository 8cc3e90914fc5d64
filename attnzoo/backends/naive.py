"""naive: the three steps of the textbook in plain PyTorch. Honours every argument; the readable truth."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from attnzoo.backend import FEATURES, Backend, Capabilities
from attnzoo.dropout import dropout_keep
from attnzoo.inputs import AttentionInputs
from attnzoo.masks import keep_mask
from attnzoo.spec import DTYPES, AttentionSpec


class Naive(Backend):
    """S = scale Q K^T, P = softmax(S), O = P V, each a whole matrix, differentiated by autograd."""

    name = "naive"
    capabilities = Capabilities(
        dtypes=frozenset(DTYPES),
        head_dims=(1, 2**31),
        forward=frozenset(FEATURES),
        backward=frozenset(FEATURES),
        materializes_scores=True,
    )

    def attend(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        scores = attention_scores(spec, inputs)
        probabilities, lse = softmax(scores, inputs.sinks)
        if spec.dropout_p:
            probabilities = drop(spec, inputs, probabilities)
        o = product_with_values(spec, probabilities, inputs.v)
        return o.to(spec.dtype), (lse if spec.return_lse else None)


def attention_scores(spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """`(B, Hq, Sq, Skv)` in fp32 (fp64): scaled, soft-capped, biased, -inf where a pair may not attend."""
    q = rearrange(inputs.q.to(spec.accumulator_dtype), "b (kv group) i d -> b kv group i d", group=spec.group)
    k = rearrange(inputs.k.to(spec.accumulator_dtype), "b kv j d -> b kv 1 d j")
    scores = rearrange(q @ k, "b kv group i j -> b (kv group) i j") * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if inputs.bias is not None:
        scores = scores + inputs.bias.to(spec.accumulator_dtype)
    kept = keep_mask(spec, inputs, slice(0, spec.q_len), slice(0, spec.kv_len))
    if inputs.layout is not None:
        dense = inputs.layout.to_dense()
        kept = dense if kept is None else kept & dense
    return scores if kept is None else scores.masked_fill(~kept, -torch.inf)


def softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities, and the natural log of the denominator; a row with no key is 0 and -inf."""
    sink = None if sinks is None else sinks.to(scores.dtype)[:, None].expand(scores.shape[1], scores.shape[2])
    pivot = scores.new_full(scores.shape[:-1], -torch.inf)
    if scores.shape[-1]:
        pivot = scores.detach().amax(-1)
    if sink is not None:
        pivot = torch.maximum(pivot, sink.detach())
    pivot = pivot.masked_fill(pivot == -torch.inf, 0.0)  # finite: a row with no key would give nan
    weights = torch.exp(scores - pivot[..., None])
    total = weights.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink - pivot)
    is_empty = total == 0
    total = total.masked_fill(is_empty, 1.0)
    lse = (pivot + total.log()).masked_fill(is_empty, -torch.inf)
    return weights / total[..., None], lse


def drop(spec: AttentionSpec, inputs: AttentionInputs, probabilities: Tensor) -> Tensor:
    """Zero the dropped elements and scale the kept ones by 1 / (1 - p)."""
    ranges = (range(spec.batch), range(spec.q_heads), range(spec.q_len), range(spec.kv_len))
    assert inputs.dropout_seed is not None
    kept = dropout_keep(inputs.dropout_seed, spec.dropout_p, *ranges)
    return probabilities.masked_fill(~kept, 0.0) / (1.0 - spec.dropout_p)


def product_with_values(spec: AttentionSpec, probabilities: Tensor, v: Tensor) -> Tensor:
    """`(B, Hq, Sq, Dv)`: P V, each group of query heads with its key-value head."""
    grouped = rearrange(probabilities, "b (kv group) i j -> b kv group i j", group=spec.group)
    o = grouped @ rearrange(v.to(spec.accumulator_dtype), "b kv j d -> b kv 1 j d")
    return rearrange(o, "b kv group i d -> b (kv group) i d")
