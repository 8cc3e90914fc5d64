"""The yardstick: the three-step algorithm in low precision, whose own error says what a dtype can do.

fp32 scores and softmax, P and dS rounded to the input dtype before their products, fp32 accumulation; all of it
in fp64 for fp64 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo.testing.inputs import Call
from attnzoo.testing.oracle import Results, sum_to
from attnzoo.testing.rules import allowed_pairs, dropout_factor

__all__ = ["solve"]


@dataclass(frozen=True, eq=False)
class _State:
    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor
    p_sink: Tensor
    slope: Tensor
    dropout: Tensor | None
    scale: float
    group: int
    dtype: torch.dtype

    def rounded(self, tensor: Tensor) -> Tensor:
        """To the input dtype and back: what a tensor core is fed."""
        return tensor.to(self.dtype).to(self.q.dtype)


def solve(call: Call) -> Results:
    """The same results as the oracle, in the dtypes that a backend returns."""
    with torch.no_grad():
        state, lse = _forward(call)
        o = state.rounded(state.p if state.dropout is None else state.p * state.dropout) @ state.v
        return Results(o.to(call.q.dtype), lse, _backward(call, state) if call.grads else {})


def _forward(call: Call) -> tuple[_State, Tensor]:
    wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    q, k, v = (t.detach().to(wide) for t in (call.q, call.k, call.v))
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = call.options.get("scale")
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
    scores = scale * (q @ k.mT)
    slope = torch.ones_like(scores)
    cap = call.options.get("softcap")
    if cap is not None:
        tanh = torch.tanh(scores / cap)
        scores, slope = cap * tanh, 1 - tanh**2
    if "bias" in call.options:
        scores = scores + call.options["bias"].detach().to(wide)
    scores = scores.masked_fill(~allowed_pairs(call), -torch.inf)
    sink = call.options["sinks"].detach().to(wide) if "sinks" in call.options else scores.new_full((q.shape[1],), -torch.inf)
    sink = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    top = torch.cat([scores, sink], -1).amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights, sink_weight = torch.exp(scores - top), torch.exp(sink - top)
    total = weights.sum(-1, keepdim=True) + sink_weight
    safe = total.masked_fill(total == 0, 1.0)
    dropout = dropout_factor(call)
    dropout = None if dropout is None else dropout.to(wide)
    state = _State(q, k, v, weights / safe, (sink_weight / safe)[..., 0], slope, dropout, scale, group, call.q.dtype)
    return state, (top + total.log())[..., 0]


def _backward(call: Call, state: _State) -> dict[str, Tensor]:
    wide = state.q.dtype
    p, q, k, v = state.p, state.q, state.k, state.v
    grad_o = q.new_zeros(*q.shape[:3], v.shape[3]) if call.grad_o is None else call.grad_o.to(wide)
    grad_lse = q.new_zeros(q.shape[:3]) if call.grad_lse is None else call.grad_lse.to(wide)
    dp = grad_o @ v.mT
    dropped = p
    if state.dropout is not None:
        dp, dropped = dp * state.dropout, p * state.dropout
    delta = (p * dp).sum(-1)
    ds = p * (dp - delta[..., None] + grad_lse[..., None])
    raw = state.rounded(ds * state.slope)
    made = {
        "q": lambda: state.scale * (raw @ k),
        "k": lambda: _sum_groups(state.scale * (raw.mT @ q), state.group),
        "v": lambda: _sum_groups(state.rounded(dropped).mT @ grad_o, state.group),
        "bias": lambda: sum_to(state.rounded(ds), call.options["bias"].shape),
        "sinks": lambda: (state.p_sink * (grad_lse - delta)).sum((0, 2)),
    }
    return {name: made[name]().to(call.leaf(name).dtype) for name in call.grads}


def _sum_groups(tensor: Tensor, group: int) -> Tensor:
    batch, heads, length, dim = tensor.shape
    return tensor.view(batch, heads // group, group, length, dim).sum(2)
