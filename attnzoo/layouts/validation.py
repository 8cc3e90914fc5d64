"""The checks that stand between a layout and a kernel: after them every index is in range."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.layout import ID_DTYPES, WORD_BITS, BlockLayout, BlockLists, ElementRule

LARGEST = 2**31 - 1


def validate(layout: BlockLayout) -> None:
    """Raise TypeError or ValueError, naming the field, unless `layout` is well formed."""
    for name in ("q_len", "kv_len", "batch", "heads"):
        check_int(name, getattr(layout, name), least=0)
    for name in ("block_q", "block_kv"):
        check_int(name, getattr(layout, name), least=1)
    for name in ("full", "partial"):
        _check_list_tensors(name, getattr(layout, name), layout)
    for name in ("full", "partial"):
        _check_lists(name, getattr(layout, name), layout)
    _check_disjoint(layout)
    _check_rule(layout.rule, layout)


def block_size(block: object) -> tuple[int, int]:
    """One number or a pair of numbers of tokens."""
    pair = block if isinstance(block, tuple) else (block, block)
    if len(pair) != 2:
        raise ValueError(f"block is {block!r}; it takes one number or (block_q, block_kv)")
    for size in pair:
        check_int("block", size, least=1)
    return pair


def lengths(q_len: object, kv_len: object) -> tuple[int, int]:
    """Lengths in tokens; kv_len is q_len where it is None."""
    check_int("q_len", q_len, least=0)
    if kv_len is not None:
        check_int("kv_len", kv_len, least=0)
    return q_len, q_len if kv_len is None else kv_len  # type: ignore[return-value]


def made_on(device: torch.device | str | None) -> torch.device:
    """Where a layout is made: on torch's default device where none is given."""
    return torch.empty(0).device if device is None else torch.device(device)


