"""Problem: a call as the kernels take it, made once a call from the spec and the inputs."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.triton.launch import INTERPRETED, Variant
from attnzoo.backends.triton.segments import segment_bounds
from attnzoo.backends.triton.table import INTERPRETER, Tile, tile_for
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

LOG2E = 1.4426950408889634
LARGEST_TILE = 256  # rows
L2_BYTES = 20 * 2**20  # of keys and values that programs running at one time may walk; an H200 has 50 MiB


class Problem:
    """What all kernels of one call share: tensor tuples, scalars, and the facts that choose their variant."""

    def __init__(self, spec: AttentionSpec, inputs: AttentionInputs) -> None:
        self.spec = spec
        self.inputs = inputs
        self.device = spec.device
        self.capability = INTERPRETER if INTERPRETED else capability_of(spec.device)
        self.q, self.k, self.v = strided(inputs.q), strided(inputs.k), strided(inputs.v)
        self.mask = paired(inputs.mask)
        self.bias = paired(inputs.bias)
        self.segments = self._segments()
        self.dropout = self._dropout()
        self.band = binding_band(spec)
        self.folded = spec.softcap is None and spec.bias is None and spec.sinks_dtype is None and spec.scale > 0.0
        self.scale = spec.scale * LOG2E if self.folded else spec.scale
        self.softcap = spec.softcap
        self.precision = dot_precision(spec.dtype)

    def _segments(self) -> tuple[Any, ...] | None:
        q_ids, kv_ids = self.inputs.q_segment_ids, self.inputs.kv_segment_ids
        if q_ids is None or kv_ids is None:
            return None
        q_bounds = segment_bounds(q_ids, self.capability)
        kv_bounds = q_bounds if kv_ids is q_ids else segment_bounds(kv_ids, self.capability)
        return (q_ids, *q_ids.stride(), kv_ids, *kv_ids.stride(), q_bounds, kv_bounds)

    def _dropout(self) -> tuple[Any, ...] | None:
        p = self.spec.dropout_p
        if not p:
            return None
        threshold = int(p * 2**32)
        signed = threshold - 2**32 if threshold >= 2**31 else threshold  # the kernel reads it as 32 unsigned bits
        return self.inputs.dropout_seed, signed, 1.0 / (1.0 - p)

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
        if self.inputs.mask is not None or self.segments is not None:
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
        spec = self.spec
        return {
            "HEAD_DIM": spec.head_dim,
            "VALUE_DIM": spec.value_dim,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            **more,
            "FOLDED": self.folded,
            "PRECISION": self.precision,
        }

    @cached_property
    def types(self) -> tuple[Any, ...]:
        """What decides the types of the arguments."""
        spec, segments = self.spec, self.segments
        ids = None if segments is None else (segments[0].dtype, segments[3].dtype)
        tables = tuple([tuple([part is None for part in table]) for table in (self.mask, self.bias)])
        absent = tuple([bound is None for bound in self.band])
        return spec.dtype, spec.bias_dtype, spec.sinks_dtype, spec.softcap is None, self.dropout is None, ids, tables, absent

    def variant(self, tile: Tile, constants: dict[str, Any], tensors: dict[str, Any], *more: Any) -> Variant:
        """The variant for these constants and named tensor tuples; `more` is what else differs in type."""
        aligned = tuple([name for name, tensor in tensors.items() if tensor and is_aligned(tensor)])
        facts = (self.types, tuple(constants.values()), more)
        return Variant(facts, aligned, tile, self.capability, self.device.index)


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
    """The tensor and the strides of its batches, heads and rows; 0 where there is one only."""
    b, h, m, _ = tensor.stride()
    batch, heads, rows, _ = tensor.shape
    return tensor, b if batch > 1 else 0, h if heads > 1 else 0, m if rows > 1 else 0


def paired(table: Tensor | None) -> tuple[Any, ...]:
    """A mask or bias and its strides, 0 in broadcast dims; None where rows are one, or columns neighbours."""
    if table is None:
        return (None,)
    b, h, m, n = [stride if size > 1 else 0 for size, stride in zip(table.shape, table.stride())]
    return table, b, h, m if table.shape[2] > 1 else None, None if n == 1 else n


def is_aligned(tensor: tuple[Any, ...]) -> bool:
    """Whether the pointer and all strides of a tensor tuple are multiples of 16 bytes."""
    if tensor[0] is None:
        return False
    strides = 0
    for stride in tensor[1:]:
        strides |= stride or 0
    return not (tensor[0].data_ptr() | strides * tensor[0].element_size()) & 15


def is_wide(*tensors: tuple[Any, ...]) -> bool:
    """Whether the rows of some tile lie 2^31 elements apart."""
    return any([tensor[3] >= 2**31 // LARGEST_TILE for tensor in tensors])


def binding_band(spec: AttentionSpec) -> tuple[int | None, int | None, int]:
    """`(left, right, diagonal)` of the spec, None for a bound that rules out no pair."""
    left, right = spec.band
    diagonal = spec.diagonal
    if left is not None and left >= spec.q_len - 1 + diagonal:
        left = None
    if right is not None and right >= spec.kv_len - 1 - diagonal:
        right = None
    return left, right, diagonal
