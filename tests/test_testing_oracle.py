"""The oracle against autograd on the textbook formula, and its Philox against the published answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attnzoo.layout import BlockLayout
from attnzoo.testing import oracle
from attnzoo.testing.blocks import LAYOUTS
from attnzoo.testing.inputs import make_call
from attnzoo.testing.philox import KNOWN_ANSWERS, kept, philox_4x32
from attnzoo.testing.problem import Blocks, Problem, Sinks, Table
from attnzoo.testing.rules import allowed_pairs, dropout_factor, expanded_layout

PROBLEMS = {
    "plain": Problem(q_len=9, kv_len=13, head_dim=8),
    "grouped": Problem(q_heads=6, kv_heads=2, q_len=9, kv_len=13, head_dim=8, value_dim=5),
    "bottom-right": Problem(q_len=9, kv_len=13, head_dim=8, causal=True, align="bottom_right", return_lse=True, loss="o+lse"),
    "softcap-bias": Problem(q_len=9, head_dim=8, softcap=1.5, bias=Table("random", "1h1k"), grads=("q", "k", "v", "bias")),
    "sinks-lse": Problem(q_len=9, head_dim=8, sinks=Sinks(), grads=("q", "k", "v", "sinks"), return_lse=True, loss="o+lse"),
    "dropout": Problem(q_len=9, head_dim=8, dropout_p=0.3, dropout_seed=7, scale=-0.4),
}


def textbook(problem: Problem, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """o and lse in float64 by plain torch, for autograd to differentiate."""
    call = make_call(problem)
    group = problem.q_heads // problem.k_heads
    k, v = leaves["k"].repeat_interleave(group, 1), leaves["v"].repeat_interleave(group, 1)
    scores = leaves["q"] @ k.mT * (problem.head_dim**-0.5 if problem.scale is None else problem.scale)
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    scores = scores + leaves.get("bias", 0.0)
    scores = scores.masked_fill(~allowed_pairs(call), -torch.inf)
    if "sinks" in leaves:
        column = leaves["sinks"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        p = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
        lse = torch.logsumexp(torch.cat([scores, column], -1), -1)
    else:
        p, lse = torch.softmax(scores, -1), torch.logsumexp(scores, -1)
    dropout = dropout_factor(call)
    return (p if dropout is None else p * dropout) @ v, lse


@pytest.mark.parametrize("name", PROBLEMS)
def test_oracle_is_the_derivative_of_the_textbook(name: str) -> None:
    problem = PROBLEMS[name]
    call = make_call(problem)
    truth = oracle.solve(call)
    leaves = {part: call.leaf(part).detach().double().requires_grad_() for part in problem.grads}
    o, lse = textbook(problem, leaves)
    loss = (o * call.grad_o.double()).sum()
    if call.grad_lse is not None:
        loss = loss + (lse * call.grad_lse.double()).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    torch.testing.assert_close(truth.results.o, o.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(truth.results.lse, lse.detach(), rtol=1e-12, atol=1e-13)
    for part, expected in zip(leaves, grads):
        torch.testing.assert_close(truth.results.grads[part], expected, rtol=1e-11, atol=1e-13, msg=f"d{part}")


@pytest.mark.parametrize("name", PROBLEMS)
def test_amounts_bound_the_results(name: str) -> None:
    """Absolute values of all terms, added up, are never less than the size of their sum."""
    truth = oracle.solve(make_call(PROBLEMS[name]))
    for part, value in truth.results.named().items():
        first, second = truth.amounts[part]
        assert bool((value.abs() <= first * (1 + 1e-9) + 1e-12).all()), f"A is smaller than {part}"
        assert bool((first <= second * (1 + 1e-9)).all()), f"A' is smaller than A for {part}"


@pytest.mark.parametrize(("counter", "key", "lanes"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: tuple[int, ...], key: tuple[int, int], lanes: tuple[int, ...]) -> None:
    words = tuple(np.array([word], dtype=np.uint64) for word in counter)
    assert tuple(int(lane[0]) for lane in philox_4x32(words, key)) == lanes


def test_dropout_keeps_the_share_it_says() -> None:
    share = kept(seed=5, p=0.3, batch=2, heads=3, q_len=100, k_len=101).mean()
    assert abs(share - 0.7) < 0.01


def test_dropout_reads_the_lane_of_its_key() -> None:
    whole = kept(seed=9, p=0.5, batch=1, heads=1, q_len=1, k_len=8)
    lanes = philox_4x32(tuple(np.array([word], dtype=np.uint64) for word in (1, 0, 0, 0)), (9, 0))
    assert [bool(flag) for flag in whole[0, 0, 0, 4:]] == [int(lane[0]) >= 2**31 for lane in lanes]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("block", [(16, 16), (20, 24), (1, 1)])
def test_expanded_layout_is_what_the_layout_says_of_itself(kind: str, block: tuple[int, int]) -> None:
    layout: BlockLayout = make_call(Problem(q_len=37, kv_len=45, layout=Blocks(kind, block, "1h"))).options["layout"]
    assert torch.equal(expanded_layout(layout), layout.to_dense())
