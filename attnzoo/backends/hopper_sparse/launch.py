"""From tensors and a layout to the launch. Imports triton: ask `support.reasons_against` first."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.block_sparse_triton.schedule import Schedule
from attnzoo.backends.hopper.descriptors import aligned, tile_descriptor
from attnzoo.backends.hopper.launch import ALONE, Launch, Plan, heads_in_group, processors_of, zeroed_counter
from attnzoo.backends.hopper.tiles import padded_head_dim
from attnzoo.backends.hopper_sparse.forward import sparse_attention_forward
from attnzoo.backends.recompute import empty_output
from attnzoo.backends.triton.launchers import on_device
from attnzoo.layout import BlockLayout
from attnzoo.spec import AttentionSpec

BLOCK_M = 128
STAGES = {64: 4, 128: 2}  # by head dim; 197 KB of shared memory at 128
REGISTERS = (240, 24)  # a thread of a consumer, of the producer


@lru_cache(maxsize=1024)
def forward_plan(spec: AttentionSpec, types: tuple[Any, ...]) -> Plan:
    layout = spec.layout
    assert layout is not None
    columns = padded_head_dim(spec.head_dim)
    block_kv = 128 if layout.block_kv % 128 == 0 else 64
    tiles = -(-spec.q_len // layout.block_q) * (layout.block_q // BLOCK_M) * spec.batch * spec.q_heads
    is_cut = spec.kv_len % layout.block_kv != 0
    has_bits, has_low, has_high, ids = types[0] is not True, types[1] is not True, types[2] is not True, types[3]
    rule = (has_low, has_high, ids is not True, has_bits)
    constants = (STAGES[columns], True, layout.block_q, layout.block_kv, is_cut, *rule, *REGISTERS)
    sizes = (spec.group, heads_in_group(spec), spec.q_heads, spec.q_len, spec.kv_len)
    variant = ("sparse forward", spec.dtype, spec.device, block_kv, columns, constants, types)
    return Plan(block_kv, columns, (min(processors_of(spec.device), tiles), 1, 1), (tiles, *sizes), constants, variant)


def forward_launch(spec: AttentionSpec, layout: BlockLayout, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Launch:
    """The launch that fills o and lse; q, k and v as `aligned` gives them."""
    schedule = Schedule.of(layout)
    merged = schedule.merged_rows
    plan = forward_plan(spec, schedule.types)
    tiles, *sizes = plan.sizes
    descriptors = (
        tile_descriptor(q, 64, plan.columns),
        tile_descriptor(k, plan.tile, plan.columns),
        tile_descriptor(v, plan.tile, plan.columns),
        tile_descriptor(o, 64, plan.columns),
    )
    lists = (merged.offsets, merged.partial_offsets, merged.blocks, schedule.rows[4])
    bits, low, high, q_ids, q_batch, kv_ids, kv_batch = schedule.rule
    tensors = [merged.blocks if part is None else part for part in (bits, q_ids, kv_ids)]  # any pointer where there is none
    numbers = [part or 0 for part in (low, high, q_batch, kv_batch)]
    arguments = (*descriptors, lse, zeroed_counter(q.device), *lists, *tensors, *numbers, spec.scale, tiles)
    arguments += (*schedule.row_shape, *sizes, *plan.constants)
    return Launch(sparse_attention_forward, plan.grid, arguments, plan.variant, ALONE)


def forward(spec: AttentionSpec, layout: BlockLayout, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`o` (B, Hq, Sq, D) in the memory order of q, and the natural-log lse (B, Hq, Sq) in fp32."""
    with on_device(spec.device):
        o = empty_output(spec, q)
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        forward_launch(spec, layout, aligned(q), aligned(k), aligned(v), o, lse)()
    return o, lse
