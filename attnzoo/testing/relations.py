"""Metamorphic relations: two calls whose results must agree, with no oracle to say what they are.

Each takes a problem, changes the call in a way that must not matter, or must matter in a known way, and compares
outputs and gradients of the two runs. Registered as checks, so that cases name them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import attnzoo
from attnzoo.layout import BlockLayout
from attnzoo.testing.failure import require
from attnzoo.testing.inputs import Call, make_call
from attnzoo.testing.oracle import Results
from attnzoo.testing.problem import Blocks, Problem
from attnzoo.testing.rules import expanded_layout
from attnzoo.testing.subject import Subject

__all__ = ["RELATIONS"]

Relation = Callable[[Subject, Problem, torch.device], None]

LEAST_SIZE = 0.1  # terms of order one may cancel to less
ULPS = {"max": 24.0, "mean": 2.0}


def assert_alike(first: Tensor, second: Tensor, name: str, relation: str, *, slack: float = 1.0) -> None:
    """Raise unless two tensors agree as two orders of the same sums would: in units of eps times their size."""
    require(first.shape == second.shape, f"{relation}: {name} has shapes {tuple(first.shape)} and {tuple(second.shape)}")
    if not first.numel():
        return
    same = (first == second) | (first.isnan() & second.isnan())
    error = torch.where(same, 0.0, (first.double() - second.double()).abs())
    size = float(first.double()[first.isfinite()].abs().max()) if bool(first.isfinite().any()) else 0.0
    size = max(size, LEAST_SIZE)
    epsilon = torch.finfo(first.dtype).eps
    for kind, found in (("max", float(error.max())), ("mean", float(error.mean()))):
        allowed = slack * ULPS[kind] * epsilon * size + torch.finfo(first.dtype).tiny
        require(found <= allowed, f"{relation}: {name} differs, {kind}|difference| {found:.3e}, allowed {allowed:.3e} at size {size:.3g}")


def assert_results_alike(first: Results, second: Results, relation: str, *, slack: float = 1.0) -> None:
    for name, tensor in first.named().items():
        assert_alike(tensor, second.named()[name], name, relation, slack=slack)
    if first.lse is not None and second.lse is not None:
        assert_alike(first.lse, second.lse, "lse", relation, slack=slack)


def changed(call: Call, *, options: dict[str, Any] | None = None, **tensors: Tensor) -> Call:
    """The call with other tensors, which require a gradient where the old ones did."""
    names = {"q": call.q, "k": call.k, "v": call.v, "grad_o": call.grad_o, "grad_lse": call.grad_lse}
    for name, tensor in tensors.items():
        names[name] = tensor.detach().requires_grad_() if name in call.grads else tensor
    return Call(names["q"], names["k"], names["v"], call.options if options is None else options, call.grads, *list(names.values())[3:])  # type: ignore[arg-type]


def shift_of_scores(subject: Subject, problem: Problem, device: torch.device) -> None:
    """A constant added to every score of a row changes neither o nor a gradient, and the lse by itself."""
    call = make_call(replace(problem, return_lse=True), device)
    plain = subject.run(call)
    for constant in (2.0, -64.0):
        rows = torch.full((problem.q_len, problem.k_len), constant, dtype=call.q.dtype, device=device)
        moved = subject.run(changed(call, options={**call.options, "bias": rows}))
        assert plain.lse is not None
        assert moved.lse is not None
        shifted = Results(moved.o, moved.lse - constant, moved.grads)
        assert_results_alike(plain, shifted, f"shift of scores by {constant}", slack=4 + abs(constant))


def permutation_of_keys(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Keys in another order, with their values and their columns of mask and bias."""
    call = make_call(problem, device)
    order = torch.randperm(problem.k_len, generator=torch.Generator().manual_seed(1)).to(device)
    back = torch.argsort(order)
    options = dict(call.options)
    for name in ("mask", "bias"):
        if name in options and options[name].shape[-1] != 1:
            options[name] = options[name].detach()[..., order]
    plain = subject.run(call)
    other = subject.run(changed(call, options=options, k=call.k[:, :, order], v=call.v[:, :, order]))
    grads = {name: gradient[:, :, back] if name in "kv" else gradient for name, gradient in other.grads.items()}
    assert_results_alike(plain, Results(other.o, other.lse, grads), "permutation of keys", slack=2)


