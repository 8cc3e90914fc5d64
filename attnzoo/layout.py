"""BlockLayout: which blocks of the score matrix are computed. Validated once, then frozen."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

__all__ = ["BlockLayout", "BlockLists", "ElementRule", "LayoutSummary"]

WORD_BITS = 32
MOST_BLOCKS = 2**31 - 1  # offsets are int32
ID_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class LayoutSummary:
    """What a decision may know of a layout: no tensor, hashable."""

    batch: int
    heads: int
    block_q: int
    block_kv: int
    full_blocks: int
    partial_blocks: int
    rules: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Compressed rows: the blocks of row `r` are `indices[offsets[r]:offsets[r + 1]]`, ascending.

    Rows run over `(batch, head, block row)`, flattened in that order.

    Attributes:
        offsets: `(rows + 1,)` int32, non-decreasing, from 0 to `len(indices)`.
        indices: `(blocks,)` int32 block columns.
    """

    offsets: Tensor
    indices: Tensor

    @classmethod
    def from_bool(cls, blocks: Tensor) -> BlockLists:
        """From a bool table `(rows, columns)`."""
        counts = blocks.sum(1)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        return cls(offsets, blocks.nonzero()[:, 1].to(torch.int32))

    def row_of_each(self) -> Tensor:
        """The row of every block: `(blocks,)` int64."""
        rows = torch.arange(len(self.offsets) - 1, device=self.offsets.device)
        return torch.repeat_interleave(rows, self.offsets.diff().long(), output_size=len(self.indices))

    def on(self, device: torch.device | str) -> BlockLists:
        return BlockLists(self.offsets.to(device), self.indices.to(device))

    def copy(self) -> BlockLists:
        return BlockLists(_copy(self.offsets), _copy(self.indices))


@dataclass(frozen=True, eq=False)
class ElementRule:
    """Which pairs of a partial block attend; the parts that are given compose by AND.

    Attributes:
        band: `(left, right, diagonal)`: key j is kept if `i + diagonal - left <= j <= i + diagonal + right`;
            a bound that is None is open.
        segments: integer ids `((batch, q_len), (batch, kv_len))`: kept where they are equal.
        bits: `(partial blocks, block_q, ceil(block_kv / 32))` int32: pair (i, j) of a block is kept if bit
            `j % 32` of word `j // 32` in row `i` is set.
    """

    band: tuple[int | None, int | None, int] | None = None
    segments: tuple[Tensor, Tensor] | None = None
    bits: Tensor | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(name for name in ("band", "segments", "bits") if getattr(self, name) is not None)

    def copy(self) -> ElementRule:
        segments = None if self.segments is None else (_copy(self.segments[0]), _copy(self.segments[1]))
        return ElementRule(self.band, segments, None if self.bits is None else _copy(self.bits))


def check_block_count(count: int) -> None:
    """Makers ask before they make so many."""
    if count > MOST_BLOCKS:
        raise ValueError(f"the layout has {count} blocks; it takes at most {MOST_BLOCKS}: take larger blocks")


def _has_address(tensor: Tensor) -> bool:
    """Not so of meta tensors, of subclasses, and of what a transform of torch.func has wrapped."""
    return type(tensor) is Tensor and not tensor.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)  # a kernel counts on it


