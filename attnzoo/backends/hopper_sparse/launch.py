"""From tensors and a layout to the launch. Imports triton: ask `support.reasons_against` first."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.block_sparse_triton.schedule import Schedule
from attnzoo.backends.hopper.descriptors import aligned, tile_descriptor
from attnzoo.backends.hopper.launch import (
    ALONE,
    LONGEST_GRID_SIDE,
    OVERLAPPING,
    Launch,
    Plan,
    Scratch,
    backward_descriptors,
    heads_in_group,
    post_launch,
    pre_launch,
    processors_of,
    zeroed_counter,
)
from attnzoo.backends.hopper.tiles import backward_tile, padded_head_dim
from attnzoo.backends.hopper_sparse.backward import sparse_attention_backward
from attnzoo.backends.hopper_sparse.forward import sparse_attention_forward
from attnzoo.backends.recompute import empty_output
from attnzoo.backends.triton.launchers import on_device
from attnzoo.layout import BlockLayout
from attnzoo.spec import AttentionSpec

BLOCK_M = 128
STAGES = {64: 4, 128: 2}  # by head dim; 197 KB of shared memory at 128
BACKWARD_L2_SHARE = 36_000_000  # bytes of q, dO and dQ that heads side by side may take of the 50 MB L2
REGISTERS = (240, 24)  # a thread of a consumer, of the producer


def rule_constants(types: tuple[Any, ...]) -> tuple[bool, bool, bool, bool]:
    """Whether the rule has a low and a high bound, segments, and bits."""
    has_bits, has_low, has_high, has_ids = [part is not True for part in types[:4]]
    return has_low, has_high, has_ids, has_bits


def rule_arguments(schedule: Schedule) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Tensors and numbers of the rule, anything of the right type where it has none."""
    bits, low, high, q_ids, q_batch, kv_ids, kv_batch = schedule.rule
    stand_in = schedule.merged_rows.blocks
    tensors = tuple([stand_in if part is None else part for part in (bits, q_ids, kv_ids)])
    return tensors, tuple([part or 0 for part in (low, high, q_batch, kv_batch)])


def has_long_line(spec: AttentionSpec, schedule: Schedule, axis: int) -> bool:
    """Whether one row (axis 0) or column (axis 1) takes half as long as the whole call: rows or columns as long as that must start
    first in all heads, whatever it costs the L2; False as long as it isn't known.

    Measured on an H200 with 16 heads: the global blocks of bigbird are 1.0 of the call at 8k and 32k, where it is worth 1.3 to 1.7;
    every other pattern of `benchmarks/block_sparse_inputs.py` is below 0.4, where it costs up to 0.14 forward and 0.27 backward.
    """
    layout, longest = spec.layout, schedule.longest[axis]
    assert layout is not None
    if longest is None:
        return False
    tiles = (layout.block_q, layout.block_kv)[axis] // BLOCK_M  # that share a line of blocks
    heads = spec.batch * spec.q_heads / (layout.batch * layout.heads)  # of the call, for one of the layout
    alone = longest * (1 if axis == 0 else spec.group)
    return 2 * alone * processors_of(spec.device) > len(schedule.merged_rows.blocks) * heads * tiles


