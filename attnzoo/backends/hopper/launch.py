"""From tensors to kernel launches. Imports triton: ask `support.reasons_against` first.

What depends on the spec alone is planned once and kept; a call builds descriptors and launches a kept binary.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.hopper.backward import attention_backward
from attnzoo.backends.hopper.backward_post import convert_dq
from attnzoo.backends.hopper.backward_pre import prepare_backward
from attnzoo.backends.hopper.descriptors import aligned, row_descriptor, tile_descriptor
from attnzoo.backends.hopper.forward import attention_forward
from attnzoo.backends.hopper.tiles import BackwardTile, ForwardTile, backward_tile, forward_tile_of, head_dim_pieces, padded_head_dim
from attnzoo.backends.recompute import KEEPING, empty_output
from attnzoo.backends.triton.launch import launch
from attnzoo.backends.triton.launchers import on_device
from attnzoo.spec import AttentionSpec

__all__ = ["Launch", "backward", "backward_launches", "forward", "forward_launch"]

UNBOUNDED = 2**30  # sums of a position and an offset stay inside int32
L2_SHARE = 20_000_000  # bytes of K and V that a group of heads may take of the 50 MB L2: measured, 580 against 545 TFLOP/s at 2k
ROWS = 64  # of the pre and post kernels; divides every block_q
PADDED_ROWS = 128  # lse and delta are padded to whole query blocks: the largest block_q
LONGEST_GRID_SIDE = 65535  # of the second and third

ALONE = {"num_warps": 4}
OVERLAPPING = {"num_warps": 4, "launch_pdl": True}  # starts while the kernel before still runs, and waits inside


@dataclass(eq=False, slots=True)
class Launch:
    """A kernel with its grid and all of its arguments.

    Attributes:
        device: on whose current stream it is launched.
        variant: what tells apart the binaries of the kernel; no two launches of one variant differ in the types of
            their arguments or in a constant.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    variant: Hashable
    options: dict[str, Any]
    device: torch.device

    def __call__(self) -> None:
        compiled = _compiled.get(self.variant)
        if compiled is None:
            with _compiling:  # Triton's own caches may be seen half done by another thread
                _compiled[self.variant] = self.kernel[self.grid](*self.arguments, **self.options)
        else:
            launch(compiled, self.grid, self.device, self.arguments)


_compiled: dict[Hashable, Any] = {}
_compiling = threading.Lock()


def _are_wide(strides: tuple[int, ...]) -> tuple[bool, ...]:
    """What of them the JIT takes as 64-bit integers, each on its own."""
    return tuple([stride >= 2**31 for stride in strides])


# What the spec decides


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes and constants of a launch, from the spec alone; columns and seconds: of the head dim's pieces, keys' and values'."""

    tile: Any
    columns: int
    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    constants: tuple[Any, ...]
    variant: Hashable
    seconds: tuple[int, int] = (0, 0)


def band_offsets(spec: AttentionSpec) -> tuple[int, int]:
    """Query i sees key j only if `i + left <= j <= i + right`; as few bounds as give the same pairs."""
    left, right = spec.binding_band
    return -UNBOUNDED if left is None else spec.diagonal - left, UNBOUNDED if right is None else spec.diagonal + right


def heads_in_group(spec: AttentionSpec) -> int:
    """How many query heads run side by side: the largest power of two whose K and V fit into their share of the L2."""
    bytes_a_head = 4 * spec.kv_len * spec.head_dim / spec.group
    heads = 1
    while 2 * heads * bytes_a_head <= L2_SHARE and 2 * heads <= spec.batch * spec.q_heads:
        heads *= 2
    return heads