def _version(tensor: Tensor) -> int:
    """How often the tensor was written in place; inference-mode tensors don't count, and torch.compile can't ask."""
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def pack_bits(blocks: Tensor) -> Tensor:
    """`(n, block_q, block_kv)` bool to `(n, block_q, words)` int32, least significant bit first."""
    n, rows, cols = blocks.shape
    words = -(-cols // WORD_BITS)
    padded = torch.nn.functional.pad(blocks, (0, words * WORD_BITS - cols)).view(n, rows, words, WORD_BITS)
    weights = torch.ones((), dtype=torch.int64, device=blocks.device) << torch.arange(WORD_BITS, device=blocks.device)
    return (padded * weights).sum(-1).to(torch.int32)  # int64 to int32 keeps the low 32 bits


def unpack_bits(words: Tensor, block_kv: int) -> Tensor:
    """`(n, block_q, words)` int32 to `(n, block_q, block_kv)` bool."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 1).bool().flatten(-2)[..., :block_kv]


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Which `block_q x block_kv` blocks of the `(q_len, kv_len)` score matrix are computed.

    In a *full* block every pair attends; in a *partial* block those that `rule` keeps; any other block is
    absent. `layout=L` means the same as `mask=L.to_dense()`. A block size that divides neither length is
    fine: the tail block is cut. The layout owns copies of what it was built from.

    Attributes:
        q_len, kv_len: lengths in tokens.
        block_q, block_kv: block size in tokens.
        batch, heads: 1 (shared by all), or the call's batch and number of query heads.
        full, partial: the two kinds of blocks, as compressed rows over `(batch, heads, block rows)`.
        rule: the pairs kept in partial blocks.
        summary: what a decision may know.
        facts: sizes and rule as text, which torch.compile takes as a constant; `restored` reads it.

    Raises:
        TypeError: wrong type or dtype. ValueError: anything else that does not fit; the message names the field.
    """

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    full: BlockLists
    partial: BlockLists
    rule: ElementRule = field(default_factory=ElementRule)
    batch: int = 1
    heads: int = 1
    summary: LayoutSummary = field(init=False, repr=False)
    facts: str = field(init=False, repr=False)
    _watched: list[tuple[Tensor, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        from attnzoo.layouts.validation import validate

        validate(self)
        self._own(self.full.copy(), self.partial.copy(), self.rule.copy())

    def _own(self, full: BlockLists, partial: BlockLists, rule: ElementRule) -> None:
        object.__setattr__(self, "full", full)
        object.__setattr__(self, "partial", partial)
        object.__setattr__(self, "rule", rule)
        object.__setattr__(self, "_watched", [(tensor, _version(tensor)) for tensor in self.tensors()])
        band = ("-" if bound is None else bound for bound in rule.band or ())
        sizes = (self.q_len, self.kv_len, self.block_q, self.block_kv, self.batch, self.heads)
        facts = " ".join(str(fact) for fact in (*sizes, int(rule.segments is not None), *band))
        object.__setattr__(self, "facts", facts)
        blocks = (len(full.indices), len(partial.indices))
        check_block_count(sum(blocks))
        summary = LayoutSummary(self.batch, self.heads, self.block_q, self.block_kv, *blocks, rule.parts)
        object.__setattr__(self, "summary", summary)  # not a cached_property: its lock stops torch.compile
        if not torch.compiler.is_compiling() and _has_address(full.offsets):
            _living.setdefault(full.offsets.data_ptr(), self)

    @classmethod
    def _trusted(
        cls,
        *,
        q_len: int,
        kv_len: int,
        block_q: int,
        block_kv: int,
        full: BlockLists,
        partial: BlockLists,
        rule: ElementRule,
        batch: int = 1,
        heads: int = 1,
    ) -> BlockLayout:
        """For makers whose lists are right by construction: nothing is read back from the device."""
        self = object.__new__(cls)
        fields = dict(q_len=q_len, kv_len=kv_len, block_q=block_q, block_kv=block_kv, batch=batch, heads=heads)
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._own(full, partial, rule)
        return self

    @classmethod
    def restored(cls, tensors: list[Tensor], facts: str) -> BlockLayout:
        """The inverse of `tensors()` and `facts`, for operators, which take no objects."""
        words = facts.split()
        q_len, kv_len, block_q, block_kv, batch, heads, has_segments = map(int, words[:7])
        band = None
        if len(words) > 7:
            left, right = (None if word == "-" else int(word) for word in words[7:9])
            band = (left, right, int(words[9]))
        has_bits = len(tensors) == (7 if has_segments else 5)
        segments = (tensors[4], tensors[5]) if has_segments else None
        return cls._trusted(
            q_len=q_len,
            kv_len=kv_len,
            block_q=block_q,
            block_kv=block_kv,
            full=BlockLists(tensors[0], tensors[1]),
            partial=BlockLists(tensors[2], tensors[3]),
            rule=ElementRule(band, segments, tensors[-1] if has_bits else None),
            batch=batch,
            heads=heads,
        )

    # Makers

    @classmethod
    def from_blocks(
        cls, blocks: Tensor, *, block: int | tuple[int, int], q_len: int | None = None, kv_len: int | None = None
    ) -> BlockLayout:
        """Full blocks where `blocks` is True.

        Args:
            blocks: bool, `(rows, columns)` or `(B or 1, H or 1, rows, columns)`.
            block: tokens a block, one number or `(block_q, block_kv)`.
            q_len, kv_len: lengths in tokens; by default whole blocks.
        """
        from attnzoo.layouts.build import from_blocks

        return from_blocks(blocks, block=block, q_len=q_len, kv_len=kv_len)

    @classmethod
    def from_dense(cls, mask: Tensor, *, block: int | tuple[int, int] = 128) -> BlockLayout:
        """The blocks that hold a True of `mask`: full where all are, partial with packed bits elsewhere.

        Args:
            mask: bool, `(q_len, kv_len)` or `(B or 1, H or 1, q_len, kv_len)`, True = may attend.
            block: tokens a block, one number or `(block_q, block_kv)`.
        """
        from attnzoo.layouts.build import from_dense

        return from_dense(mask, block=block)

    # Views

    @property
    def rows(self) -> int:
        """Block rows a head."""
        return -(-self.q_len // self.block_q)

    @property
    def columns(self) -> int:
        """Block columns a head."""
        return -(-self.kv_len // self.block_kv)

    @property
    def device(self) -> torch.device:
        return self.full.offsets.device

    @property
    def density(self) -> float:
        """Share of blocks that exist, full or partial."""
        total = self.batch * self.heads * self.rows * self.columns
        return (len(self.full.indices) + len(self.partial.indices)) / total if total else 0.0

    @property
    def transposed(self) -> tuple[BlockLists, BlockLists, Tensor]:
        """For the backward: full and partial lists over `(batch, heads, block columns)`, whose indices are
        block rows, and for each transposed partial block its place in `partial` (empty where no bits are there)."""
        self.check_unmodified()
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # what a graph makes has no values until it runs
            return self.__dict__.get("_transposed") or self._make_transposed()
        return self._transposed

    @cached_property
    def _transposed(self) -> tuple[BlockLists, BlockLists, Tensor]:
        return self._keep_transposed(*self._make_transposed())

    def _make_transposed(self) -> tuple[BlockLists, BlockLists, Tensor]:
        full, _ = _transpose(self.full, self)
        partial, order = _transpose(self.partial, self)
        return full, partial, order if self.rule.bits is not None else order[:0]

    def _keep_transposed(self, full: BlockLists, partial: BlockLists, order: Tensor) -> tuple[BlockLists, BlockLists, Tensor]:
        made = (full.offsets, full.indices, partial.offsets, partial.indices, order)
        self._watched.extend((tensor, _version(tensor)) for tensor in made)
        return full, partial, order

    @cached_property
    def host_lists(self) -> tuple[BlockLists, BlockLists]:
        """The full and partial lists on the CPU. From another device they are copied once: the one wait for it."""
        if self.device.type == "cpu":
            return self.full, self.partial
        full, partial = self.full.on("cpu"), self.partial.on("cpu")
        self._watched.extend((tensor, _version(tensor)) for lists in (full, partial) for tensor in (lists.offsets, lists.indices))
        return full, partial

    def to_dense(self) -> Tensor:
        """The bool mask `(batch, heads, q_len, kv_len)` that this layout stands for."""
        from attnzoo.layouts.build import to_dense

        self.check_unmodified()
        return to_dense(self)

    def to(self, device: torch.device | str) -> BlockLayout:
        """The same layout with its tensors on `device`; itself where they are there."""
        device = torch.device(device)  # a dtype would be taken by the tensors, and make other indices of them
        self.check_unmodified()
        full, rule = self.full.on(device), self.rule
        if full.offsets is self.full.offsets:
            return self
        segments = None if rule.segments is None else (rule.segments[0].to(device), rule.segments[1].to(device))
        bits = None if rule.bits is None else rule.bits.to(device)
        return BlockLayout._trusted(
            q_len=self.q_len,
            kv_len=self.kv_len,
            block_q=self.block_q,
            block_kv=self.block_kv,
            full=full,
            partial=self.partial.on(device),
            rule=ElementRule(rule.band, segments, bits),
            batch=self.batch,
            heads=self.heads,
        )

    # Combinations and pictures

    def __and__(self, other: BlockLayout) -> BlockLayout:
        """The pairs that attend in both."""
        from attnzoo.layouts.combine import intersection

        return intersection(self, other) if isinstance(other, BlockLayout) else NotImplemented

    def __or__(self, other: BlockLayout) -> BlockLayout:
        """The pairs that attend in either."""
        from attnzoo.layouts.combine import union

        return union(self, other) if isinstance(other, BlockLayout) else NotImplemented

    def __invert__(self) -> BlockLayout:
        """The pairs that don't attend."""
        from attnzoo.layouts.combine import complement

        return complement(self)

    def __str__(self) -> str:
        from attnzoo.layouts.picture import text

        return text(self)

    def show(self, axes: Any = None, *, batch: int = 0, head: int = 0) -> Any:
        """Draw one head's blocks into a matplotlib axes, a new one by default; returns it."""
        from attnzoo.layouts.picture import draw

        return draw(self, axes, batch=batch, head=head)

    def tensors(self) -> list[Tensor]:
        """Every tensor the layout is made of."""
        segments = self.rule.segments or ()
        bits = () if self.rule.bits is None else (self.rule.bits,)
        return [self.full.offsets, self.full.indices, self.partial.offsets, self.partial.indices, *segments, *bits]

    @staticmethod
    def check_owner(tensors: list[Tensor]) -> None:
        """`check_unmodified` of the layout whose `tensors()` these are, for operators; nothing if they are copies."""
        owner = _living.get(tensors[0].data_ptr())
        if owner is not None:
            owner.check_unmodified()

    def check_unmodified(self) -> None:
        """Raise ValueError if a tensor of the layout was written in place since it was validated.

        Writes through `.data`, numpy or to inference-mode tensors go unseen. While torch.compile traces nothing is checked;
        the operators of a compiled call check when they run, see `check_owner`.
        """
        if torch.compiler.is_compiling():
            return
        if any([_version(tensor) != version for tensor, version in self._watched]):
            raise ValueError("layout: one of its tensors was written in place after validation; build a new BlockLayout")

    def __reduce__(self) -> tuple[object, ...]:
        self.check_unmodified()
        sizes = (self.q_len, self.kv_len, self.block_q, self.block_kv)
        return BlockLayout, (*sizes, self.full, self.partial, self.rule, self.batch, self.heads)  # a copy is validated anew


_living: weakref.WeakValueDictionary[int, BlockLayout] = weakref.WeakValueDictionary()  # by where their first tensor lies


def _transpose(lists: BlockLists, layout: BlockLayout) -> tuple[BlockLists, Tensor]:
    row = lists.row_of_each()
    rows, columns = max(layout.rows, 1), layout.columns
    column = (row // rows) * columns + lists.indices
    column, order = torch.sort(column, stable=True)  # rows ascend within a column, as they did before
    every = torch.arange(layout.batch * layout.heads * columns + 1, device=column.device)
    offsets = torch.searchsorted(column, every).to(torch.int32)  # bincount would wait for the device
    return BlockLists(offsets, (row % rows)[order].to(torch.int32)), order
