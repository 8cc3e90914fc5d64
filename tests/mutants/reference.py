"""Reference: attention and its gradients in small steps, each of which a mutant may get wrong.

S = softcap(scale Q K^T) + bias     P = exp(S - lse)     O = (P * Z) V     Z: dropout's factor
dV = (P * Z)^T dO     dP = Z * (dO V^T)     dS = P * (dP - delta)     delta = rowsum(P * dP) - dlse
dQ = scale dS' K      dK = scale dS'^T Q    dS': dS times the slope of the soft cap
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.backend import FEATURES, Capabilities
from attnzoo.backends.recompute import Gradients, RecomputingBackend
from attnzoo.dropout import dropout_keep
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import DTYPES, AttentionSpec


class Reference(RecomputingBackend):
    """Right in everything that the contract asks; whole matrices, in fp32 (fp64 for fp64)."""

    name = "reference"
    capabilities = Capabilities(dtypes=frozenset(DTYPES), head_dims=(1, 2**31), forward=frozenset(FEATURES), backward=frozenset(FEATURES))

    def attend(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        """In torch's own operators under its function transforms, which a recomputing backend refuses."""
        if torch._C._functorch.peek_interpreter_stack() is None:
            return super().attend(spec, inputs)
        o, lse = self.forward(spec, inputs)
        return o, lse if spec.return_lse else None

    def forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        scores, _ = self.scores(spec, inputs)
        p, lse = self.softmax(spec, inputs, scores)
        return self.output(spec, p * self.dropout(spec, inputs), self.values(spec, inputs)).to(spec.dtype), lse

    def backward(
        self, spec: AttentionSpec, inputs: AttentionInputs, o: Tensor, lse: Tensor, grad_o: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        scores, slope = self.scores(spec, inputs)
        p, z, g = self.probabilities(spec, inputs, scores, lse), self.dropout(spec, inputs), grad_o.to(spec.accumulator_dtype)
        dp = z * (g @ self.values(spec, inputs).mT)
        delta = self.delta(p, dp)
        if grad_lse is not None:
            delta = delta - grad_lse
        ds = p * (dp - delta[..., None])
        raw = ds * slope * spec.scale
        made = {
            "q": lambda: raw @ self.keys(spec, inputs),
            "k": lambda: self.sum_over_group(spec, raw.mT @ self.queries(spec, inputs)),
            "v": lambda: self.sum_over_group(spec, (p * z).mT @ g),
            "bias": lambda: self.bias_gradient(inputs, ds),
            "sinks": lambda: self.sink_gradient(inputs, lse, delta),
        }
        return Gradients(**{name: made[name]().to(getattr(inputs, name).dtype) for name in spec.grads})

    # Operands, (B, Hq, length, dim)

    def queries(self, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        return inputs.q.to(spec.accumulator_dtype)

    def keys(self, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        return self.of_query_heads(spec, inputs.k)

    def values(self, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        return self.of_query_heads(spec, inputs.v)

    def of_query_heads(self, spec: AttentionSpec, tensor: Tensor) -> Tensor:
        return tensor.to(spec.accumulator_dtype).repeat_interleave(spec.group, 1)

    def sum_over_group(self, spec: AttentionSpec, tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (spec.kv_heads, spec.group)).sum(2) if spec.kv_heads else tensor

    # Scores

    def scores(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor | float]:
        """`(B, Hq, Sq, Skv)`, -inf where a pair may not attend, and their slope."""
        s, slope = self.capped(spec, self.products(spec, inputs) * spec.scale)
        if inputs.bias is not None:
            s = s + inputs.bias.to(s.dtype)
        return self.without(s, self.kept(spec, inputs)), slope

    def products(self, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        return self.queries(spec, inputs) @ self.keys(spec, inputs).mT

    def capped(self, spec: AttentionSpec, s: Tensor) -> tuple[Tensor, Tensor | float]:
        if spec.softcap is None:
            return s, 1.0
        ratio = torch.tanh(s / spec.softcap)
        return spec.softcap * ratio, 1 - ratio * ratio

    def without(self, s: Tensor, kept: Tensor) -> Tensor:
        return s.masked_fill(~kept, -torch.inf)

    # Which pairs attend: bool tensors that broadcast to (B, Hq, Sq, Skv)

    def kept(self, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        kept = self.band(spec, inputs)
        if inputs.mask is not None:
            kept = kept & self.mask(spec, inputs.mask)
        if inputs.q_segment_ids is not None and inputs.kv_segment_ids is not None:
            kept = kept & self.same_segment(inputs.q_segment_ids, inputs.kv_segment_ids)[:, None]
        if inputs.layout is not None:
            kept = kept & self.blocks(inputs)
        return kept

    def band(self, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        left, right = spec.band
        i, j = torch.arange(spec.q_len, device=spec.device)[:, None], torch.arange(spec.kv_len, device=spec.device)[None, :]
        distance = j - i - self.diagonal(spec)
        kept = torch.ones_like(distance, dtype=torch.bool)
        if left is not None:
            kept &= distance >= -left
        if right is not None:
            kept &= distance <= right
        return kept

    def diagonal(self, spec: AttentionSpec) -> int:
        return spec.diagonal

    def mask(self, spec: AttentionSpec, mask: Tensor) -> Tensor:
        return mask

    def same_segment(self, q_ids: Tensor, kv_ids: Tensor) -> Tensor:
        return q_ids[:, :, None] == kv_ids[:, None, :]

    def blocks(self, inputs: AttentionInputs) -> Tensor:
        assert inputs.layout is not None
        return inputs.layout.to_dense()

    # Softmax

    def softmax(self, spec: AttentionSpec, inputs: AttentionInputs, scores: Tensor) -> tuple[Tensor, Tensor]:
        """P and the lse; a row that sees neither key nor sink is 0 and -inf."""
        sinks = self.sinks(spec, inputs)
        pivot = self.pivot(spec, scores, sinks)
        weights, sink = torch.exp(scores - pivot[..., None]), torch.exp(sinks - pivot)
        total = weights.sum(-1) + sink
        is_empty = total == 0
        total = total.masked_fill(is_empty, 1.0)
        return weights / total[..., None], (pivot + total.log()).masked_fill(is_empty, -torch.inf)

    def sinks(self, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        """`(Hq, 1)`, -inf where there are none."""
        none = torch.full((spec.q_heads,), -torch.inf, dtype=spec.accumulator_dtype, device=spec.device)
        return (none if inputs.sinks is None else inputs.sinks.to(none.dtype))[:, None]

    def pivot(self, spec: AttentionSpec, scores: Tensor, sinks: Tensor) -> Tensor:
        """`(B, Hq, Sq)`: the largest exponent of a row, 0 where there is none."""
        top = scores.amax(-1) if spec.kv_len else scores.new_full(scores.shape[:-1], -torch.inf)
        top = torch.maximum(top, sinks)
        return top.masked_fill(top == -torch.inf, 0.0)

    def probabilities(self, spec: AttentionSpec, inputs: AttentionInputs, scores: Tensor, lse: Tensor) -> Tensor:
        """P in the backward: anew, for an lse of finfo.min has no room for the log of a row's sum."""
        return self.softmax(spec, inputs, scores)[0]

    # Output and gradients

    def output(self, spec: AttentionSpec, weights: Tensor, values: Tensor) -> Tensor:
        return weights @ values

    def dropout(self, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor | float:
        """`1 / (1 - p)` where an element is kept, else 0."""
        if inputs.dropout_seed is None:
            return 1.0
        kept = self.kept_by_dropout(spec, inputs.dropout_seed)
        return kept.to(spec.accumulator_dtype) / (1.0 - spec.dropout_p)

    def kept_by_dropout(self, spec: AttentionSpec, seed: Tensor) -> Tensor:
        return dropout_keep(seed, spec.dropout_p, range(spec.batch), range(spec.q_heads), range(spec.q_len), range(spec.kv_len))

    def delta(self, p: Tensor, dp: Tensor) -> Tensor:
        return (p * dp).sum(-1)

    def bias_gradient(self, inputs: AttentionInputs, ds: Tensor) -> Tensor:
        assert inputs.bias is not None
        return ds.sum_to_size(inputs.bias.shape)

    def sink_gradient(self, inputs: AttentionInputs, lse: Tensor, delta: Tensor) -> Tensor:
        assert inputs.sinks is not None
        share = torch.exp(inputs.sinks.to(lse.dtype)[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)
        return -(share * delta).sum((0, 2))