def check_readable(name: str, tensor: Tensor) -> None:
    """Raise unless the tensor is dense and has values."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is a sparse tensor of layout {tensor.layout}; it takes a dense (strided) one")
    if tensor.is_meta:
        raise ValueError(f"{name} is on meta and holds no data; build the layout elsewhere, layout.to('meta') moves it")


def check_int(name: str, value: object, *, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; it takes an int")
    if value < least:
        raise ValueError(f"{name} is {value}; it takes at least {least}")
    if most is not None and value > most:
        raise ValueError(f"{name} is {value}; it takes at most {most}")


def _check_index_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
    if value.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {value.dtype}, not torch.int32")
    if value.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it takes one dim")


def _check_list_tensors(name: str, lists: object, layout: BlockLayout) -> None:
    if not isinstance(lists, BlockLists):
        raise TypeError(f"{name} is a {type(lists).__name__}, not BlockLists")
    for field in ("offsets", "indices"):
        tensor = getattr(lists, field)
        _check_index_tensor(f"{name}.{field}", tensor)
        _check_device(f"{name}.{field}", tensor, layout)
        check_readable(f"{name}.{field}", tensor)


def _check_lists(name: str, lists: BlockLists, layout: BlockLayout) -> None:
    offsets, indices = lists.offsets, lists.indices
    rows = layout.batch * layout.heads * layout.rows
    if len(offsets) != rows + 1:
        raise ValueError(
            f"{name}.offsets has {len(offsets)} entries; batch {layout.batch} x heads {layout.heads} x "
            f"{layout.rows} block rows need {rows + 1}"
        )
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(indices):
        raise ValueError(
            f"{name}.offsets runs from {int(offsets[0])} to {int(offsets[-1])}; it must run from 0 to the "
            f"{len(indices)} entries of {name}.indices"
        )
    decreases = offsets.long().diff() < 0  # in int32 a difference could wrap
    if bool(decreases.any()):
        raise ValueError(f"{name}.offsets decreases at row {int(decreases.nonzero()[0])}")
    _check_indices(name, lists, layout.columns)


def _check_indices(name: str, lists: BlockLists, columns: int) -> None:
    indices = lists.indices
    if not len(indices):
        return
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= columns:
        bad = low if low < 0 else high
        allowed = f"block columns run from 0 to {columns - 1}" if columns else "kv_len 0 has no block column"
        raise ValueError(f"{name}.indices holds {bad}; {allowed}")
    row = lists.row_of_each()
    same_row = row[1:] == row[:-1]
    for problem, found in (("repeats", indices[1:] == indices[:-1]), ("is out of order", indices[1:] < indices[:-1])):
        wrong = (same_row & found).nonzero()
        if len(wrong):
            place = int(wrong[0]) + 1
            raise ValueError(
                f"{name}.indices {problem} at entry {place} (block column {int(indices[place])}, row "
                f"{int(row[place])}); the columns of a row ascend"
            )


def _check_disjoint(layout: BlockLayout) -> None:
    keys = [x.row_of_each() * max(layout.columns, 1) + x.indices for x in (layout.full, layout.partial)]
    both = torch.isin(keys[0], keys[1])
    if bool(both.any()):
        key = int(keys[0][both][0])
        raise ValueError(
            f"partial.indices holds block column {key % layout.columns} of row {key // layout.columns}, which "
            "full.indices holds too; a block is full or partial"
        )


def _check_rule(rule: object, layout: BlockLayout) -> None:
    if not isinstance(rule, ElementRule):
        raise TypeError(f"rule is a {type(rule).__name__}, not an ElementRule")
    if len(layout.partial.indices) and not rule.parts:
        raise ValueError("rule is empty, but there are partial blocks; give band, segments or bits")
    if rule.band is not None:
        _check_band(rule.band)
    if rule.segments is not None:
        _check_segments(rule.segments, layout)
    if rule.bits is not None:
        _check_bits(rule.bits, layout)


def _check_band(band: object) -> None:
    if not isinstance(band, tuple) or len(band) != 3:
        raise TypeError(f"rule.band is {band!r}; it takes (left, right, diagonal)")
    for name, bound in zip(("left", "right"), band[:2]):
        if bound is not None:
            check_int(f"rule.band {name}", bound, least=0, most=LARGEST)
    check_int("rule.band diagonal", band[2], least=-LARGEST, most=LARGEST)


def _check_segments(segments: object, layout: BlockLayout) -> None:
    if not isinstance(segments, tuple) or len(segments) != 2:
        raise TypeError("rule.segments takes a pair of integer tensors, ids of queries and of keys")
    for name, ids, length in zip(("queries", "keys"), segments, (layout.q_len, layout.kv_len)):
        if not isinstance(ids, Tensor) or ids.dtype not in ID_DTYPES:
            found = getattr(ids, "dtype", type(ids).__name__)
            raise TypeError(f"rule.segments of the {name} is {found}; it takes int8, int16, int32, int64 or uint8")
        if tuple(ids.shape) != (layout.batch, length):
            raise ValueError(f"rule.segments of the {name} has shape {tuple(ids.shape)}; it takes {(layout.batch, length)}")
        _check_device(f"rule.segments of the {name}", ids, layout)
        check_readable(f"rule.segments of the {name}", ids)


def _check_bits(bits: object, layout: BlockLayout) -> None:
    if not isinstance(bits, Tensor) or bits.dtype != torch.int32:
        raise TypeError(f"rule.bits is {getattr(bits, 'dtype', type(bits).__name__)}; it takes an int32 tensor")
    shape = (len(layout.partial.indices), layout.block_q, -(-layout.block_kv // WORD_BITS))
    if tuple(bits.shape) != shape:
        raise ValueError(f"rule.bits has shape {tuple(bits.shape)}; its partial blocks need {shape}")
    _check_device("rule.bits", bits, layout)
    check_readable("rule.bits", bits)


def _check_device(name: str, tensor: Tensor, layout: BlockLayout) -> None:
    if tensor.device != layout.device:
        raise ValueError(f"{name} is on {tensor.device}, full.offsets on {layout.device}; they need one device")
