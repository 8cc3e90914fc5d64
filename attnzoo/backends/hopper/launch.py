"""From tensors to kernel launches. Imports triton: ask `support.reasons_against` first."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.hopper.backward import attention_backward
from attnzoo.backends.hopper.backward_post import convert_dq
from attnzoo.backends.hopper.backward_pre import prepare_backward
from attnzoo.backends.hopper.forward import attention_forward
from attnzoo.backends.hopper.names import TensorDescriptor, gl
from attnzoo.backends.hopper.tiles import backward_tile, forward_tile, padded_head_dim
from attnzoo.backends.recompute import empty_output
from attnzoo.spec import AttentionSpec

__all__ = ["Launch", "backward", "backward_launches", "forward", "forward_launch"]

UNBOUNDED = 2**30  # sums of a position and an offset stay inside int32
L2_SHARE = 20_000_000  # bytes of K and V that a group of heads may take of the 50 MB L2: measured, 580 against 545 TFLOP/s at 2k
ROWS = 64  # of the pre and post kernels
LSE_PADDING = 128  # rows that lse and delta are padded to: the largest block_q


@dataclass(frozen=True, eq=False, slots=True)
class Launch:
    """A kernel with its grid and arguments."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})

    def __call__(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.options)


# Descriptors

GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


@lru_cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_DTYPES[dtype])


def _tile_descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles of the last two dims of a tensor whose last stride is 1."""
    block = (1,) * (tensor.ndim - 2) + (rows, columns)
    # a dim of size 1 may carry any stride, also one that TMA does not take
    strides = [16 if size == 1 else stride for size, stride in zip(tensor.shape[:-1], tensor.stride())]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], list(block), _layout(block, tensor.dtype))


def _row_descriptor(tensor: Tensor, columns: int) -> TensorDescriptor:
    """Pieces of the rows of a 2-D fp32 tensor, unswizzled: read as a vector."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, columns], gl.NVMMASharedLayout(0, 32, rank=2))


def _aligned(tensor: Tensor) -> Tensor:
    """As TMA needs it: rows contiguous, base and strides multiples of 16 bytes, no overlap; a copy if it must."""
    unit = 16 // tensor.element_size()
    is_fine = tensor.data_ptr() % 16 == 0 and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)
    is_fine = is_fine and all(stride > 0 and stride % unit == 0 for size, stride in zip(tensor.shape[:-1], tensor.stride()) if size > 1)
    return tensor if is_fine else tensor.clone(memory_format=torch.contiguous_format)


# Counters