@lru_cache(maxsize=1024)
def forward_plan(spec: AttentionSpec, types: tuple[Any, ...], is_skewed: bool) -> Plan:
    layout = spec.layout
    assert layout is not None
    columns = padded_head_dim(spec.head_dim)
    block_kv = 128 if layout.block_kv % 128 == 0 else 64
    tiles = -(-spec.q_len // layout.block_q) * (layout.block_q // BLOCK_M) * spec.batch * spec.q_heads
    is_cut = spec.kv_len % layout.block_kv != 0
    constants = (STAGES[columns], True, layout.block_q, layout.block_kv, is_cut, *rule_constants(types), *REGISTERS)
    together = spec.batch * spec.q_heads if is_skewed else heads_in_group(spec)
    sizes = (spec.group, together, spec.q_heads, spec.q_len, spec.kv_len)
    variant = ("sparse forward", spec.dtype, spec.device, block_kv, columns, constants, types)
    return Plan(block_kv, columns, (min(processors_of(spec.device), tiles), 1, 1), (tiles, *sizes), constants, variant)


def forward_launch(spec: AttentionSpec, layout: BlockLayout, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Launch:
    """The launch that fills o and lse; q, k and v as `aligned` gives them."""
    schedule = Schedule.of(layout)
    merged = schedule.merged_rows
    plan = forward_plan(spec, schedule.types, has_long_line(spec, schedule, 0))
    tiles, *sizes = plan.sizes
    descriptors = (
        tile_descriptor(q, 64, plan.columns),
        tile_descriptor(k, plan.tile, plan.columns),
        tile_descriptor(v, plan.tile, plan.columns),
        tile_descriptor(o, 64, plan.columns),
    )
    lists = (merged.offsets, merged.partial_offsets, merged.blocks, schedule.rows[4])
    tensors, numbers = rule_arguments(schedule)
    arguments = (*descriptors, lse, zeroed_counter(q.device), *lists, *tensors, *numbers, spec.scale, tiles)
    arguments += (*schedule.row_shape, *sizes, *plan.constants)
    return Launch(sparse_attention_forward, plan.grid, arguments, plan.variant, ALONE, spec.device)


def forward(spec: AttentionSpec, layout: BlockLayout, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`o` (B, Hq, Sq, D) in the memory order of q, and the natural-log lse (B, Hq, Sq) in fp32."""
    with on_device(spec.device):
        o = empty_output(spec, q)
        lse = torch.empty(spec.batch, spec.q_heads, spec.q_len, dtype=torch.float32, device=spec.device)
        forward_launch(spec, layout, aligned(q), aligned(k), aligned(v), o, lse)()
    return o, lse


@lru_cache(maxsize=1024)
def backward_plan(spec: AttentionSpec, types: tuple[Any, ...], is_skewed: bool) -> Plan:
    layout = spec.layout
    assert layout is not None
    columns = padded_head_dim(spec.head_dim)
    tile = backward_tile(columns)
    key_heads = spec.batch * spec.kv_heads
    width = key_heads if is_skewed else backward_width(spec)
    if key_heads // width > LONGEST_GRID_SIDE:
        width = key_heads
    is_tested = layout.partial_blocks > 0 or spec.kv_len % layout.block_kv != 0  # tiles of the last block may lie wholly beyond the keys
    constants = (tile.stages, layout.block_q, layout.block_kv, is_tested, tile.lse_early and not is_tested, *rule_constants(types))
    constants += (tile.consumer_registers, tile.producer_registers)
    key_tiles = -(-spec.kv_len // layout.block_kv) * (layout.block_kv // tile.block_kv)
    return Plan(
        tile,
        columns,
        (width, key_tiles, key_heads // width),
        (spec.q_heads, spec.kv_heads, spec.group, width, spec.q_len, -(-spec.q_len // tile.block_q), spec.kv_len),
        constants,
        ("sparse backward", spec.dtype, spec.device, tile, columns, constants, types),
    )


def backward_width(spec: AttentionSpec) -> int:
    """Key heads side by side, which start with their longest columns: 4, or as many as leave q, dO and dQ in the L2.

    At 32k and head dim 128 one head at a time is 1.19 times as fast as four where a 32nd of the blocks exists, at 8k four are up to
    1.2 times as fast as one.
    """
    bytes_a_head = 8 * spec.q_len * padded_head_dim(spec.head_dim) * spec.group
    heads = spec.batch * spec.kv_heads
    return next(width for width in (4, 2, 1) if heads % width == 0 and (width == 1 or width * bytes_a_head <= BACKWARD_L2_SHARE))


def main_launch(
    spec: AttentionSpec, plan: Plan, schedule: Schedule, tensors: tuple[Tensor, ...], scratch: Scratch, dk: Tensor, dv: Tensor
) -> Launch:
    """tensors: q, k, v and grad_o."""
    descriptors = backward_descriptors(plan, tensors, scratch, dk, dv)
    merged = schedule.merged_columns
    lists = (merged.offsets, merged.partial_offsets, merged.blocks, *schedule.columns[4:])
    lists = tuple([merged.blocks if part is None else part for part in lists])
    rule, numbers = rule_arguments(schedule)
    arguments = (*descriptors, scratch.state, *lists, *rule, *numbers, spec.scale, *plan.sizes, *schedule.column_shape[1:], *plan.constants)
    return Launch(sparse_attention_backward, plan.grid, arguments, plan.variant, OVERLAPPING, spec.device)


def backward(
    spec: AttentionSpec,
    layout: BlockLayout,
    tensors: tuple[Tensor, Tensor, Tensor],
    o: Tensor,
    lse: Tensor,
    grad_o: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes, dtype and memory order of q, k and v. grad_lse is that of the natural-log lse."""
    with on_device(spec.device):
        schedule = Schedule.of(layout)
        plan = backward_plan(spec, schedule.types, has_long_line(spec, schedule, 1))
        grads = dq, dk, dv = tuple([torch.empty_like(tensor) for tensor in tensors])
        scratch = Scratch.of(spec, plan)
        given = (*map(aligned, tensors), aligned(grad_o))
        pre_launch(spec, plan, aligned(o), lse, given[3], grad_lse, scratch)()
        main_launch(spec, plan, schedule, given, scratch, dk, dv)()
        post_launch(spec, plan, scratch, dq)()
    return grads
