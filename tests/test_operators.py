"""The opaque operators keep torch's rules: schema, fakes with true strides, autograd, and both under AOT dispatch."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.backends import operators
from attnzoo.backends.flash import Flash
from attnzoo.backends.recompute import RecomputingBackend
from attnzoo.backends.tiled import Tiled

interpreted = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1", reason="needs triton, in its interpreter"
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


@pytest.fixture(params=["tiled", pytest.param("flash", marks=interpreted)])
def backend(request: pytest.FixtureRequest) -> RecomputingBackend:
    return Tiled() if request.param == "tiled" else Flash(is_interpreted=True)


def arguments(backend: RecomputingBackend, *, requires_grad: bool) -> tuple[Any, ...]:
    """What `attend_compiled` packs for a causal call with a bias; q's heads lie inside its sequence, k's and v's do not."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = randn(1, 9, 2, 16).transpose(1, 2), randn(1, 1, 7, 16), randn(1, 1, 7, 16)
    bias = randn(1, 2, 9, 7)
    tensors = [tensor.detach().requires_grad_(requires_grad) for tensor in (q, k, v, bias)]
    q, k, v, bias = tensors
    options = (True, "top_left", None, None, 0.5, None, 0.0, False, "q,k,v,bias")
    return (q, k, v, None, bias, None, None, None, None, [], "", backend.key, *options)


def test_forward(backend: RecomputingBackend) -> None:
    torch.library.opcheck(torch.ops.attnzoo.forward.default, arguments(backend, requires_grad=True))


def test_backward(backend: RecomputingBackend) -> None:
    given = arguments(backend, requires_grad=False)
    o, lse = torch.ops.attnzoo.forward(*given)
    assert operators.N_TENSORS == 9, "the arguments above are packed in another way now"
    torch.library.opcheck(torch.ops.attnzoo.backward.default, (o, lse, torch.ones_like(o), torch.ones_like(lse), *given))


def test_strides_that_a_compiler_may_choose(backend: RecomputingBackend) -> None:
    """Rows, sinks and lse that don't lie side by side are read where they are."""
    q, k, v, *options = arguments(backend, requires_grad=False)
    options[4] = sinks = torch.tensor([0.5, -1.0])
    options[-1] = "q,k,v,bias,sinks"

    def spread(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor + 1.0], dim=-1)[..., 0]

    def results(move: Any) -> list[Tensor]:
        given = (*[move(tensor) for tensor in (q, k, v)], *options[:4], move(sinks), *options[5:])
        o, lse = torch.ops.attnzoo.forward(*given)
        return [o, lse, *torch.ops.attnzoo.backward(move(o), move(lse), torch.ones_like(o), torch.ones_like(lse), *given)]

    for found, expected in zip(results(spread), results(lambda tensor: tensor), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_copy_of_a_backend_has_a_key_of_its_own(backend: RecomputingBackend) -> None:
    for twin in (copy.deepcopy(backend), pickle.loads(pickle.dumps(backend))):
        assert twin.key != backend.key
        assert RecomputingBackend.instances[twin.key] is twin


def test_a_backend_of_another_process_is_missed_by_name(backend: RecomputingBackend) -> None:
    given = [f"{backend.name}#999" if argument == backend.key else argument for argument in arguments(backend, requires_grad=False)]
    with pytest.raises(
        LookupError, match=rf"no backend '{backend.name}#999' in this process, there is .*{backend.key}.*attnzoo.get\('{backend.name}'\)"
    ):
        torch.ops.attnzoo.forward(*given)
