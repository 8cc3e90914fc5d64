"""flash: exact FlashAttention, forward and recomputing backward: portable Triton kernels, and faster ones on Hopper."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from attnzoo.backend import FEATURES, Capabilities
from attnzoo.backends.hopper import support
from attnzoo.backends.hopper.tiles import forward_tile, padded_head_dim
from attnzoo.backends.recompute import Gradients, RecomputingBackend, empty_output
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec
from attnzoo.tracing import constant_when_traced

LOWEST_CAPABILITY = (8, 0)
QUERY_TILE = 128  # of the portable dq kernel, at most
LONGEST = 2**29  # positions and their sums are int32 in the kernels
INTERPRET = "TRITON_INTERPRET"
Kernels = Literal["fastest", "portable", "hopper"]
INSTALL = "pip install 'attnzoo[triton]' (Linux)"


class Flash(RecomputingBackend):
    """Tiles of queries stay on chip while keys and values stream past; only o and the lse are kept.

    Needs Triton and a CUDA device of capability 8.0 or later.

    Args:
        is_interpreted: take CPU tensors instead and run in Triton's interpreter, which is for tests; None means
            that TRITON_INTERPRET=1 is set, which it must be before triton is imported.
        kernels: "fastest" chooses from metadata; "portable" keeps off the Hopper kernels; "hopper" takes them wherever they
            can serve, also where they are the slower ones. The last two are for tests and measurements.
    """

    name = "flash"
    reads_memory = True

    def __init__(self, *, is_interpreted: bool | None = None, kernels: Kernels = "fastest") -> None:
        super().__init__()
        self.kernels = kernels
        self.is_interpreted = os.environ.get(INTERPRET) == "1" if is_interpreted is None else is_interpreted
        features = frozenset(FEATURES) - {"layout"}
        self.capabilities = Capabilities(
            devices=frozenset({"cpu" if self.is_interpreted else "cuda"}),
            dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
            head_dims=(1, 256),
            forward=features - {"double_backward"},
            backward=features,
        )

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        reasons = super().unsupported_reasons(spec)
        longest = max(spec.q_len, spec.kv_len)
        if longest > LONGEST:
            reasons.append(f"a length is {longest}, it takes at most {LONGEST}")
        return [*reasons, *machine_reasons(spec.device)]

    def notes(self, spec: AttentionSpec) -> list[str]:
        if spec.device.type != "cuda" or machine_reasons(spec.device):
            return []
        passes = ("forward", "backward") if spec.grads else ("forward",)
        against = {name: self._reasons_against_hopper(spec, name) for name in passes}
        return [f"{name}: {'portable kernel: ' + '; '.join(found) if found else 'Hopper kernel'}" for name, found in against.items()]

    def _reasons_against_hopper(self, spec: AttentionSpec, name: str) -> tuple[str, ...]:
        return reasons_against_hopper(spec, name, self.kernels)

    def forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        if not self._reasons_against_hopper(spec, "forward"):
            return _hopper().forward(spec, inputs.q, inputs.k, inputs.v)  # type: ignore[no-any-return]
        return _portable().forward(spec, inputs, empty_output(spec, inputs.q))  # type: ignore[no-any-return]

    def backward(
        self, spec: AttentionSpec, inputs: AttentionInputs, o: Tensor, lse: Tensor, grad_o: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        if not self._reasons_against_hopper(spec, "backward"):
            grads = _hopper().backward(spec, inputs.q, inputs.k, inputs.v, o, lse, grad_o, grad_lse)
            return Gradients(**{name: grad for name, grad in zip("qkv", grads) if name in spec.grads})
        return Gradients(**_portable().backward(spec, inputs, o, lse, grad_o, grad_lse))


@cache
def _portable() -> Any:
    """The launchers, which import triton: at the first call, and no import statement at the others."""
    from attnzoo.backends.triton import launchers

    return launchers


@cache
def _hopper() -> Any:
    from attnzoo.backends.hopper import launch

    return launch


@lru_cache(maxsize=1024)
def reasons_against_hopper(spec: AttentionSpec, name: str, kernels: Kernels = "fastest") -> tuple[str, ...]:
    """Why not the Hopper kernel, or why the portable one is faster; name: "forward" or "backward"."""
    if kernels == "portable":
        return ('Flash(kernels="portable")',)
    if name == "backward":
        reasons = support.reasons_against(spec)
        if not reasons and kernels == "fastest" and is_one_sided(spec):
            reasons.append("without the gradient of q, or with it alone, the portable kernels leave out the rest, and are faster")
        return tuple(reasons)
    reasons = support.reasons_against(replace(spec, grads=()))
    if not reasons and kernels == "fastest" and is_small(spec):
        reasons.append("the call is so small that the portable kernel, which starts sooner and can split the keys, is faster")
    return tuple(reasons)


def is_small(spec: AttentionSpec) -> bool:
    """Whether a forward keeps too little of the card busy for a Hopper kernel to win: measured, `benchmarks/flash_gpu.py route`."""
    from attnzoo.backends.triton.launchers import processors_of

    head_dim = padded_head_dim(spec.head_dim)
    tile = forward_tile(head_dim, is_masked=spec.causal or spec.window is not None, keys=4096)  # the rule counts in tiles of long calls
    tiles = spec.batch * spec.q_heads * -(-spec.q_len // tile.block_q)
    processors = processors_of(spec.device)
    if spec.q_len <= 64 or (2 * tiles <= processors and spec.kv_len > 1024):
        return True  # the portable kernel splits the keys
    steps = -(-tiles // processors) * -(-spec.kv_len // tile.block_kv)  # of the busiest multiprocessor
    return head_dim <= 64 and (tiles <= processors or steps <= 8)


def is_one_sided(spec: AttentionSpec) -> bool:
    """Whether dq is wanted alone, or not at all: a pass that the portable backward then leaves out, and the Hopper one, which makes
    all three gradients in one, can't. The portable one took 0.46 to 0.94 of its time: measured, `benchmarks/flash_gpu.py subsets`.

    For dq it needs tiles of queries enough for the card: each walks all keys, where the Hopper one has programs for these.
    """
    if "q" not in spec.grads:
        return True
    if {"k", "v"} & set(spec.grads):
        return False
    from attnzoo.backends.triton.launchers import processors_of

    return spec.batch * spec.q_heads * -(-spec.q_len // QUERY_TILE) >= processors_of(spec.device)


@constant_when_traced
def machine_reasons(device: torch.device) -> list[str]:
    """Why Triton can't run on this machine's device, and what to do; looked up once a device."""
    if device not in _reasons:
        _reasons[device] = _look_up_machine(device)
    return _reasons[device]


_reasons: dict[torch.device, list[str]] = {}


def _has_compiler() -> bool:
    knobs = importlib.import_module("triton").knobs
    return bool(os.environ.get("CC") or knobs.build.impl or shutil.which("gcc") or shutil.which("clang"))


def _look_up_machine(device: torch.device) -> list[str]:
    try:
        if importlib.util.find_spec("triton") is None:
            return [f"triton is not installed: {INSTALL}"]
        if device.type != "cuda":
            return []
        importlib.import_module("triton")
    except Exception as error:
        return [f"triton can't be imported ({type(error).__name__}: {error}): {INSTALL}"]
    if not _has_compiler():
        return ["triton finds no C compiler for its launchers: install gcc or clang, or set CC"]
    if not torch.cuda.is_available():
        return ["torch finds no CUDA device"]
    if (device.index or 0) >= (count := torch.cuda.device_count()):
        return [f"device is {device}, this machine has {count} CUDA devices"]
    if torch.version.hip is not None:
        return [f"this is a ROCm build of torch ({torch.version.hip}), it takes CUDA"]
    capability = torch.cuda.get_device_capability(device)
    if capability < LOWEST_CAPABILITY:
        found, least = [".".join(map(str, version)) for version in (capability, LOWEST_CAPABILITY)]
        return [f"{device} has compute capability {found}, it takes {least} or later: name another backend, such as 'tiled'"]
    return []
