"""Tile sizes by head dim. Change one here, then run tests/test_hopper_aot.py: it says whether the registers still fit."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BackwardTile", "ForwardTile", "backward_tile", "forward_tile", "padded_head_dim"]


@dataclass(frozen=True)
class ForwardTile:
    """One CTA's work and what it may use.

    Attributes:
        block_kv: keys a step. block_q follows: 64 rows a consumer warpgroup.
        consumers: warpgroups that compute, 2 or 3.
        stages: key and value blocks in flight.
        ping_pong: two warpgroups take turns to issue Q K^T; with three there is always one in its softmax.
        persistent: one CTA an SM walks many tiles, with two Q buffers; else one tile a CTA.
        consumer_registers, producer_registers: a thread. 128 * consumers * consumer_registers, and 128 for the
            producer's padded warpgroup, must fit into 65536.
    """

    block_kv: int
    consumers: int
    stages: int
    ping_pong: bool
    persistent: bool = True
    consumer_registers: int = 240
    producer_registers: int = 24

    @property
    def block_q(self) -> int:
        return 64 * self.consumers


@dataclass(frozen=True)
class BackwardTile:
    """Two consumer warpgroups share block_kv keys, which stay; block_q queries a step stream past.

    Attributes:
        stages: query blocks (q, dO, lse, delta) in flight.
        lse_early: read the lse before S is waited for, where no mask needs the registers: faster where it does not spill.
    """

    block_q: int
    block_kv: int
    stages: int
    lse_early: bool
    consumer_registers: int = 240
    producer_registers: int = 24


def padded_head_dim(head_dim: int) -> int:
    """Tiles have power-of-two sides; TMA fills the columns past head_dim with zeros."""
    return max(64, 1 << (head_dim - 1).bit_length())


def forward_tile(head_dim: int, *, is_masked: bool) -> ForwardTile:
    """By padded head dim (64, 128, 256)."""
    if head_dim == 64 and not is_masked:
        return ForwardTile(128, consumers=3, stages=3, ping_pong=False, consumer_registers=160)  # softmax-bound: 3 hide it, +10%
    if head_dim == 64:
        return ForwardTile(128, consumers=2, stages=4, ping_pong=True)  # 128 = 128: one cut block a causal tile
    if head_dim == 128:
        return ForwardTile(128, consumers=2, stages=2, ping_pong=True)  # 197 KB of shared memory with both Q buffers
    return ForwardTile(64, consumers=2, stages=2, ping_pong=True, persistent=False)  # 2 Q buffers do not fit; 128 keys spill


def backward_tile(head_dim: int) -> BackwardTile:
    """By padded head dim (64, 128)."""
    if head_dim == 64:
        return BackwardTile(128, 128, stages=2, lse_early=False)
    return BackwardTile(64, 128, stages=2, lse_early=True)  # 128 queries: 2 KB of spills
