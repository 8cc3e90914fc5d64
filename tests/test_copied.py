"""A copy that torch.compile keeps: what Inductor does to a graph is done here to one of the CPU, without its compiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.copied import copied


@pytest.fixture
def address_after_inductor() -> Callable[[Callable[[Tensor], Tensor], Tensor], int]:
    """Where a compiled function has its copy of a tensor, once Inductor's pass has dropped what it takes for nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.fx_passes.post_grad import remove_noop_ops
    seen: list[int] = []

    class Watched(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target is torch.ops.aten.sin.default:
                seen.append(args[0].data_ptr())
            return super().call_function(target, args, kwargs)

    def compile_graph(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        remove_noop_ops(graph.graph)
        graph.recompile()
        return Watched(graph).run

    def address(copy: Callable[[Tensor], Tensor], tensor: Tensor) -> int:
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(lambda t: copy(t).sin(), backend=aot_autograd(fw_compiler=compile_graph), fullgraph=True)(tensor)
        return seen.pop()

    return address


def odd(shape: tuple[int, ...]) -> Tensor:
    """At an address that is no multiple of 16 bytes."""
    n = int(torch.tensor(shape).prod())
    return torch.randn(n + 1)[1:].view(shape)


ORDERS = pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["contiguous", "bshd"])


@ORDERS
def test_the_compiler_keeps_it(order, address_after_inductor) -> None:
    tensor = odd((2, 4, 3, 8)).permute(order)
    assert tensor.data_ptr() % 16
    assert address_after_inductor(lambda t: copied(t, keeps_order=True), tensor) % 16 == 0


def test_a_clone_is_dropped(address_after_inductor) -> None:
    """What `copied` is for; where a later torch keeps a clone, it can go."""
    tensor = odd((2, 4, 3, 8))
    assert address_after_inductor(torch.clone, tensor) == tensor.data_ptr()


@ORDERS
@pytest.mark.parametrize("keeps_order", [True, False])
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_values_strides_and_gradients(order, keeps_order, compiler) -> None:
    tensor = odd((2, 4, 3, 8)).permute(order).requires_grad_()
    function = lambda t: copied(t, keeps_order=keeps_order)  # noqa: E731
    found = (torch.compile(function, backend=compiler, fullgraph=True) if compiler else function)(tensor)
    assert torch.equal(found, tensor)
    assert found.data_ptr() != tensor.data_ptr()
    assert found.is_contiguous() if not keeps_order else found.stride() == tensor.stride()
    (grad,) = torch.autograd.grad((found**2).sum(), tensor)
    assert torch.equal(grad, 2 * tensor)


TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda y: torch.func.grad(f)(y).sum())(x),
}


TORCHS_OWN = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of its rules for tangents


@TORCHS_OWN
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_inside_the_compiled_function(name) -> None:
    """An operator of ours gave a tangent of 0 here, without a word."""
    transformed = lambda x: TRANSFORMS[name](lambda y: (copied(y, keeps_order=True) ** 3).sum(), x)  # noqa: E731
    tensor = odd((2, 4, 3, 8))
    found = torch.compile(transformed, backend="aot_eager", fullgraph=True)(tensor)
    torch.testing.assert_close(found, transformed(tensor))


@TORCHS_OWN
def test_a_dual_tensor_keeps_its_tangent() -> None:
    tensor = odd((2, 4, 3, 8))
    compiled = torch.compile(lambda x: copied(x, keeps_order=True) ** 2, backend="aot_eager", fullgraph=True)
    with torch.autograd.forward_ad.dual_level():
        found = torch.autograd.forward_ad.unpack_dual(compiled(torch.autograd.forward_ad.make_dual(tensor, torch.ones_like(tensor))))
        assert found.tangent is not None
        torch.testing.assert_close(found.tangent, 2 * tensor)


def test_what_is_no_number_stays() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    found = torch.compile(copied, backend="aot_eager")(tensor)
    assert torch.equal(found.view(torch.int32), tensor.view(torch.int32))
