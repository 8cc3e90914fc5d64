"""The truth: attention and its gradients in float64, written out; shares no code with any backend.

    S = softcap(scale Q K^T) + bias        P = exp(S - lse)            O = (P * Z) V
    dV = (P * Z)^T dO     dP = Z * (dO V^T)     delta = rowsum(P * dP)     dS = P * (dP - delta + dlse)
    dQ = scale dS' K      dK = scale dS'^T Q    dbias = dS, summed         dsink = P_sink (dlse - delta), summed

Z is dropout's factor, dS' is dS times the derivative of the soft cap. Beside each result stand its two
amounts, the result's formula with every product and sum taken in absolute value: what rounding may cost. In the
second, A', each P_ij is multiplied by `1 + |scale| sum_d |q_id k_jd| + |bias_ij| + |lse_i|`, the rounding of its exponent.

Where a result has few pairs or few elements, A counts more: the yardstick of a few roundings can be right by luck.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnzoo.testing.inputs import Call
from attnzoo.testing.rules import allowed_pairs, dropout_factor

__all__ = ["Results", "Truth", "solve", "sum_to"]

FEW = 8.0  # pairs or elements, up to which A allows for the whole of their rounding, less and less beyond
ABSORBS = 2.0**26  # a bias beyond this swallows an ordinary score whole: no rounding is left to forgive


@dataclass(frozen=True, eq=False)
class Results:
    """What a call gives: `o`, the lse where asked for, and a gradient for each input that needs one."""

    o: Tensor
    lse: Tensor | None
    grads: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        """`o` and the gradients as `dq`, `dk`, ..."""
        return {"o": self.o} | {f"d{name}": gradient for name, gradient in self.grads.items()}


@dataclass(frozen=True, eq=False)
class Truth:
    """What is right, and how much rounding it may cost.

    Attributes:
        results: in float64; the lse always there.
        amounts: name -> (A, A') as `F(r) = eps(dtype)/4 * r(A) + 2 * eps(fp32) * r(A')` takes them.
        empty_rows: `(B, Hq, Sq)`, True where a row sees no key.
    """

    results: Results
    amounts: dict[str, tuple[Tensor, Tensor]]
    empty_rows: Tensor


@dataclass(frozen=True, eq=False)
class _State:
    """The intermediate tensors, all float64, k and v repeated to the heads of q."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor
    p_sink: Tensor
    slope: Tensor
    dropout: Tensor
    scale: float
    group: int


def solve(call: Call) -> Truth:
    """Forward and the gradients that the call asks for."""
    with torch.no_grad():
        state, lse, empty_rows, condition = _forward(call)
        o = (state.p * state.dropout) @ state.v
        amounts = {"o": tuple((p * state.dropout) @ state.v.abs() for p in (state.p, state.p * condition))}
        grads: dict[str, Tensor] = {}
        if call.grads:
            grads = _backward(call, state, state.p, state.p_sink, absolute=False)
            sink_condition = 1 + _unabsorbed(_finite_sinks(call, state)) + _unabsorbed(lse)
            first = _backward(call, state, state.p, state.p_sink, absolute=True)
            steep = replace(state, slope=2 - state.slope)  # 1 - tanh^2 cancels where the cap saturates: in size it is 1 + tanh^2
            second = _backward(call, steep, state.p * condition, state.p_sink * sink_condition, absolute=True)
            amounts |= {f"d{name}": (first[name], second[name]) for name in grads}
        results, pairs = Results(o, lse, grads), _number(state.p * state.dropout)
        for name, result in results.named().items():
            # eps/4 of it: all of P's rounding, or that of dS, eps/2, and of the result's own, eps/2 in its dtype
            own = 2 * _own_rounding(call, name) * _fewness(_number(result))
            amounts[name] = amounts[name][0] * (1 + 4 * _fewness(pairs)) + own * result.abs(), amounts[name][1]
        return Truth(results, amounts, empty_rows)  # type: ignore[arg-type]


def _own_rounding(call: Call, name: str) -> float:
    """The eps of a result's dtype as a share of the eps that it is judged by."""
    epsilon = torch.finfo(call.q.dtype if name == "o" else call.leaf(name[1:]).dtype).eps
    return epsilon / max(epsilon, torch.finfo(call.q.dtype).eps)


def _number(tensor: Tensor) -> float:
    """Of elements that count: all of them where they are alike, 1 where one dwarfs the rest, 0 where all are 0."""
    squares = float(tensor.square().sum())
    return float(tensor.abs().sum()) ** 2 / squares if squares else 0.0


def _fewness(number: float) -> float:
    """1 up to FEW, then towards 0."""
    return FEW / max(FEW, number)


def _forward(call: Call) -> tuple[_State, Tensor, Tensor, Tensor]:
    q, k, v = (t.detach().double() for t in (call.q, call.k, call.v))
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = call.options.get("scale")
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
    raw = scale * (q @ k.mT)
    condition = 1 + abs(scale) * (q.abs() @ k.abs().mT)
    cap = call.options.get("softcap")
    capped = raw if cap is None else cap * torch.tanh(raw / cap)
    slope = torch.ones_like(raw) if cap is None else 1 - torch.tanh(raw / cap) ** 2
    allowed = allowed_pairs(call)
    scores = capped
    if "bias" in call.options:
        bias = call.options["bias"].detach().double().masked_fill(call.options["bias"].detach() == -torch.inf, 0.0)
        scores = capped + bias
        condition = condition + _unabsorbed(bias)
    p, p_sink, lse = _softmax(scores, allowed, _sinks(call))
    condition = condition + _unabsorbed(lse)[..., None]  # P = exp(S - lse): the lse is rounded too, and a sink can make it large
    dropout = dropout_factor(call)
    state = _State(q, k, v, p, p_sink, slope, torch.ones_like(p) if dropout is None else dropout, scale, group)
    return state, lse, ~allowed.any(-1), condition


def _softmax(scores: Tensor, allowed: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """P, the sink's share, and the lse; 0, 0 and -inf in a row with neither key nor sink."""
    masked = scores.masked_fill(~allowed, -torch.inf)
    if sink is None:
        sink = scores.new_full((scores.shape[1],), -torch.inf)
    column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    logits = torch.cat([masked, column], -1)
    top = logits.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    share = weights / total.masked_fill(total == 0, 1.0)
    return share[..., :-1], share[..., -1], (top + total.log())[..., 0]


def _unabsorbed(term: Tensor) -> Tensor:
    """Its size, where it leaves rounding to forgive."""
    return term.abs().masked_fill(term.abs() > ABSORBS, 0.0)


def _sinks(call: Call) -> Tensor | None:
    return call.options["sinks"].detach().double() if "sinks" in call.options else None


def _finite_sinks(call: Call, state: _State) -> Tensor:
    sinks = _sinks(call)
    if sinks is None:
        return state.q.new_zeros(1)
    return sinks.masked_fill(sinks == -torch.inf, 0.0)[None, :, None]


def _backward(call: Call, state: _State, p: Tensor, p_sink: Tensor, *, absolute: bool) -> dict[str, Tensor]:
    """The gradients; with `absolute`, the same formulas with every term's absolute value, added up."""

    def size(tensor: Tensor) -> Tensor:
        return tensor.abs() if absolute else tensor

    sign = 1.0 if absolute else -1.0
    grad_o = state.q.new_zeros(*state.q.shape[:3], state.v.shape[3]) if call.grad_o is None else size(call.grad_o.double())
    grad_lse = state.q.new_zeros(state.q.shape[:3]) if call.grad_lse is None else size(call.grad_lse.double())
    q, k, v, scale = size(state.q), size(state.k), size(state.v), abs(state.scale) if absolute else state.scale
    dp = state.dropout * (grad_o @ v.mT)
    delta = (p * dp).sum(-1)
    if absolute:  # delta may be summed from the stored o, and what is less than the least normal number is rounded like it
        delta = delta + torch.finfo(call.q.dtype).tiny * grad_o.sum(-1)
    ds = p * (dp + (sign * delta + grad_lse)[..., None])
    raw = ds * state.slope
    made = {
        "q": lambda: scale * (raw @ k),
        "k": lambda: _sum_groups(scale * (raw.mT @ q), state.group),
        "v": lambda: _sum_groups((p * state.dropout).mT @ grad_o, state.group),
        "bias": lambda: sum_to(ds, call.options["bias"].shape),
        # in size delta counts twice, as it does in ds, where dp is of its size: once for o, which may be read as it was stored
        "sinks": lambda: (p_sink * (grad_lse + sign * delta * (2.0 if absolute else 1.0))).sum((0, 2)),
    }
    return {name: made[name]() for name in call.grads}


def _sum_groups(tensor: Tensor, group: int) -> Tensor:
    batch, heads, length, dim = tensor.shape
    return tensor.view(batch, heads // group, group, length, dim).sum(2)


def sum_to(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Sum the dims that `shape` was broadcast over."""
    wide = (1,) * (tensor.ndim - len(shape)) + tuple(shape)
    dims = [place for place, size in enumerate(wide) if size == 1 and tensor.shape[place] != 1]
    return (tensor.sum(dims, keepdim=True) if dims else tensor).reshape(shape)
