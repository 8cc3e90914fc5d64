"""Tile sizes by head dim. docs/hopper.md, "Changing a tile", says what to run after a change: whether the registers still fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnzoo.spec import AttentionSpec

__all__ = ["BackwardTile", "ForwardTile", "backward_tile", "forward_tile", "forward_tile_of", "head_dim_pieces", "padded_head_dim"]

REGISTERS = 65536  # of a multiprocessor
MOST_STAGES = 4  # of the forward; 2 of the backward: `barriers.py` has no more named barriers for them
MOST_QUERIES = 128  # a step of the backward; lse and delta are padded to as many


def _demand(rules: dict[str, bool], tile: object) -> None:
    """A tile that breaks a rule may compile, and hang on a card or be wrong there."""
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ValueError(f"{tile}: {'; '.join(broken)}")


def _entry_registers(consumers: int, ctas: int) -> int:
    """A thread's before its warpgroup takes or gives any, so that so many CTAs fit: of all consumers and the padded producer, in eights."""
    return REGISTERS // (ctas * 128 * (consumers + 1)) // 8 * 8


def _registers_fit(consumers: int, ctas: int, of_consumer: int, of_producer: int) -> dict[str, bool]:
    used = 128 * (consumers * of_consumer + of_producer)
    there = 128 * (consumers + 1) * _entry_registers(consumers, ctas) if ctas > 1 else REGISTERS
    return {
        f"its warpgroups take {used} registers, a CTA has {there}": used <= there,
        f"registers are {of_consumer} and {of_producer}, it takes multiples of 8": of_consumer % 8 == of_producer % 8 == 0,
    }


@dataclass(frozen=True)
class ForwardTile:
    """One CTA's work and what it may use.

    Attributes:
        block_kv: keys a step. block_q follows: 64 rows a consumer warpgroup.
        consumers: warpgroups that compute, 1 to 3.
        stages, v_stages: key and value blocks in flight; 4 at most.
        ping_pong: two warpgroups take turns to issue Q K^T; needs that they compute the same blocks.
        own_blocks: each warpgroup computes only the blocks that its own 64 rows see, instead of the tile's.
        q_registers: Q is an operand in registers but for a tile's first block: less through the port of shared memory, if they suffice.
        q_slots: Q buffers; with two, the next tile's Q is there before this tile ends.
        ctas: that share a multiprocessor, 1 to 3; they hide one another's latency where tiles are short.
        consumer_registers, producer_registers: a thread. 128 * consumers * consumer_registers, and 128 for the
            producer's padded warpgroup, must fit into the CTA's share of 65536.
    """

    block_kv: int
    consumers: int
    stages: int
    v_stages: int
    ping_pong: bool = False
    own_blocks: bool = False
    q_registers: bool = False
    q_slots: int = 2
    ctas: int = 1
    consumer_registers: int = 240
    producer_registers: int = 24

    def __post_init__(self) -> None:
        rules = {
            f"block_kv is {self.block_kv}, it takes 64, 128 or 256": self.block_kv in (64, 128, 256),
            f"consumers is {self.consumers}, it takes 1 to 3": self.consumers in (1, 2, 3),
            f"stages is {self.stages}, it takes 1 to {MOST_STAGES}": 1 <= self.stages <= MOST_STAGES,
            f"v_stages is {self.v_stages}, it takes 1 to {MOST_STAGES}": 1 <= self.v_stages <= MOST_STAGES,
            f"q_slots is {self.q_slots}, it takes 1 or 2": self.q_slots in (1, 2),
            f"ctas is {self.ctas}, it takes 1 to 3": self.ctas in (1, 2, 3),
            "ping_pong is for 2 consumers that compute the same blocks": not self.ping_pong
            or (self.consumers == 2 and not self.own_blocks),
        }
        if self.consumers == 1 and self.ctas > 1:  # nobody asks for the first warpgroup's, which gets the rest
            rest = 2 * _entry_registers(1, self.ctas) - self.producer_registers
            rules[f"consumer_registers is {self.consumer_registers}, one consumer of {self.ctas} CTAs gets {rest}"] = (
                self.consumer_registers == rest
            )
        _demand(rules | _registers_fit(self.consumers, self.ctas, self.consumer_registers, self.producer_registers), self)

    @property
    def block_q(self) -> int:
        return 64 * self.consumers

    @property
    def rows_together(self) -> int:
        """Rows that compute the same blocks."""
        return 64 if self.own_blocks else self.block_q

    @property
    def entry_registers(self) -> int | None:
        """A thread's at entry, None: as many as the compiler gives a CTA that is alone."""
        return _entry_registers(self.consumers, self.ctas) if self.ctas > 1 else None


