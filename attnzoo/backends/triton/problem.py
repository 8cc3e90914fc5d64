"""A call as the kernels take it: Facts, made once a spec, and Problem, made of its tensors once a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.triton.launch import INTERPRETED, Kernel, Plan
from attnzoo.backends.triton.segments import segment_bounds
from attnzoo.backends.triton.table import INTERPRETER, Tile, tile_for
from attnzoo.backends.triton.tiles import ROW_PADDING
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

LOG2E = 1.4426950408889634
LARGEST_TILE = 256  # rows
L2_BYTES = 20 * 2**20  # of keys and values that programs running at one time may walk; an H200 has 50 MiB
FOLDED_SCALES = (2.0**-126, 2.0**127)
"""Times log2(e) they are neither 0 nor infinite in fp32: a masked score, -inf, must stay one."""
VECTOR = 15  # the low bits that are 0 in a multiple of 16 bytes


class Facts:
    """What the spec alone decides: scalars, walks, and the plan of each kernel."""

    def __init__(self, spec: AttentionSpec, precision: str) -> None:
        self.spec = spec
        self.precision = precision
        self.capability = INTERPRETER if INTERPRETED else capability_of(spec.device)
        self.band = (*spec.binding_band, spec.diagonal)
        is_plain = spec.softcap is None and spec.bias is None and spec.sinks_dtype is None
        self.folded = is_plain and FOLDED_SCALES[0] <= spec.scale <= FOLDED_SCALES[1]
        self.scale = spec.scale * LOG2E if self.folded else spec.scale
        sizes = ((spec.q_heads, spec.q_len), (spec.kv_heads, spec.kv_len), (spec.kv_heads, spec.kv_len))
        self.strides = [
            (b if spec.batch > 1 else 0, h if heads > 1 else 0, m if rows > 1 else 0)
            for (b, h, m, _), (heads, rows) in zip(spec.strides, sizes)
        ]
        self.are_vectors = not any([stride * spec.dtype.itemsize & VECTOR for strides in self.strides for stride in strides])
        self.is_wide = any([strides[2] >= 2**31 // LARGEST_TILE for strides in self.strides])
        self._plans: dict[Any, Plan] = {}

    @property
    def key_phase(self) -> int:
        """Where a walk over keys begins: 0 the left edge, 1 the free middle, 2 if every tile needs its mask."""
        return self._first_phase(self.band[0])

    @property
    def query_phases(self) -> tuple[int, int]:
        """First and last phase of a walk over queries, whose lower edge is the band's right one; it needs no mask at the tail."""
        first = self._first_phase(self.band[1])
        return first, max(first, 1 if self.band[0] is None else 2)

    def _first_phase(self, lower: int | None) -> int:
        if self.spec.mask is not None or self.spec.segments:
            return 2
        return 1 if lower is None else 0

    def sizes(self, streamed_bytes: int, heads: int) -> tuple[int, ...]:
        """Batch, heads, group and lengths, and how many of `heads` heads run at one time."""
        spec = self.spec
        wave = max(1, min(spec.batch * heads, L2_BYTES // max(1, streamed_bytes)))
        return spec.batch, spec.q_heads, spec.group, spec.q_len, spec.kv_len, wave

    def tile(self, kernel: str) -> Tile:
        spec = self.spec
        is_featured = spec.mask is not None or spec.bias is not None or spec.dropout_p > 0.0
        return tile_for(kernel, spec.head_dim, spec.value_dim, spec.dtype, self.capability, is_featured)

    def constants(self, tile: Tile, **more: Any) -> dict[str, Any]:
        """The constexprs that every kernel over tiles of the score matrix takes, in their order."""
        return {
            "HEAD_DIM": self.spec.head_dim,
            "VALUE_DIM": self.spec.value_dim,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            **more,
            "FOLDED": self.folded,
            "PRECISION": self.precision,
        }

    def plan(self, make: Callable[..., Plan], *choices: Any) -> Plan:
        """`make(self, *choices)`, made once."""
        plan = self._plans.get((make, choices))
        if plan is None:
            plan = self._plans[make, choices] = make(self, *choices)
        return plan

    def new_plan(self, kernel: Kernel, tile: Tile, constants: dict[str, Any], sizes: tuple[int, ...], programs: int, *types: Any) -> Plan:
        """`types`: what else than the spec decides the types of the arguments."""
        spec = self.spec
        absent = tuple([bound is None for bound in self.band])
        decides = (spec.dtype, spec.bias_dtype, spec.sinks_dtype, spec.softcap is None, spec.dropout_p > 0.0, absent, *types)
        return Plan(kernel, tile, constants, sizes, programs, decides, self.capability, spec.device)


class Problem:
    """The tensors of one call as tuples, in the order in which the kernels take them apart.

    Attributes:
        row_lists, column_lists: what a walk along a row or a column of a layout's blocks takes besides; nothing without a layout.
        layout_types: what of these decides the types of a kernel's arguments.
    """

    row_lists: tuple[Any, ...] = ()
    column_lists: tuple[Any, ...] = ()
    layout_types: tuple[Any, ...] = ()

    def __init__(self, spec: AttentionSpec, inputs: AttentionInputs) -> None:
        facts = self.facts = facts_of(spec, dot_precision(spec.dtype))
        self.spec = spec
        self.inputs = inputs
        q_strides, k_strides, v_strides = facts.strides
        self.q = (inputs.q, *q_strides)
        self.k = (inputs.k, *k_strides)
        self.v = (inputs.v, *v_strides)
        self.mask = self.bias = (None,)
        self.segments = self.dropout = None
        self.types: tuple[Any, ...] = ()
        if inputs.mask is not None or inputs.bias is not None:
            self.mask, self.bias = paired(inputs.mask), paired(inputs.bias)
            self.types = tuple([part is None for part in (*self.mask, *self.bias)])
        if inputs.q_segment_ids is not None and inputs.kv_segment_ids is not None:
            self.segments = self._segments(inputs.q_segment_ids, inputs.kv_segment_ids)
            self.types += (inputs.q_segment_ids.dtype, inputs.kv_segment_ids.dtype)
        if spec.dropout_p:
            self.dropout = self._dropout(spec.dropout_p)

    def _segments(self, q_ids: Tensor, kv_ids: Tensor) -> tuple[Any, ...]:
        q_bounds = segment_bounds(q_ids, self.facts.capability)
        kv_bounds = q_bounds if kv_ids is q_ids else segment_bounds(kv_ids, self.facts.capability)
        return (q_ids, *q_ids.stride(), kv_ids, *kv_ids.stride(), q_bounds, kv_bounds)

    def _dropout(self, p: float) -> tuple[Any, ...]:
        threshold = int(p * 2**32)
        signed = threshold - 2**32 if threshold >= 2**31 else threshold  # the kernel reads it as 32 unsigned bits
        return self.inputs.dropout_seed, signed, 1.0 / (1.0 - p)

    def aligned(self, *others: tuple[Any, ...]) -> tuple[str, ...]:
        """Which of "rows" (q, k, v and `others`, all of them), "mask" and "bias" are whole vectors of 16 bytes."""
        inputs = self.inputs
        are_vectors = self.facts.are_vectors and not (inputs.q.data_ptr() | inputs.k.data_ptr() | inputs.v.data_ptr()) & VECTOR
        rows = ("rows",) if are_vectors and all([is_vector(other) for other in others]) else ()
        if not self.types:
            return rows
        return (*rows, *[name for name, table in (("mask", self.mask), ("bias", self.bias)) if is_vector(table)])


@lru_cache(maxsize=1024)
def facts_of(spec: AttentionSpec, precision: str) -> Facts:
    return Facts(spec, precision)


@lru_cache(maxsize=64)
def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def dot_precision(dtype: torch.dtype) -> str:
    """How products are computed: fp32 without TF32, unless torch is told otherwise."""
    if INTERPRETED:
        return "upcast" if dtype == torch.bfloat16 else "ieee"
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def strided(tensor: Tensor) -> tuple[Any, ...]:
    """The tensor and the strides of its batches, heads and rows."""
    return (tensor, *tensor.stride()[:3])


def paired(table: Tensor | None) -> tuple[Any, ...]:
    """A mask or bias and its strides, 0 in broadcast dims; None where rows are one, or columns neighbours."""
    if table is None:
        return (None,)
    b, h, m, n = [stride if size > 1 else 0 for size, stride in zip(table.shape, table.stride())]
    return table, b, h, m if table.shape[2] > 1 else None, None if n == 1 else n


def is_vector(tensor: tuple[Any, ...]) -> bool:
    """Whether the pointer and all strides of a tensor tuple are multiples of 16 bytes."""
    pointer = tensor[0]
    return pointer is not None and not pointer.data_ptr() & VECTOR and _are_vectors(tensor[1:], pointer.element_size())


@lru_cache(maxsize=4096)
def _are_vectors(strides: tuple[int | None, ...], element_size: int) -> bool:
    return not any([(stride or 0) * element_size & VECTOR for stride in strides])


def padded_rows(q_len: int) -> int:
    """How many rows of pivot, delta and norm a head has."""
    return -(-q_len // ROW_PADDING.value) * ROW_PADDING.value


def is_wide(*tensors: tuple[Any, ...]) -> bool:
    """Whether the rows of some tile lie 2^31 elements apart."""
    return any([tensor[3] >= 2**31 // LARGEST_TILE for tensor in tensors])
