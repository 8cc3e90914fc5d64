"""Layouts on disk, as JSON or safetensors, never pickle. What is loaded is validated like anything from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnzoo.layout import BlockLayout, BlockLists, ElementRule

__all__ = ["load", "save"]

FORMAT = "attnzoo.BlockLayout/1"
SIZES = ("q_len", "kv_len", "block_q", "block_kv", "batch", "heads")
LISTS = ("full.offsets", "full.indices", "partial.offsets", "partial.indices")
SEGMENTS = ("segments.q", "segments.kv")
DTYPES = {"int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8}
SUFFIXES = (".json", ".safetensors")


def save(layout: BlockLayout, path: str | Path) -> None:
    """Write a layout; the suffix, `.json` or `.safetensors`, says how (the latter needs the package safetensors)."""
    layout.check_unmodified()
    path = _checked(path)
    facts: dict[str, Any] = {"format": FORMAT, **{name: getattr(layout, name) for name in SIZES}, "band": layout.rule.band}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _named(layout).items()}
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(tensors, path, metadata={"layout": json.dumps(facts)})
        return
    facts["tensors"] = {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "values": tensor.flatten().tolist()}
        for name, tensor in tensors.items()
    }
    path.write_text(json.dumps(facts))


def load(path: str | Path) -> BlockLayout:
    """Read a layout onto the CPU and validate it.

    Raises:
        TypeError, ValueError: not such a file, or a layout that is malformed; the message names the field.
    """
    path = _checked(path)
    facts, tensors = _read_safetensors(path) if path.suffix == ".safetensors" else _read_json(path)
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f"{path.name} is not a layout of format {FORMAT!r}")
    missing = [name for name in (*SIZES, "band") if name not in facts]
    needed = LISTS if tensors.keys().isdisjoint(SEGMENTS) else (*LISTS, *SEGMENTS)
    missing += [name for name in needed if name not in tensors]
    if missing:
        raise ValueError(f"{path.name} has no {', '.join(missing)}")
    unknown = sorted(tensors.keys() - {*LISTS, *SEGMENTS, "bits"})
    if unknown:
        raise ValueError(f"{path.name} holds {', '.join(unknown)}, which is no part of a layout")
    band = facts["band"]
    segments = (tensors["segments.q"], tensors["segments.kv"]) if len(needed) > len(LISTS) else None
    return BlockLayout(
        **{name: facts[name] for name in SIZES},
        full=BlockLists(tensors["full.offsets"], tensors["full.indices"]),
        partial=BlockLists(tensors["partial.offsets"], tensors["partial.indices"]),
        rule=ElementRule(tuple(band) if isinstance(band, list) else band, segments, tensors.get("bits")),
    )


def _named(layout: BlockLayout) -> dict[str, Tensor]:
    rule = layout.rule
    named = {
        "full.offsets": layout.full.offsets,
        "full.indices": layout.full.indices,
        "partial.offsets": layout.partial.offsets,
        "partial.indices": layout.partial.indices,
    }
    if rule.segments is not None:
        named |= {"segments.q": rule.segments[0], "segments.kv": rule.segments[1].clone()}
    return named if rule.bits is None else {**named, "bits": rule.bits}


def _checked(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"path is {path.name!r}; it takes a name that ends in {' or '.join(SUFFIXES)}")
    return path


def _read_safetensors(path: Path) -> tuple[Any, dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            return json.loads(metadata.get("layout", "null")), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} can't be read as a layout: {error}") from error


def _read_json(path: Path) -> tuple[Any, dict[str, Tensor]]:
    try:
        facts = json.loads(path.read_text())
        tensors = facts.get("tensors", {}) if isinstance(facts, dict) else {}
        return facts, {name: _tensor(entry) for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path.name} can't be read as a layout: {type(error).__name__}: {error}") from error


def _tensor(entry: dict[str, Any]) -> Tensor:
    values = entry["values"]
    if not all([type(value) is int for value in values]):
        raise TypeError("a tensor holds what is no integer")
    return torch.tensor(values, dtype=DTYPES[entry["dtype"]], device="cpu").view(entry["shape"])
