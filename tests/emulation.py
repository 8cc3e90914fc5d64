"""FlashAttention as a kernel computes it, in torch on the CPU: known to be right, so the accuracy rule must pass it.

64 x 64 tiles, exp2, the online softmax in fp32 (fp64), P and dS rounded to the input dtype before their
products, delta from the rounded output, the backward from the saved log-sum-exp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnzoo.testing.inputs import Call
from attnzoo.testing.oracle import Results, sum_to
from attnzoo.testing.rules import allowed_pairs, dropout_factor

TILE = 64
LOG2_E = math.log2(math.e)


def run(call: Call) -> Results:
    """Forward and the gradients that the call asks for."""
    with torch.no_grad():
        flash = _Flash(call)
        o, lse = flash.forward()
        return Results(o, lse, flash.backward(o, lse) if call.grads else {})


class _Flash:
    def __init__(self, call: Call) -> None:
        self.call = call
        self.wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        self.group = call.q.shape[1] // call.k.shape[1]
        self.q = call.q.detach().to(self.wide)
        self.k, self.v = (t.detach().to(self.wide).repeat_interleave(self.group, 1) for t in (call.k, call.v))
        scale = call.options.get("scale")
        self.scale = call.q.shape[-1] ** -0.5 if scale is None else scale
        self.allowed = allowed_pairs(call)
        dropout = dropout_factor(call)
        self.kept = None if dropout is None else dropout.to(self.wide)
        self.sinks = call.options["sinks"].detach().to(self.wide) if "sinks" in call.options else None
        self.rest = self.q.new_zeros(())
        self.columns = [slice(start, start + TILE) for start in range(0, self.k.shape[2], TILE)]

    def rounded(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.call.q.dtype).to(self.wide)

    def scores(self, columns: slice) -> tuple[Tensor, Tensor | None]:
        """Natural scores of a tile of keys, -inf where a pair may not attend; the slope of the soft cap."""
        scores = (self.q @ self.k[:, :, columns].mT) * self.scale
        cap, slope = self.call.options.get("softcap"), None
        if cap is not None:
            tanh = torch.tanh(scores / cap)
            scores, slope = cap * tanh, 1 - tanh * tanh
        if "bias" in self.call.options:
            bias = self.call.options["bias"].detach().to(self.wide)
            scores = scores + (bias if bias.shape[-1] == 1 else bias[..., columns])
        return scores.masked_fill(~self.allowed[..., columns], -torch.inf), slope

    def forward(self) -> tuple[Tensor, Tensor]:
        shape = self.q.shape[:3]
        m, total = self.q.new_full((*shape, 1), -torch.inf), self.q.new_zeros(*shape, 1)
        if self.sinks is not None:
            m = self.sinks.view(1, -1, 1, 1).expand(*shape, 1)
            total = (m > -torch.inf).to(self.wide)
        acc = self.q.new_zeros(*shape, self.v.shape[-1])
        for columns in self.columns:
            scores = self.scores(columns)[0]
            new = torch.maximum(m, scores.amax(-1, keepdim=True))
            pivot = new.masked_fill(new == -torch.inf, 0.0)
            p, rescale = torch.exp2((scores - pivot) * LOG2_E), torch.exp2((m - pivot) * LOG2_E)  # finfo.min * log2(e) overflows
            total = total * rescale + p.sum(-1, keepdim=True)
            p = p if self.kept is None else p * self.kept[..., columns]
            acc = acc * rescale + self.rounded(p) @ self.v[:, :, columns]
            m = new
        empty = total == 0
        o = (acc / total.masked_fill(empty, 1.0)).to(self.call.q.dtype)
        lse = m + total.log()
        self.rest = ((m - lse) + total.log()).nan_to_num(0.0)  # what m + log(total) lost: all of log(total) next to finfo.min
        return o, lse.masked_fill(empty, -torch.inf)[..., 0]

    def backward(self, o: Tensor, lse: Tensor) -> dict[str, Tensor]:
        call = self.call
        grad_o = torch.zeros_like(o).to(self.wide) if call.grad_o is None else call.grad_o.to(self.wide)
        delta = (grad_o * o.to(self.wide)).sum(-1, keepdim=True)
        if call.grad_lse is not None:
            delta = delta - call.grad_lse.to(self.wide)[..., None]
        empty = (lse == -torch.inf)[..., None]
        base = lse[..., None].masked_fill(empty, 0.0)
        dq, dk, dv = (torch.zeros_like(t) for t in (self.q, self.k, self.v))
        dbias = []
        for columns in self.columns:
            scores, slope = self.scores(columns)
            p = torch.exp2((scores - base - self.rest) * LOG2_E).masked_fill(empty, 0.0)
            kept = 1.0 if self.kept is None else self.kept[..., columns]
            dv[:, :, columns] = self.rounded(p * kept).mT @ grad_o
            ds = p * ((grad_o @ self.v[:, :, columns].mT) * kept - delta)
            dbias.append(self.rounded(ds))
            raw = self.rounded(ds if slope is None else ds * slope)
            dq += raw @ self.k[:, :, columns]
            dk[:, :, columns] = raw.mT @ self.q
        made = {
            "q": lambda: dq * self.scale,
            "k": lambda: self.summed(dk * self.scale),
            "v": lambda: self.summed(dv),
            "bias": lambda: sum_to(torch.cat(dbias, -1), call.options["bias"].shape),
            "sinks": lambda: self.grad_sinks(delta, lse),
        }
        return {name: made[name]().to(call.leaf(name).dtype) for name in call.grads}

    def summed(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (-1, self.group)).sum(2)

    def grad_sinks(self, delta: Tensor, lse: Tensor) -> Tensor:
        assert self.sinks is not None
        share = torch.exp(self.sinks.view(1, -1, 1) - lse).nan_to_num(0.0)
        return -(share * delta[..., 0]).sum((0, 2))