@dataclass(frozen=True)
class BackwardTile:
    """Two consumer warpgroups share block_kv keys, which stay; block_q queries a step stream past.

    Attributes:
        stages: query blocks (q, dO, lse, delta) in flight; 2 at most.
        lse_early: read the lse before S is waited for, where no mask needs the registers: faster where it does not spill.
    """

    block_q: int
    block_kv: int
    stages: int
    lse_early: bool
    consumer_registers: int = 240
    producer_registers: int = 24

    def __post_init__(self) -> None:
        rules = {
            f"stages is {self.stages}, it takes 1 or 2": self.stages in (1, 2),
            f"block_q is {self.block_q}, it takes 64 or {MOST_QUERIES}": self.block_q in (64, MOST_QUERIES),
            f"block_kv is {self.block_kv}, it takes 128": self.block_kv == 128,
        }
        _demand(rules | _registers_fit(2, 1, self.consumer_registers, self.producer_registers), self)

    def dq_block(self, columns: int) -> tuple[int, int]:
        """Rows and columns of a warpgroup's half of dQ.

        Halved rows read 128 bytes of shared memory a cycle of products, halved columns of head dim 64 192, where 128 is
        what there is; but an instruction has 64 rows.
        """
        return (64, columns) if self.block_q == 128 else (self.block_q, columns // 2)


def padded_head_dim(head_dim: int) -> int:
    """Tiles have power-of-two sides; TMA fills the columns past head_dim with zeros."""
    return max(64, 1 << (head_dim - 1).bit_length())


def head_dim_pieces(head_dim: int) -> tuple[int, int]:
    """Columns of the forward's one or two pieces of the head dim: 96 = 64 + 32 and 192 = 128 + 64 waste nothing."""
    padded = padded_head_dim(head_dim)
    half = padded // 2
    if half >= 64 and head_dim <= half + half // 2:
        return half, half // 2
    return padded, 0


def forward_tile(head_dim: int, *, is_masked: bool, keys: int = 2048, has_left: bool = False, is_shifted: bool = False) -> ForwardTile:
    """What was fastest on an H200; docs/hopper.md has the numbers.

    Args:
        head_dim: columns of both pieces: 64, 96, 128, 192 or 256.
        is_masked: a causal mask or a window.
        keys: that a row sees at most: all, or as many as its window holds.
        has_left: a window that is bounded on the left.
        is_shifted: the last key that a row sees is not that of a whole number of blocks of 128 from the row.
    """
    is_causal = is_masked and not has_left
    if head_dim == 64:
        if has_left or (is_masked and keys <= 2048):
            return ForwardTile(64, 1, 3, 3, q_registers=True, ctas=3, consumer_registers=136)
        if keys <= (4096 if is_causal and not is_shifted else 1024):  # shifted, no card has run the tile of turns
            return ForwardTile(128, 2, 4, 4, ping_pong=True, q_registers=is_causal)
        return ForwardTile(128, 3, 3, 3, own_blocks=is_causal, consumer_registers=160)
    if head_dim in (96, 128):
        if has_left and head_dim == 96 and keys <= 576:
            return ForwardTile(64, 1, 3, 3, ctas=2, consumer_registers=232)
        if has_left and head_dim == 128 and 128 < keys <= 192:  # 129: 2 to 5% faster; 161 and 192 a draw; 97 and 257 slower
            return ForwardTile(64, 1, 2, 3, ctas=2, consumer_registers=232)
        if is_masked and keys <= 512:
            return ForwardTile(64, 2, 4, 4, own_blocks=True)
        stages = 3 if head_dim == 96 else 2  # 197 KB of shared memory with both Q buffers
        in_registers = head_dim == 96 and not is_masked
        return ForwardTile(128, 2, stages, stages, ping_pong=is_masked or keys > 1024, q_registers=in_registers)
    if head_dim == 192:
        if is_causal and keys > 2048:
            return ForwardTile(64, 2, 3, 3, ping_pong=True, q_slots=1)
        # 216 KB with both Q buffers
        return ForwardTile(64, 2, 3, 2, own_blocks=is_masked, q_registers=not is_masked and keys > 1024)
    return ForwardTile(64, 2, 2, 2, ping_pong=not is_masked, own_blocks=is_masked, q_slots=1)  # 2 Q buffers do not fit; 128 keys spill


def forward_tile_of(spec: AttentionSpec) -> ForwardTile:
    """The forward's tile for a call."""
    left, right = spec.binding_band
    return forward_tile(
        sum(head_dim_pieces(spec.head_dim)),
        is_masked=(left, right) != (None, None),
        keys=spec.kv_len if left is None or right is None else min(spec.kv_len, left + right + 1),
        has_left=left is not None,
        is_shifted=right is not None and (spec.diagonal + right) % 128 != 0,
    )


def backward_tile(head_dim: int) -> BackwardTile:
    """By padded head dim (64, 128)."""
    if head_dim == 64:
        return BackwardTile(128, 128, stages=2, lse_early=False)
    return BackwardTile(64, 128, stages=2, lse_early=True)  # 128 queries: 2 KB of spills
