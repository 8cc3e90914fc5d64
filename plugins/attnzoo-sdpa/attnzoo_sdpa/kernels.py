"""torch's attention kernels: what each can do, decided from metadata alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from attnzoo import AttentionSpec, Capabilities
from attnzoo.backend import FEATURES
from attnzoo.tracing import constant_when_traced
from attnzoo_sdpa.convert import Wants, needs_table

__all__ = ["CPU_FLASH", "CUDNN", "EFFICIENT", "FLASH", "MATH", "Kernel"]

BANDS = frozenset({"causal", "top_left", "bottom_right", "window"})
TABLES = frozenset({"mask", "bias", "segments", "layout"})
BEYOND_TORCH = frozenset({"softcap", "sinks", "dropout", "lse"})  # no argument, no result, or another generator
HALF = frozenset({torch.float16, torch.bfloat16})
EVERY_DTYPE = HALF | {torch.float32, torch.float64}
ANY_DIM = (1, 2**31)
MAX_GRID = 65535
OLDEST_CARD = 80  # sm_80
LEAST_SCALE = 2.0**-10
QUERY_TILE = 64


def never(spec: AttentionSpec) -> bool:
    return False


def always(spec: AttentionSpec) -> bool:
    return True


@dataclass(frozen=True)
class Kernel:
    """One of torch's kernels.

    Attributes:
        label: how messages name it.
        backend: how torch names it.
        capabilities: what it claims.
        rules: reasons beyond the capabilities.
        widens: whether half inputs are better given to it in float32.
        expands_groups: whether it wants k and v with as many heads as q.
        float_bias: takes a float32 mask where q is half.
    """

    label: str
    backend: SDPBackend
    capabilities: Capabilities
    rules: Callable[[AttentionSpec], list[str]]
    widens: Callable[[AttentionSpec], bool] = never
    expands_groups: Callable[[AttentionSpec], bool] = never
    float_bias: bool = False

    def serves_device(self, spec: AttentionSpec) -> bool:
        return spec.device.type in self.capabilities.devices

    def reasons(self, spec: AttentionSpec) -> list[str]:
        """Why it can't serve the call; empty means that it can."""
        reasons = self.capabilities.reasons_against(spec)
        given, taken = spec.bias_dtype, self.bias_dtype(spec)
        if given is not None and torch.promote_types(given, taken) != taken:
            reasons.append(f"bias is {short(given)}, {self.label} takes what {short(taken)} can hold exactly: cast the bias")
        return reasons + self.rules(spec)

    def bias_dtype(self, spec: AttentionSpec) -> torch.dtype:
        return spec.accumulator_dtype if self.float_bias or self.widens(spec) else spec.dtype

    def wants(self, spec: AttentionSpec) -> Wants:
        """The form in which it takes the call."""
        bias_dtype = None if spec.bias is None else self.bias_dtype(spec)
        dtype = torch.float32 if self.widens(spec) else spec.dtype
        is_fused = self.backend is not SDPBackend.MATH and spec.device.type == "cuda"
        return Wants(dtype, bias_dtype, is_fused, spec.group > 1 and self.expands_groups(spec))


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def math_rules(spec: AttentionSpec) -> list[str]:
    if spec.dtype in HALF and reduces_in_half():
        return [
            f"dtype is {short(spec.dtype)} and torch was told to reduce in it, which loses accuracy: "
            "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)"
        ]
    return []


def trains_in_half(spec: AttentionSpec) -> bool:
    return spec.dtype in HALF and bool(spec.grads)


def flash_rules(spec: AttentionSpec) -> list[str]:
    return same_dim(spec) + nvidia(spec) + grid(spec)


def cudnn_rules(spec: AttentionSpec) -> list[str]:
    reasons = nvidia(spec) + aligned_dims(spec) + next_to_no_scale(spec)
    if spec.kv_len == 1:
        reasons.append("k has length 1, cuDNN takes at least 2")
    if not has_cudnn():
        reasons.append("torch has no cuDNN here")
    return reasons + grid(spec)


def efficient_rules(spec: AttentionSpec) -> list[str]:
    reasons = nvidia(spec) + aligned_dims(spec) + next_to_no_scale(spec) + grid(spec)
    if needs_table(spec) and spec.q_len * spec.kv_len >= 2**31:
        reasons.append(f"the mask has {spec.q_len} x {spec.kv_len} elements a head, the kernel counts to 2**31 - 1")
    if needs_table(spec) and spec.q_len > 1 and spec.q_len % QUERY_TILE == 1:
        reasons.append(f"q has length {spec.q_len}, a lone row beyond tiles of {QUERY_TILE}, where the kernel reads outside its inputs")
    return reasons


