"""Calls that more than memory must see: modes, tracers, tensors without memory, transforms, tangents, gradients in a batch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo.backend import Backend
from attnzoo.backends.flash import Flash
from attnzoo.backends.naive import Naive
from attnzoo.backends.operators import gradients_compiled
from attnzoo.backends.recompute import RecomputingBackend
from attnzoo.backends.tiled import Tiled
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

interpreted = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1", reason="needs triton, in its interpreter"
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
SEES_NOTHING = "name backend='naive'"


@pytest.fixture(params=["tiled", pytest.param("flash", marks=interpreted)])
def backend(request: pytest.FixtureRequest) -> RecomputingBackend:
    return Tiled() if request.param == "tiled" else Flash(is_interpreted=True)


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(*, requires_grad: bool = False) -> list[Tensor]:
    shapes = ((1, 2, 9, 4), (1, 1, 20, 4), (1, 1, 20, 4))
    return [normal(*shape, seed=seed).requires_grad_(requires_grad) for seed, shape in enumerate(shapes)]


def attend(backend: Backend, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    spec = AttentionSpec.of(q, k, v, return_lse=True, **options)
    o, lse = backend.attend(spec, AttentionInputs.of(spec, q, k, v, **options))
    assert lse is not None
    return o, lse


def assert_near(found: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=lambda text: f"{what}: {text}")


class Spy(TorchDispatchMode):
    """Keeps the names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_fake_tensors_have_shapes_and_strides_alone(backend: RecomputingBackend) -> None:
    with FakeTensorMode() as mode:
        leaves = [mode.from_tensor(tensor).requires_grad_() for tensor in qkv()]
        o, lse = attend(backend, *leaves)
        grads = torch.autograd.grad((o.sum(), lse.sum()), leaves)
    plain = qkv(requires_grad=True)
    outputs = attend(backend, *plain)
    expected = [*outputs, *torch.autograd.grad([out.sum() for out in outputs], plain)]
    for found, want in zip((o, lse, *grads), expected, strict=True):
        assert (found.shape, found.dtype, found.stride()) == (want.shape, want.dtype, want.stride())


@interpreted
def test_a_mode_sees_both_passes_of_a_kernel() -> None:
    backend, leaves = Flash(is_interpreted=True), qkv(requires_grad=True)
    with Spy() as forward:
        o, _ = attend(backend, *leaves)
    with Spy() as backward:
        found = torch.autograd.grad(o.sum(), leaves)
    assert "attnzoo.forward.default" in forward.seen
    assert "attnzoo.backward.default" in backward.seen
    assert_near(found, torch.autograd.grad(attend(Naive(), *leaves)[0].sum(), leaves), "gradients inside a mode")
    o, _ = attend(backend, *leaves)
    with Spy() as backward:
        found = torch.autograd.grad(o.sum(), leaves)
    assert "attnzoo.backward.default" in backward.seen, "the mode sees no backward of a forward before it"
    assert_near(found, torch.autograd.grad(attend(Naive(), *leaves)[0].sum(), leaves), "gradients inside a mode")