@lru_cache(maxsize=1024)
def forward_plan(spec: AttentionSpec) -> Plan:
    left, right = band_offsets(spec)
    has_left, has_right = left > -UNBOUNDED, right < UNBOUNDED
    columns, second = head_dim_pieces(spec.head_dim)
    _, v_second = head_dim_pieces(spec.value_dim)  # `support` saw to it that the first pieces agree
    tile: ForwardTile = forward_tile_of(spec)
    together = tile.rows_together
    one_masked = not has_left and (not has_right or (together <= tile.block_kv and right % together == 0))
    is_cut = has_left or has_right or spec.kv_len % tile.block_kv != 0
    q_tiles = -(-spec.q_len // tile.block_q)
    tiles = q_tiles * spec.batch * spec.q_heads
    constants = (tile.consumers, tile.stages, tile.v_stages, tile.ping_pong, has_left, is_cut, one_masked, tile.q_slots)
    constants += (tile.own_blocks, second, v_second, tile.q_registers, tile.consumer_registers, tile.producer_registers)
    return Plan(
        tile,
        columns,
        (min(tile.ctas * processors_of(spec.device), tiles), 1, 1),
        (tiles, q_tiles, spec.q_heads, spec.group, heads_in_group(spec), spec.q_len, spec.kv_len, left, right),
        constants,
        ("forward", spec.dtype, spec.device, tile, columns, constants),
        (second, v_second),
    )


@lru_cache(maxsize=1024)
def backward_plan(spec: AttentionSpec) -> Plan:
    left, right = band_offsets(spec)
    has_left, has_right = left > -UNBOUNDED, right < UNBOUNDED
    columns = padded_head_dim(spec.head_dim)
    tile: BackwardTile = backward_tile(columns)
    is_cut = has_left or has_right or spec.kv_len % tile.block_kv != 0
    key_heads = spec.batch * spec.kv_heads
    width = backward_width(spec) if has_right else 1
    if key_heads // width > LONGEST_GRID_SIDE:
        width = key_heads
    q_blocks = -(-spec.q_len // tile.block_q)
    constants = (tile.stages, has_left, is_cut, tile.lse_early and not is_cut, tile.consumer_registers, tile.producer_registers)
    return Plan(
        tile,
        columns,
        (width, -(-spec.kv_len // tile.block_kv), key_heads // width),
        (spec.q_heads, spec.kv_heads, spec.group, width, spec.q_len, q_blocks, spec.kv_len, left, right),
        constants,
        ("backward", spec.dtype, spec.device, tile, columns, constants),
    )


def backward_width(spec: AttentionSpec) -> int:
    """Key heads side by side under a causal mask, so that the longest blocks of all start first: 16 at 2k, 4 at 8k and beyond, measured."""
    heads = spec.batch * spec.kv_heads
    return next(width for width in (16, 8, 4, 1) if heads % width == 0 and (width * spec.q_len <= 32768 or width <= 4))


@lru_cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors; those of an H100 where there is no GPU to ask and kernels are only compiled."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


# The forward

_counters: dict[tuple[torch.device, int], Tensor] = {}


def zeroed_counter(device: torch.device) -> Tensor:
    """One zero, which the kernel leaves at zero: one a stream, since a launch counts only when the one before it has ended.

    Under graph capture one of its own: the graph may be replayed on any stream, beside anything.
    """
    if device.type != "cuda" or not KEEPING.is_allowed or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, torch._C._cuda_getCurrentRawStream(device.index)
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counter


def forward_launch(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Launch:
    """The launch that fills o and lse; q, k and v as `aligned` gives them."""
    plan = forward_plan(spec)
    block_kv = plan.tile.block_kv
    second, v_second = plan.seconds
    tensors = ((q, 64, second), (k, block_kv, second), (v, block_kv, v_second), (o, 64, v_second))
    descriptors = [tile_descriptor(tensor, rows, plan.columns) for tensor, rows, _ in tensors]
    descriptors += [tile_descriptor(tensor, rows, columns) if columns else None for tensor, rows, columns in tensors]
    arguments = (*descriptors, lse, zeroed_counter(q.device), spec.scale, *plan.sizes, *plan.constants)
    registers = plan.tile.entry_registers
    options = OVERLAPPING if registers is None else {**OVERLAPPING, "maxnreg": registers}
    return Launch(attention_forward, plan.grid, arguments, plan.variant, options, spec.device)


def forward(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`o` (B, Hq, Sq, D) in the memory order of q, and the natural-log lse (B, Hq, Sq) in fp32."""
    with on_device(spec.device):
        o = empty_output(spec, q)
        lse = torch.empty(spec.batch, spec.q_heads, spec.q_len, dtype=torch.float32, device=spec.device)
        forward_launch(spec, aligned(q), aligned(k), aligned(v), o, lse)()
    return o, lse


# The backward


def pre_launch(
    spec: AttentionSpec, plan: Plan, o: Tensor, lse: Tensor, grad_o: Tensor, grad_lse: Tensor | None, scratch: Scratch
) -> Launch:
    strides = (*o.stride()[:3], *grad_o.stride()[:3], *((0, 0, 0) if grad_lse is None else grad_lse.stride()))
    constants = (spec.head_dim, plan.columns, ROWS, plan.tile.block_q, grad_lse is not None)
    padded_len = scratch.delta.shape[1]
    tensors = (o, grad_o, lse, lse if grad_lse is None else grad_lse, scratch.delta, scratch.lse2, scratch.state)
    return Launch(
        prepare_backward,
        (spec.batch * spec.q_heads, padded_len // ROWS, 1),
        (*tensors, spec.q_heads, spec.q_len, padded_len, *strides, *constants),
        ("pre", spec.dtype, spec.device, _are_wide(strides), constants),
        ALONE,
        spec.device,
    )


def backward_descriptors(plan: Plan, tensors: tuple[Tensor, ...], scratch: Scratch, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
    """What the main kernel reads and writes by TMA; tensors: q, k, v and grad_o."""
    block_q, block_kv, columns = plan.tile.block_q, plan.tile.block_kv, plan.columns
    return (
        *(tile_descriptor(tensor, rows, columns) for tensor, rows in zip(tensors, (block_q, block_kv, block_kv, block_q))),
        row_descriptor(scratch.lse2, block_q),
        row_descriptor(scratch.delta, block_q),
        tile_descriptor(scratch.dq_sum, *plan.tile.dq_block(columns)),
        tile_descriptor(dk, block_kv // 2, columns),
        tile_descriptor(dv, block_kv // 2, columns),
    )


def main_launch(spec: AttentionSpec, plan: Plan, tensors: tuple[Tensor, ...], scratch: Scratch, dk: Tensor, dv: Tensor) -> Launch:
    """tensors: q, k, v and grad_o."""
    descriptors = backward_descriptors(plan, tensors, scratch, dk, dv)
    arguments = (*descriptors, scratch.state, spec.scale, *plan.sizes, *plan.constants)
    return Launch(attention_backward, plan.grid, arguments, plan.variant, OVERLAPPING, spec.device)


def post_launch(spec: AttentionSpec, plan: Plan, scratch: Scratch, dq: Tensor) -> Launch:
    strides = dq.stride()[:3]
    constants = (spec.head_dim, plan.columns, ROWS, plan.tile.block_q)
    return Launch(
        convert_dq,
        (spec.batch * spec.q_heads, -(-spec.q_len // ROWS), 1),
        (scratch.dq_sum, scratch.state, dq, spec.scale, spec.q_heads, spec.q_len, *strides, *constants),
        ("post", spec.dtype, spec.device, _are_wide(strides), constants),
        OVERLAPPING,
        spec.device,
    )


@dataclass(frozen=True, eq=False, slots=True)
class Scratch:
    """What lives between the kernels of a backward.

    Attributes:
        delta, lse2: `(B Hq, rows padded)` fp32.
        dq_sum: `(B Hq, Sq, D)` fp32.
        state: `(B Hq, query blocks)` int32: whether a block of dq_sum has been written.
    """

    delta: Tensor
    lse2: Tensor
    dq_sum: Tensor
    state: Tensor

    @classmethod
    def of(cls, spec: AttentionSpec, plan: Plan) -> Scratch:
        heads, padded_len = spec.batch * spec.q_heads, -(-spec.q_len // PADDED_ROWS) * PADDED_ROWS
        delta, lse2 = torch.empty(2, heads, padded_len, dtype=torch.float32, device=spec.device)
        dq_sum = torch.empty(heads, spec.q_len, spec.head_dim, dtype=torch.float32, device=spec.device)
        state = torch.empty(heads, -(-spec.q_len // plan.tile.block_q), dtype=torch.int32, device=spec.device)
        return cls(delta, lse2, dq_sum, state)


def backward_launches(
    spec: AttentionSpec,
    tensors: tuple[Tensor, Tensor, Tensor],
    o: Tensor,
    lse: Tensor,
    grad_o: Tensor,
    grad_lse: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
) -> tuple[Launch, Launch, Launch]:
    """The three launches, in order, that fill grads: dq, dk and dv. q, k, v, o and grad_o as `aligned` gives them."""
    plan = backward_plan(spec)
    scratch = Scratch.of(spec, plan)
    dq, dk, dv = grads
    return (
        pre_launch(spec, plan, o, lse, grad_o, grad_lse, scratch),
        main_launch(spec, plan, (*tensors, grad_o), scratch, dk, dv),
        post_launch(spec, plan, scratch, dq),
    )


def backward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes, dtype and memory order of q, k and v. grad_lse is that of the natural-log lse."""
    with on_device(spec.device):
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        tensors = aligned(q), aligned(k), aligned(v)
        for launch in backward_launches(spec, tensors, aligned(o), lse, aligned(grad_o), grad_lse, grads):
            launch()
    return grads