def same_dim(spec: AttentionSpec) -> list[str]:
    if spec.value_dim == spec.head_dim:
        return []
    return [f"value_dim is {spec.value_dim}, it takes that of q and k, {spec.head_dim}"]


def aligned_dims(spec: AttentionSpec) -> list[str]:
    step = 16 // spec.dtype.itemsize
    dims = (("head_dim", spec.head_dim), ("value_dim", spec.value_dim))
    return [f"{name} is {dim}, it takes multiples of {step} in {short(spec.dtype)}" for name, dim in dims if dim % step]


def next_to_no_scale(spec: AttentionSpec) -> list[str]:
    """Their backward passes multiply dS by the scale before they round it, below fp16's least normal number perhaps."""
    if spec.dtype != torch.float16 or not spec.grads or not 0 < abs(spec.scale) < LEAST_SCALE:
        return []
    return [f"scale is {spec.scale:.3g}, which loses the gradients of float16: it takes {LEAST_SCALE:.3g} or more, or bfloat16"]


def grid(spec: AttentionSpec) -> list[str]:
    sizes = (("batch", spec.batch), ("q_heads", spec.q_heads))
    return [f"{name} is {size}, it takes at most {MAX_GRID}" for name, size in sizes if size > MAX_GRID]


def nvidia(spec: AttentionSpec) -> list[str]:
    if spec.device.type != "cuda":
        return []
    if torch.version.hip is not None:
        return ["torch is built for ROCm, only its CUDA kernels were tested"]
    found = least_capability()
    if not found:
        return [f"the device is {spec.device}, torch sees no CUDA device here"]
    return [] if found >= OLDEST_CARD else [f"the oldest card is sm_{found}, it takes sm_{OLDEST_CARD} and later"]


@constant_when_traced
def least_capability() -> int:
    """Of all cards, 90 for sm_90: a decision does not depend on which of them holds the tensors. 0 where there is no card.

    A number, since the Dynamo of torch 2.11 takes no tuple as a constant.
    """
    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    return min((10 * major + minor for major, minor in capabilities), default=0)


@constant_when_traced
def has_cudnn() -> bool:
    return bool(torch.backends.cudnn.is_available())


@constant_when_traced
def reduces_in_half() -> bool:
    return bool(torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed())


FLASH = Kernel(
    "torch's flash kernel",
    SDPBackend.FLASH_ATTENTION,
    Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALF,
        head_dims=(1, 256),
        forward=frozenset({"causal", "grouped_heads", "deterministic"}),  # whatever else shapes the scores needs a mask
        backward=frozenset({"causal", "grouped_heads"}),
    ),
    flash_rules,
)
CPU_FLASH = Kernel(
    "torch's flash kernel for the CPU",
    SDPBackend.FLASH_ATTENTION,
    Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=EVERY_DTYPE,
        head_dims=ANY_DIM,
        forward=BANDS | TABLES | {"grouped_heads", "deterministic"},
        backward=BANDS | TABLES - {"bias"} | {"grouped_heads", "deterministic"},
    ),
    same_dim,
    widens=trains_in_half,  # it would add dk and dv up in half precision
)
CUDNN = Kernel(
    "cuDNN",
    SDPBackend.CUDNN_ATTENTION,
    Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALF,
        head_dims=(8, 128),
        forward=BANDS | TABLES | {"grouped_heads", "value_dim"},
        backward=BANDS | TABLES - {"bias"} | {"grouped_heads", "value_dim"},  # nan where a row's lse is near -1e4
    ),
    cudnn_rules,
)
EFFICIENT = Kernel(
    "torch's memory-efficient kernel",
    SDPBackend.EFFICIENT_ATTENTION,
    Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALF | {torch.float32},
        head_dims=(4, 256),
        forward=BANDS | TABLES | {"grouped_heads", "value_dim", "deterministic"},
        backward=BANDS | TABLES - {"bias"} | {"grouped_heads", "value_dim"},
    ),
    efficient_rules,
    expands_groups=always,  # torch 2.11 has no other way
)
MATH = Kernel(
    "torch's math path",
    SDPBackend.MATH,
    Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=EVERY_DTYPE,
        head_dims=ANY_DIM,
        forward=frozenset(FEATURES) - BEYOND_TORCH - {"double_backward", "bias_grad"},
        backward=frozenset(FEATURES) - BEYOND_TORCH,
        materializes_scores=True,
    ),
    math_rules,
    float_bias=True,
)