@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_make_fx_traces_what_computes(tracing_mode: str, backend: RecomputingBackend) -> None:
    q, k, v = qkv()
    graph = make_fx(lambda q: attend(backend, q, k, v)[0], tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(q)
    assert_near(graph(2 * q), attend(Naive(), 2 * q, k, v)[0], "the traced graph on other values")


def test_make_fx_with_symbolic_lengths(backend: RecomputingBackend) -> None:
    graph = make_fx(lambda q, k, v: attend(backend, q, k, v)[0], tracing_mode="symbolic")(*qkv())
    q, k, v = normal(1, 2, 7, 4, seed=5), normal(1, 1, 13, 4, seed=6), normal(1, 1, 13, 4, seed=7)
    assert_near(graph(q, k, v), attend(Naive(), q, k, v)[0], "the traced graph at other lengths")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_jit_trace_traces_what_computes(requires_grad: bool, backend: RecomputingBackend) -> None:
    q, k, v = qkv(requires_grad=requires_grad)
    traced = torch.jit.trace(lambda q, k, v: attend(backend, q, k, v)[0], (q, k, v), check_trace=False)
    assert_near(traced(2 * q, k, v), attend(Naive(), 2 * q, k, v)[0], "the trace on other values")


def test_tensors_that_wrap_others(backend: RecomputingBackend) -> None:
    q, k, v = qkv()
    o, _ = attend(backend, TwoTensor(q, 2 * q), k, v)
    assert_near((o.a, o.b), (attend(Naive(), q, k, v)[0], attend(Naive(), 2 * q, k, v)[0]), "o of two tensors in one")


def test_tensors_of_zeros_without_memory(backend: RecomputingBackend) -> None:
    q, k, v = qkv(requires_grad=True)
    zeros = torch._efficientzerotensor(q.shape)
    assert_near(attend(backend, zeros, k, v), attend(Naive(), torch.zeros_like(q), k, v), "q of zeros")
    o, lse = attend(backend, q, k, v)
    found = torch.autograd.grad((o, lse), (q, k, v), (torch._efficientzerotensor(o.shape), torch.ones_like(lse)))
    assert_near(found[0], torch.autograd.grad(attend(Naive(), q, k, v)[1].sum(), q)[0], "gradients where that of o is zero")
    assert not found[2].any()


def test_gradients_in_a_batch(backend: RecomputingBackend) -> None:
    leaves = qkv(requires_grad=True)
    upstream = normal(3, 1, 2, 9, 4, seed=7), normal(3, 1, 2, 9, seed=8)
    expected = [torch.autograd.grad(attend(Naive(), *leaves), leaves, (up, lse_up)) for up, lse_up in zip(*upstream)]
    outputs = attend(backend, *leaves)
    found = torch.autograd.grad(outputs, leaves, upstream, is_grads_batched=True, retain_graph=True)
    assert_near(found, [torch.stack(grads) for grads in zip(*expected)], "is_grads_batched=True")
    mapped = torch.func.vmap(lambda up, lse_up: torch.autograd.grad(outputs, leaves, (up, lse_up), retain_graph=True))(*upstream)
    assert_near(mapped, [torch.stack(grads) for grads in zip(*expected)], "vmap of the backward")


TRANSFORMED = {
    "vmap": lambda attend, q: torch.func.vmap(attend)(torch.stack([q, q])),
    "grad": lambda attend, q: torch.func.grad(lambda q: attend(q).sum())(q),
    "jvp": lambda attend, q: torch.func.jvp(attend, (q,), (q,)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_are_refused(name: str, backend: RecomputingBackend) -> None:
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match=SEES_NOTHING):
        TRANSFORMED[name](lambda q: attend(backend, q, k, v)[0], q)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_are_refused_within_compiled_code(name: str, backend: RecomputingBackend) -> None:
    q, k, v = qkv()
    compiled = torch.compile(lambda q: TRANSFORMED[name](lambda q: attend(backend, q, k, v)[0], q), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=SEES_NOTHING):
        compiled(q)


@pytest.mark.parametrize("name", ["vmap", "grad"])  # jvp around compiled code torch refuses itself
def test_transforms_are_refused_around_compiled_code(name: str, backend: RecomputingBackend) -> None:
    q, k, v = qkv()
    compiled = torch.compile(lambda q: attend(backend, q, k, v)[0], backend="eager", fullgraph=True)
    compiled(q)
    with pytest.raises(Exception, match=SEES_NOTHING):
        TRANSFORMED[name](compiled, q)


def test_tangents_are_refused(backend: RecomputingBackend) -> None:
    q, k, v = qkv()
    compiled = torch.compile(lambda q: attend(backend, q, k, v)[0], backend="eager")
    compiled(q)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="q carries a tangent"):
            attend(backend, dual, k, v)
        with pytest.raises(NotImplementedError, match=SEES_NOTHING):
            compiled(dual)


def test_a_transform_of_something_else_is_none_of_tileds_business() -> None:
    q, k, v = qkv()
    expected = attend(Naive(), q, k, v)[0]
    found = torch.func.vmap(lambda factor: factor * attend(Tiled(), q, k, v)[0])(torch.tensor([1.0, 2.0]))
    assert_near(found, torch.stack([expected, 2 * expected]), "attention to what is not in the batch")


def test_second_derivatives_of_operators(backend: RecomputingBackend) -> None:
    def second(call: Any) -> tuple[Tensor, ...]:
        leaves = qkv(requires_grad=True)
        leaves[0] = leaves[0].detach().mT.contiguous().mT.requires_grad_()  # the operator makes it contiguous
        o, lse = call(*leaves)
        first = torch.autograd.grad(o.pow(2).sum() + lse.sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum([grad.pow(2).sum() for grad in first]), leaves)

    compiled = torch.compile(lambda q, k, v: attend(backend, q, k, v), backend="eager", fullgraph=True)
    expected = second(lambda q, k, v: attend(Naive(), q, k, v))
    for found, want in zip(second(compiled), expected):
        assert (found - want).abs().max() <= 1e-5 * want.abs().max(), "second derivatives of a compiled call"
    with Spy():
        for found, want in zip(second(lambda q, k, v: attend(backend, q, k, v)), expected):
            assert (found - want).abs().max() <= 1e-5 * want.abs().max(), "second derivatives inside a mode"


def test_the_backward_operator_refuses_a_derivative(backend: RecomputingBackend) -> None:
    q, k, v = qkv(requires_grad=True)
    spec = AttentionSpec.of(q, k, v)
    o, lse = [out.detach() for out in attend(backend, q, k, v)]
    grads = gradients_compiled(backend.key, spec, AttentionInputs.of(spec, q, k, v), o, lse, torch.ones_like(o), None)
    assert grads.q is not None
    with pytest.raises(NotImplementedError, match="has no derivative"):
        grads.q.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch reads it itself
def test_compiled_autograd_over_an_eager_forward(backend: RecomputingBackend) -> None:
    leaves = qkv(requires_grad=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        attend(backend, *leaves)[0].sum().backward()
    expected = torch.autograd.grad(attend(Naive(), *leaves)[0].sum(), leaves)
    assert_near([leaf.grad for leaf in leaves], list(expected), "gradients")


def test_a_compiled_backward_is_one_operator(backend: RecomputingBackend) -> None:
    leaves = qkv(requires_grad=True)
    compiled = torch.compile(lambda q, k, v: attend(backend, q, k, v)[0], backend="aot_eager", fullgraph=True)
    o = compiled(*leaves)
    with Spy() as spy:
        o.sum().backward()
    assert spy.seen.count("attnzoo.backward.default") == 1, spy.seen
    assert not any(["softmax" in name or "exp" in name for name in spy.seen if "expand" not in name]), (
        "the backward was traced through naive"
    )
