"""Seeded inputs: the same everywhere, laid out as named, poisoned around."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from attnzoo.testing.__main__ import parse
from attnzoo.testing.cases import CASES
from attnzoo.testing.inputs import GRADIENTS, make_call
from attnzoo.testing.problem import Problem, Table
from attnzoo.testing.storage import ALIGNMENT, STORAGES, bytes_of, stored
from attnzoo.testing.strategies import problems

SHAPE = (3, 2, 5, 4)


# far strides take gigabytes of address space: the T12 cases cover them
@pytest.mark.parametrize("name", [name for name, rule in STORAGES.items() if not rule.far])
def test_storage_keeps_the_values(name: str) -> None:
    rule = STORAGES[name]
    values = torch.randn(SHAPE)
    tensor = stored(values, name)
    assert tensor.shape == SHAPE
    assert bool(tensor.isfinite().all())
    if not rule.expand and not rule.overlap:
        assert torch.equal(tensor, values)
    for dim in rule.expand:
        assert tensor.stride("bhsd".index(dim)) == 0


@pytest.mark.parametrize("name", ["slack", "odd_rows", "packed", "step", "step_heads", "packed_dim", "step_dim"])
def test_slack_is_poisoned(name: str) -> None:
    tensor = stored(torch.zeros(SHAPE), name)
    memory = bytes_of(tensor).view(torch.float32)
    inside = len(memory) - int(memory.isnan().sum())
    assert inside == tensor.numel()
    assert int(memory[ALIGNMENT:-ALIGNMENT].isnan().sum()) > 0


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_offset_is_in_elements(offset: int) -> None:
    tensor = stored(torch.zeros(SHAPE, dtype=torch.float16), "contiguous", offset=offset)
    assert tensor.storage_offset() == ALIGNMENT + offset
    assert tensor.data_ptr() % 16 == (2 * offset) % 16


@pytest.mark.parametrize("storage", ["contiguous", "bshd", "expand_heads", *GRADIENTS])
def test_gradient_of_o_depends_on_the_problem_alone(storage: str) -> None:
    """Not on what the backend returned: `empty_like(o)` once fed two backends different gradients."""
    problem = Problem(grad_storage=storage)
    first, second = make_call(problem), make_call(replace(problem, storage=("bshd", "last_dim", "sbhd")))
    assert first.grad_o is not None
    assert second.grad_o is not None
    assert torch.equal(first.grad_o, second.grad_o)
    assert first.grad_o.stride() == second.grad_o.stride()


def test_equal_problems_give_equal_tensors() -> None:
    problem = Problem(mask=Table("random"), bias=Table("minus_inf"), dropout_p=0.5, dropout_seed=3)
    first, second = make_call(problem).tensors(), make_call(problem).tensors()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_another_seed_gives_other_tensors() -> None:
    assert not torch.equal(make_call(Problem(seed=1)).q, make_call(Problem(seed=2)).q)


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(problems())
def test_a_printed_problem_reads_back(problem: Problem) -> None:
    assert parse(repr(problem)) == problem


def test_every_case_reads_back() -> None:
    for case in CASES:
        assert parse(repr(case.problem)) == case.problem


def test_only_a_problem_is_read() -> None:
    with pytest.raises(ValueError, match="malformed"):
        parse("__import__('os').getcwd()")
    with pytest.raises(ValueError, match="not a Problem"):
        parse("Table()")


def test_features_are_those_of_the_spec() -> None:
    """Problem.features, which needs no torch, agrees with what a backend is asked."""
    from attnzoo.backend import features_of
    from attnzoo.spec import AttentionSpec

    for case in CASES:
        problem = case.problem
        if problem.batch * problem.q_heads * problem.q_len * problem.k_len > 2**16 or case.check == "huge_strides":
            continue
        call = make_call(problem)
        spec = AttentionSpec.of(call.q, call.k, call.v, **call.options)
        assert tuple(features_of(spec)) == problem.features, case.id
