"""Rows that see no key, and rows whose bias is a finite sentinel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.testing.budget import assert_within_budget
from attnzoo.testing.checks.accuracy import judge, known_results
from attnzoo.testing.failure import require
from attnzoo.testing.inputs import Call, make_call
from attnzoo.testing.oracle import Results
from attnzoo.testing.problem import Problem
from attnzoo.testing.subject import Subject

__all__ = ["mean_of_values", "row_deleted", "row_outside_loss"]


def row_deleted(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Empty rows change nothing: dk and dv are those of the call without them.

    Takes a problem whose empty rows are the same in every batch entry and head, given by mask or bias.
    """
    call = make_call(problem, device)
    truth, measured = known_results(problem, str(device))
    keep = ~truth.empty_rows[0, 0]
    require(bool((truth.empty_rows == ~keep).all()) and not bool(keep.all()), "this check takes rows that are empty everywhere")
    judge(subject.run(call), problem, device)
    shorter = subject.run(_without_rows(call, keep))
    for name in ("k", "v"):
        pair = truth.results.grads[name], measured.grads[name]
        assert_within_budget(shorter.grads[name], *pair, truth.amounts[f"d{name}"], f"d{name} without the empty rows")
    pair = truth.results.o[:, :, keep], measured.o[:, :, keep]
    amounts = truth.amounts["o"]
    assert_within_budget(shorter.o, *pair, (amounts[0][:, :, keep], amounts[1][:, :, keep]), "o without the empty rows")


def _without_rows(call: Call, keep: Tensor) -> Call:
    def cut(tensor: Tensor) -> Tensor:
        return tensor if tensor.shape[-2] == 1 else tensor[..., keep, :]

    options: dict[str, Any] = dict(call.options)
    for name in ("mask", "bias"):
        if name in options:
            options[name] = cut(options[name].detach())
    q = call.q.detach()[:, :, keep].requires_grad_()
    require(call.grad_o is not None, "this check takes a loss of o")
    return Call(q, call.k, call.v, options, ("q", "k", "v"), cut(call.grad_o), None)  # type: ignore[arg-type]


def row_outside_loss(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Rows without a key that the loss doesn't read leave every gradient finite and right."""
    call = make_call(problem, device)
    truth, _ = known_results(problem, str(device))
    require(bool(truth.empty_rows.any()), "this check takes a problem with empty rows")
    assert call.grad_o is not None
    o, lse = subject.forward(call)
    loss = (o * call.grad_o).masked_fill(truth.empty_rows[..., None], 0.0).sum()
    leaves = [call.leaf(name) for name in problem.grads]
    grads = dict(zip(problem.grads, torch.autograd.grad(loss, leaves)))
    judge(Results(o.detach(), None if lse is None else lse.detach(), grads), problem, device)


def mean_of_values(subject: Subject, problem: Problem, device: torch.device) -> None:
    """A row whose bias is all finfo.min is the mean of v: finite arithmetic, not a mask.

    Takes a bias in float32 or bfloat16 of a kind with "min" rows; fp16's finfo.min is too small to swallow scores.
    """
    call = make_call(problem, device)
    bias = call.options["bias"].detach()
    rows = (bias == torch.finfo(bias.dtype).min).all(-1)
    require(bool(rows.any()), "this check takes a bias with rows of finfo.min")
    results = subject.run(call)
    judge(results, problem, device)
    group = call.q.shape[1] // call.v.shape[1]
    mean = call.v.detach().double().repeat_interleave(group, 1).mean(2)[:, :, None].expand(results.o.shape)
    rows = rows.expand(results.o.shape[:3])
    error = float((results.o.double() - mean)[rows].abs().max())
    allowed = 2 * torch.finfo(results.o.dtype).eps * float(call.v.detach().abs().max())
    require(error <= allowed, f"a row whose bias is all finfo.min is off the mean of v by {error:.3e}, allowed {allowed:.3e}")