def split_and_merge(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Attention over parts of the keys, merged by their lse, is attention over all; gradients flow through both."""
    problem = replace(problem, return_lse=True)
    call = make_call(problem, device)
    whole = subject.run(call)
    cuts = sorted({0, problem.k_len // 3, problem.k_len // 3 + 1, problem.k_len})
    parts = []
    for start, stop in itertools.pairwise(cuts):
        options = dict(call.options)
        for name in ("mask", "bias"):
            if name in options and options[name].shape[-1] != 1:
                options[name] = options[name][..., start:stop]
        parts.append(subject(call.q, call.k[:, :, start:stop], call.v[:, :, start:stop], **options))
    o, lse = attnzoo.merge(parts)
    leaves = [call.leaf(name) for name in call.grads]
    grads = dict(zip(call.grads, torch.autograd.grad(o, leaves, call.grad_o))) if leaves else {}
    merged = Results(o.detach(), lse.detach(), grads)
    assert_results_alike(whole, merged, "split of keys and merge by lse", slack=4 + abs(problem.shift) / 16)


def layout_as_mask(subject: Subject, problem: Problem, device: torch.device) -> None:
    """`layout=L` means `mask=L.to_dense()`."""
    call = make_call(problem, device)
    options = dict(call.options)
    layout: BlockLayout = options.pop("layout")
    dense = expanded_layout(layout).to(device)
    require(torch.equal(dense, layout.to_dense()), "to_dense() is not what the lists of the layout say")
    options["mask"] = dense & options["mask"] if "mask" in options else dense
    assert_results_alike(subject.run(call), subject.run(changed(call, options=options)), "layout against dense mask", slack=2)


def full_layout(subject: Subject, problem: Problem, device: torch.device) -> None:
    """A layout of full blocks everywhere means no layout."""
    call = make_call(problem, device)
    layout = make_call(replace(problem, layout=Blocks("all", (16, 32))), device).options["layout"]
    full = subject.run(changed(call, options={**call.options, "layout": layout}))
    assert_results_alike(subject.run(call), full, "layout all full against none", slack=2)


def future_changes_nothing(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Causal: other keys and values from position t on leave the rows before t alone, bit for bit."""
    require(problem.causal and problem.q_len == problem.k_len, "this relation takes a causal square")
    call = make_call(replace(problem, grads=(), deterministic=False), device)
    plain, _ = subject.forward(call)
    for cut in sorted({1, problem.k_len // 2, problem.k_len - 1} - {0}):
        k, v = call.k.clone(), call.v.clone()
        k[:, :, cut:], v[:, :, cut:] = 7.0, -9.0
        other, _ = subject.forward(changed(call, k=k, v=v))
        past = plain[:, :, :cut], other[:, :, :cut]
        assert_alike(*past, "o before the change", f"future tokens from {cut} on")
        if cut < problem.q_len:
            require(not torch.equal(plain[:, :, cut:], other[:, :, cut:]), "the changed tokens changed nothing at all")


def padding_is_ignored(subject: Subject, problem: Problem, device: torch.device) -> None:
    """What masked keys and values hold, short of NaN, reaches no result: rows as they are, their gradient zero."""
    call = make_call(problem, device)
    mask = call.options["mask"].expand(problem.batch, problem.q_heads, problem.q_len, problem.k_len)
    hidden = ~mask.any(-2).any(1)[:, None, :, None]  # (B, 1, Skv, 1)
    require(bool(hidden.any()), "this relation takes keys that no query sees")
    k, v = (torch.where(hidden, torch.full_like(t, 1000.0), t.detach()) for t in (call.k, call.v))
    plain, other = subject.run(call), subject.run(changed(call, k=k, v=v))
    assert_results_alike(plain, other, "content of padding keys")
    for name in ("k", "v"):
        if name in other.grads:
            gradient = other.grads[name].masked_select(hidden.expand_as(other.grads[name]))
            require(not bool(gradient.any()), f"d{name} is not 0 at a key that no query sees")


def batch_of_one(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Each batch entry alone gives what it gives among others."""
    call = make_call(problem, device)
    together = subject.run(call)
    for b in range(problem.batch):

        def one(tensor: Tensor, b: int = b) -> Tensor:
            return tensor[b : b + 1] if tensor.ndim == 4 and tensor.shape[0] != 1 else tensor

        options = {name: one(value.detach()) if isinstance(value, Tensor) else value for name, value in call.options.items()}
        gradient = None if call.grad_o is None else call.grad_o[b : b + 1]
        alone = subject.run(changed(call, options=options, q=call.q[b : b + 1], k=call.k[b : b + 1], v=call.v[b : b + 1], grad_o=gradient))  # type: ignore[arg-type]
        part = Results(together.o[b : b + 1], None, {name: g[b : b + 1] for name, g in together.grads.items()})
        assert_results_alike(part, Results(alone.o, None, alone.grads), f"batch entry {b} alone", slack=2)


def repeated_heads(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Grouped heads are k and v with each head repeated; their gradients are the sums over the group."""
    call = make_call(problem, device)
    group = problem.q_heads // problem.k_heads
    require(group > 1, "this relation takes grouped heads")
    grouped = subject.run(call)
    repeated = subject.run(changed(call, k=call.k.repeat_interleave(group, 1), v=call.v.repeat_interleave(group, 1)))
    grads = {
        name: g if name == "q" else g.float().unflatten(1, (problem.k_heads, group)).sum(2).to(g.dtype)
        for name, g in repeated.grads.items()
    }
    assert_results_alike(grouped, Results(repeated.o, repeated.lse, grads), "grouped heads against repeated ones", slack=4)


def value_is_linear(subject: Subject, problem: Problem, device: torch.device) -> None:
    """o is linear in v: twice v gives twice o, and v = 1 gives 1 in every row that sees a key."""
    call = make_call(replace(problem, grads=()), device)
    plain, _ = subject.forward(call)
    double, _ = subject.forward(changed(call, v=call.v * 2))
    assert_alike(plain * 2, double, "o", "v doubled")
    ones, _ = subject.forward(changed(call, v=torch.ones_like(call.v)))
    empty = (plain == 0).all(-1, keepdim=True)
    assert_alike(ones.masked_fill(empty, 1.0), torch.ones_like(ones), "o", "v of ones")


def repetition(subject: Subject, problem: Problem, device: torch.device) -> None:
    """The same call twice gives the same bits where deterministic=True."""
    from attnzoo.testing.checks.memory import same_bits

    call = make_call(replace(problem, deterministic=True), device)
    same_bits(subject.run(call), subject.run(call), "deterministic=True")


RELATIONS: dict[str, Relation] = {
    relation.__name__: relation
    for relation in (
        shift_of_scores,
        permutation_of_keys,
        split_and_merge,
        layout_as_mask,
        full_layout,
        future_changes_nothing,
        padding_is_ignored,
        batch_of_one,
        repeated_heads,
        value_is_linear,
        repetition,
    )
}
"""Name -> relation. NaN in the slack is `checks.memory.poisoned_slack`."""
