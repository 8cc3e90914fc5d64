"""Second derivatives: right where they are claimed, a clear error or right where they aren't."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.testing.failure import ConformanceError, require
from attnzoo.testing.inputs import Call, make_call
from attnzoo.testing.outcome import Outcome
from attnzoo.testing.problem import Problem
from attnzoo.testing.rules import allowed_pairs, dropout_factor
from attnzoo.testing.subject import Refused, Subject

__all__ = ["double_backward"]


def double_backward(subject: Subject, problem: Problem, device: torch.device) -> Outcome | None:
    """A backend that claims second derivatives gives them right; another one raises, which is a refusal, or is right.

    Takes rows that all see a key.
    """
    is_claimed = "double_backward" in subject.claims_on(device).backward
    call = make_call(problem, device)
    try:
        found = _second_derivatives(call, *subject.forward(call))
    except Refused:  # of the call itself: nothing is known of its second derivative
        raise
    except (RuntimeError, NotImplementedError) as error:
        if is_claimed:
            raise ConformanceError(f"{subject.name} claims double_backward, but raised {type(error).__name__}: {error}") from error
        require(bool(str(error)), "the refusal of a second derivative says nothing")
        return Outcome("refused", (f"second derivatives raise a {type(error).__name__}",))
    wide = make_call(replace(problem, dtype="float64"), device)
    for name, expected in _second_derivatives(wide, *_textbook(wide)).items():
        value = found[name]
        distance, size = float((value.double() - expected).abs().max()), float(expected.abs().max())
        allowed = (50 * torch.finfo(value.dtype).eps + 1e-12) * max(1.0, size)
        require(distance <= allowed, f"the second derivative in {name} is off by {distance:.3e} of {size:.3e}, allowed {allowed:.3e}")
    return None


def _second_derivatives(call: Call, o: Tensor, lse: Tensor | None) -> dict[str, Tensor]:
    """The derivatives of `sum of squares of the gradients`, which no constant can imitate: in the inputs, and in what came
    from above, through which those of a further layer flow."""
    pairs = [
        (out, grad.detach().requires_grad_())
        for out, grad in ((o, call.grad_o), (lse, call.grad_lse))
        if out is not None and grad is not None
    ]
    leaves = {name: call.leaf(name) for name in call.grads}
    outputs, upstream = [out for out, _ in pairs], [grad for _, grad in pairs]
    first = torch.autograd.grad(outputs, list(leaves.values()), upstream, create_graph=True)
    if not all(gradient.requires_grad for gradient in first):
        raise RuntimeError("the first derivative carries no gradient: create_graph was ignored")
    named = {**leaves, **{f"the gradient of {name}": grad for name, grad in zip(("o", "lse"), upstream)}}
    total: Any = sum((gradient.double() ** 2).sum() for gradient in first)
    return dict(zip(named, torch.autograd.grad(total, list(named.values()), materialize_grads=True)))


def _textbook(call: Call) -> tuple[Tensor, Tensor]:
    """`o` and the lse, in steps that torch differentiates as often as it is asked."""
    options, group = call.options, call.q.shape[1] // call.k.shape[1]
    k, v = call.k.repeat_interleave(group, 1), call.v.repeat_interleave(group, 1)
    scale, cap = options.get("scale"), options.get("softcap")
    scores = call.q @ k.mT * (call.q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores + options["bias"] if "bias" in options else scores
    logits = scores.masked_fill(~allowed_pairs(call), -torch.inf)
    if "sinks" in options:
        logits = torch.cat([logits, options["sinks"].view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    p, kept = torch.softmax(logits, -1)[..., : scores.shape[-1]], dropout_factor(call)
    return (p if kept is None else p * kept) @ v, logits.logsumexp(-1)
