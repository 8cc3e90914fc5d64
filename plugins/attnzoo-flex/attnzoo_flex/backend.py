"""Flex: FlexAttention compiled for each kind of call; FlexEager: torch's unfused reference of it."""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from attnzoo import AttentionInputs, AttentionSpec, Backend, Capabilities
from attnzoo.tracing import constant_when_traced
from attnzoo_flex.blocks import block_mask
from attnzoo_flex.mods import score_mod

__all__ = ["Flex", "FlexEager"]

HALF = frozenset({torch.float16, torch.bfloat16})
BANDS = frozenset({"causal", "top_left", "bottom_right", "window"})
PAIRS = BANDS | {"mask", "segments", "layout"}
KINDS = 512
"""Compiled calls that are kept."""
FARTHEST = 2**31
"""Elements from the first of a tensor."""

ON_CUDA = Capabilities(  # what has run on a card; more is claimed when the conformance kit has judged it there
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16}),
    head_dims=(64, 128),
    forward=frozenset({"causal", "layout"}),
    backward=frozenset({"causal", "layout"}),
    block_multiple=128,  # blocks are whole tiles of its kernels
)
ON_CPU = Capabilities(
    devices=frozenset({"cpu"}),
    dtypes=HALF | {torch.float32},
    head_dims=(16, 128),
    forward=PAIRS | {"bias", "softcap", "grouped_heads"},
    gradients=False,
)
EAGER = Capabilities(
    devices=frozenset({"cpu"}),
    dtypes=frozenset({torch.float32, torch.float64}),
    head_dims=(1, 2**31),
    forward=PAIRS | {"bias", "softcap", "lse", "grouped_heads", "value_dim"},
    materializes_scores=True,
    gradients=False,
)


def call(q: Tensor, k: Tensor, v: Tensor, score: Any, blocks: Any, scale: float, groups: bool, lse: bool) -> Any:
    """FlexAttention with positional arguments, whose code is copied for each kind of call."""
    wanted = AuxRequest(lse=True) if lse else None
    return flex_attention(q, k, v, score_mod=score, block_mask=blocks, scale=scale, enable_gqa=groups, return_aux=wanted)


_numbers = itertools.count()


@lru_cache(maxsize=KINDS)
def compiled(spec: AttentionSpec, compiler: str) -> Callable[..., Any]:
    """`call`, compiled for one spec by a compiler that torch.compile knows.

    Each has code of its own: Dynamo counts recompilations by code object, and past its limit would run unfused, or fail.
    """
    if compiler == "inductor":
        import_quietly()
    code = call.__code__.replace(co_name=f"flex_{next(_numbers)}")
    return torch.compile(FunctionType(code, call.__globals__), backend=compiler, dynamic=False, fullgraph=True)


def import_quietly() -> None:
    """What Inductor imports on the CPU, whose import warns of torch's own use of torch.jit: nobody's business here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch.utils.mkldnn")


def run(spec: AttentionSpec, inputs: AttentionInputs, compiler: str) -> tuple[Tensor, Tensor | None]:
    """Compile the call if its kind is new, and run it; within a compiled function it is part of that."""
    function = call if torch.compiler.is_compiling() else compiled(spec, compiler)
    score, blocks = score_mod(spec, inputs), block_mask(spec, inputs, skips=compiler == "inductor")
    q, k, v = [near(tensor) for tensor in (inputs.q, inputs.k, inputs.v)]
    if not spec.grads:  # on the CPU it refuses tensors that require one, even where torch records none
        q, k, v = q.detach(), k.detach(), v.detach()
    found = function(q, k, v, score, blocks, spec.scale, spec.group > 1, spec.return_lse)
    return (found[0], found[1].lse) if spec.return_lse else (found, None)


def near(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it reaches beyond what the kernels count in int32: they would read elsewhere, without an error."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.contiguous() if reach >= FARTHEST else tensor


class Flex(Backend):
    """FlexAttention, compiled by Inductor: Triton kernels on CUDA, a C++ one on the CPU, which has no backward and no lse."""

    name = "flex"
    capabilities = Capabilities(
        devices=ON_CUDA.devices | ON_CPU.devices,
        dtypes=ON_CUDA.dtypes | ON_CPU.dtypes,
        head_dims=(16, 128),
        forward=ON_CUDA.forward | ON_CPU.forward,
        backward=ON_CUDA.backward,
    )

    def capabilities_on(self, device: str) -> Capabilities:
        return {"cpu": ON_CPU, "cuda": ON_CUDA}.get(device, self.capabilities)

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        return super().unsupported_reasons(spec) + card_reasons(spec.device) + bias_reasons(spec)

    def attend(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        return run(spec, inputs, "inductor")


class FlexEager(Backend):
    """What FlexAttention runs without torch.compile: plain operations on all scores. For looking at its semantics."""

    name = "flex_eager"
    capabilities = EAGER

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        return super().unsupported_reasons(spec) + bias_reasons(spec)

    def attend(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        return run(spec, inputs, "eager")


@constant_when_traced
def card_reasons(device: torch.device) -> list[str]:
    """Why this machine has no such device."""
    if device.type != "cuda" or torch.cuda.is_available():
        return []
    return [f"the device is {device}, torch sees no CUDA device here"]


def bias_reasons(spec: AttentionSpec) -> list[str]:
    if spec.bias is None or not spec.return_lse:
        return []
    return ["bias and return_lse: FlexAttention's lse is to the base 2, where a bias near the lowest number overflows; ask for one of them"]