_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counter(device: torch.device) -> Tensor:
    """One zero, which the kernel leaves at zero: one a stream, since launches of one stream don't overlap.

    Under graph capture one of its own: the graph may be replayed on any stream, beside anything.
    """
    if device.type != "cuda":
        return torch.zeros(1, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _counters:
        _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[key]


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


# Forward


def _offsets(spec: AttentionSpec) -> tuple[int, int]:
    """Query i sees key j only if `i + left <= j <= i + right`."""
    left, right = spec.band
    return (
        -UNBOUNDED if left is None else max(spec.diagonal - left, -UNBOUNDED),
        UNBOUNDED if right is None else min(spec.diagonal + right, UNBOUNDED),
    )


def _heads_in_group(spec: AttentionSpec) -> int:
    """Query heads whose K and V share the L2: the largest power of two, at least the group of one key head."""
    bytes_a_head = 2 * spec.kv_len * spec.head_dim * 2 / spec.group
    heads = 1
    while 2 * heads * bytes_a_head <= L2_SHARE and 2 * heads <= spec.batch * spec.q_heads:
        heads *= 2
    return heads


def forward_launch(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Launch:
    """The launch that fills o and lse; tensors as `_aligned` gives them."""
    left, right = _offsets(spec)
    has_left, has_right = left > -UNBOUNDED, right < UNBOUNDED
    columns = padded_head_dim(spec.head_dim)
    tile = forward_tile(columns, is_masked=has_left or has_right)
    one_masked = not has_left and (not has_right or (tile.block_q == tile.block_kv and right % tile.block_kv == 0))
    is_cut = has_left or has_right or spec.kv_len % tile.block_kv != 0
    q_tiles = -(-spec.q_len // tile.block_q)
    tiles = q_tiles * spec.batch * spec.q_heads
    return Launch(
        attention_forward,
        (min(_processors(q.device), tiles) if tile.persistent else tiles,),
        (
            _tile_descriptor(q, 64, columns),
            _tile_descriptor(k, tile.block_kv, columns),
            _tile_descriptor(v, tile.block_kv, columns),
            _tile_descriptor(o, 64, columns),
            lse,
            _counter(q.device),
            spec.scale,
            tiles,
            q_tiles,
            spec.q_heads,
            spec.group,
            _heads_in_group(spec),
            spec.q_len,
            spec.kv_len,
            left,
            right,
            *(tile.consumers, tile.stages, tile.ping_pong),
            *(has_left, is_cut, one_masked, tile.persistent),
            *(tile.consumer_registers, tile.producer_registers),
        ),
    )


def forward(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`o` (B, Hq, Sq, D) in the memory order of q, and the natural-log lse (B, Hq, Sq) in fp32."""
    o = empty_output(spec, q)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    forward_launch(spec, _aligned(q), _aligned(k), _aligned(v), o, lse)()
    return o, lse


# Backward


def backward_launches(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    grad_o: Tensor,
    grad_lse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> tuple[Launch, Launch, Launch]:
    """The three launches that fill dq, dk and dv; q, k, v and grad_o as `_aligned` gives them."""
    left, right = _offsets(spec)
    has_left, has_right = left > -UNBOUNDED, right < UNBOUNDED
    columns, heads = padded_head_dim(spec.head_dim), spec.batch * spec.q_heads
    is_cut = has_right or spec.kv_len % 128 != 0
    tile = backward_tile(columns, is_cut=has_left or is_cut)
    padded_len = -(-spec.q_len // LSE_PADDING) * LSE_PADDING
    delta, lse2 = q.new_empty(2, heads, padded_len, dtype=torch.float32)
    dq_sum = q.new_empty(heads, spec.q_len, spec.head_dim, dtype=torch.float32)
    padded_columns = dict(HEAD_DIM=spec.head_dim, BLOCK_D=columns, ROWS=ROWS)
    pre = Launch(
        prepare_backward,
        (heads, -(-padded_len // ROWS)),
        (
            *(o, grad_o, lse, lse if grad_lse is None else grad_lse, delta, lse2, dq_sum, spec.q_heads, spec.q_len, padded_len),
            *(*o.stride()[:3], *grad_o.stride()[:3], *((0, 0, 0) if grad_lse is None else grad_lse.stride())),
        ),
        {"num_warps": 4, **padded_columns, "HAS_DLSE": grad_lse is not None},
    )
    key_heads = spec.batch * spec.kv_heads
    # causal: four heads side by side start with their longest blocks, measured; the grid's last two sides end at 65535
    side_by_side = 4 if has_right and key_heads % 4 == 0 else 1
    if key_heads // side_by_side > 65535:
        side_by_side = key_heads
    main = Launch(
        attention_backward,
        (side_by_side, -(-spec.kv_len // tile.block_kv), key_heads // side_by_side),
        (
            _tile_descriptor(q, tile.block_q, columns),
            _tile_descriptor(k, tile.block_kv, columns),
            _tile_descriptor(v, tile.block_kv, columns),
            _tile_descriptor(grad_o, tile.block_q, columns),
            _row_descriptor(lse2, tile.block_q),
            _row_descriptor(delta, tile.block_q),
            _tile_descriptor(dq_sum, tile.block_q, columns // 2),
            _tile_descriptor(dk, tile.block_kv // 2, columns),
            _tile_descriptor(dv, tile.block_kv // 2, columns),
            *(spec.scale, spec.q_heads, spec.kv_heads, spec.group, spec.q_len, spec.kv_len, left, right),
            *(tile.stages, has_left, is_cut, tile.lse_early, tile.consumer_registers, tile.producer_registers),
        ),
    )
    post = Launch(
        convert_dq,
        (heads, -(-spec.q_len // ROWS)),
        (dq_sum, dq, spec.scale, spec.q_heads, spec.q_len, *dq.stride()[:3]),
        {"num_warps": 4, **padded_columns},
    )
    return pre, main, post


def backward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes, dtype and memory order of q, k and v. grad_lse is that of the natural-log lse."""
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for launch in backward_launches(spec, _aligned(q), _aligned(k), _aligned(v), o, lse, _aligned(grad_o), grad_lse, *grads):
        launch()
    return grads
