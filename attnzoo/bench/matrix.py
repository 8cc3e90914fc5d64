"""Matrix: what a benchmark runs: backends, workloads, rounds. From a TOML file or from options. Imports no torch."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from attnzoo.bench.workload import Workload

__all__ = ["Matrix", "QUICK_CPU", "QUICK_CUDA", "workloads_of"]

SIZES = {f.name for f in fields(Workload)}
COUNTS = ("rounds", "side_by_side")
LONGEST = 1e6  # seconds: beyond what a queue can wait lies an overflow
DERIVED = {"tokens": ("batch", "length"), "width": ("heads", "head_dim")}
"""Key -> the size that it gives, and the one it is divided by: batch = tokens // length, heads = width // head_dim."""


@dataclass(frozen=True)
class Matrix:
    """A benchmark.

    Attributes:
        workloads: in the order in which they run, each once.
        backends: their names; empty means every known one.
        relative_to: the backend that the others' speed is given in; None for the first one that ran.
        rounds: how often each backend's turn comes; they take turns, so that drift hits all alike.
        seconds: of measured calls a turn.
        timeout: seconds that a backend may take to answer, its first call and compilation included.
        only: id of a workload -> the backends that run it; those that are not in it run on all.
        side_by_side: backends that compile and are checked at one time. More than one saves time where there are cores
            enough; first calls are then slower, and memory is shared. Times are always taken one at a time.
    """

    workloads: tuple[Workload, ...]
    backends: tuple[str, ...] = ()
    relative_to: str | None = None
    rounds: int = 5
    seconds: float = 0.1
    timeout: float = 120.0
    side_by_side: int = 1
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.workloads:
            raise ValueError("the matrix has no workload")
        for name in ("rounds", "seconds", "timeout", "side_by_side"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int if name in COUNTS else (int, float)) or not 0 < value <= LONGEST:
                raise ValueError(f"{name} is {value!r}; it takes a positive {'int' if name in COUNTS else 'number'} up to {LONGEST:g}")
        devices = list(dict.fromkeys(workload.device for workload in self.workloads))
        if len(devices) > 1:
            raise ValueError(f"a matrix runs on one device, and it has {' and '.join(devices)}: make a file of each")
        if self.relative_to is not None and not isinstance(self.relative_to, str):
            raise ValueError(f"relative_to is {self.relative_to!r}; it takes a name")
        if self.relative_to is not None and self.backends and self.relative_to not in self.backends:
            raise ValueError(f"relative_to is {self.relative_to!r}, none of the backends {', '.join(self.backends)}")

    @classmethod
    def from_toml(cls, path: Path) -> Matrix:
        """Top-level keys are those of this class but `only`; each `[[workloads]]` table crosses its lists, for its own `backends` alone
        if it names some.

        Raises:
            ValueError: what doesn't parse, or a key or value that there isn't.
        """
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{path}: {error}") from None
        keys = [f.name for f in fields(cls) if f.name != "only"]
        unknown = sorted(table.keys() - set(keys))
        if unknown:
            raise ValueError(f"{path} has {', '.join(unknown)}; it takes {', '.join(keys)}")
        entries = table.pop("workloads", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"{path}: workloads is {entries!r}; write each as a [[workloads]] table")
        backends = _names(path, table.pop("backends", []))
        made: dict[Workload, tuple[str, ...]] = {}
        for entry in entries:
            names = _names(path, entry.pop("backends", []))
            strangers = sorted(set(names) - set(backends)) if backends else []
            if strangers:
                raise ValueError(f"{path}: a workload is for {', '.join(strangers)}, none of the backends {', '.join(backends)}")
            for workload in workloads_of([entry]):
                both = (*made[workload], *names) if made.get(workload) and names else ()  # a table without names is for all
                made[workload] = names if workload not in made else tuple(dict.fromkeys(both))
        only = {workload.id: names for workload, names in made.items() if names}
        return cls(workloads=tuple(made), backends=backends, only=only, **table)

    @property
    def named(self) -> tuple[str, ...]:
        """Every backend that is named somewhere, once."""
        base = () if self.relative_to is None else (self.relative_to,)
        return tuple(dict.fromkeys(itertools.chain(self.backends, *self.only.values(), base)))

    def runs(self, workload: Workload, backend: str) -> bool:
        return backend in self.only.get(workload.id, (backend,))


def _names(path: Path, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"{path}: backends is {given!r}; it takes a list of names")
    return tuple(given)


def workloads_of(entries: Iterable[Mapping[str, Any]]) -> tuple[Workload, ...]:
    """Every workload once, in order. A value may be a list: the lists of one entry are crossed.

    `tokens` gives the batch, `tokens // length`, and `width` the heads, `width // head_dim`; kv_heads and kv_length are
    heads and length where they are not given.
    """
    made: dict[Workload, None] = {}
    for entry in entries:
        unknown = sorted(entry.keys() - SIZES - DERIVED.keys())
        if unknown:
            raise ValueError(f"a workload has {', '.join(unknown)}; it takes {', '.join(sorted(SIZES | DERIVED.keys()))}")
        empty = [key for key, value in entry.items() if value == []]
        if empty:
            raise ValueError(f"{empty[0]} is an empty list; leave the key out, or give it a value")
        lists = [value if isinstance(value, list) else [value] for value in entry.values()]
        for values in itertools.product(*lists):
            made[_workload(dict(zip(entry, values)))] = None
    return tuple(made)


def _workload(values: dict[str, Any]) -> Workload:
    for key, (size, by) in DERIVED.items():
        if key not in values:
            continue
        if size in values:
            raise ValueError(f"a workload has both {key} and {size}; {key} gives {size}")
        total, divisor = values.pop(key), values.get(by, getattr(Workload, by))
        if type(total) is not int or type(divisor) is not int or min(total, divisor) < 1:
            raise ValueError(f"{key} is {total!r} and {by} {divisor!r}; both take a positive int")
        if total < divisor:
            raise ValueError(f"{key} is {total}, less than one {by} of {divisor}; leave {key} out and give the {size}")
        values[size] = total // divisor
    values.setdefault("kv_heads", values.get("heads", Workload.heads))
    values.setdefault("kv_length", values.get("length", Workload.length))
    return Workload(**values)


QUICK_CPU: Sequence[Mapping[str, Any]] = (
    {"length": [128, 512, 1024], "heads": 2, "causal": True, "device": "cpu"},
    {"length": 512, "heads": 2, "device": "cpu"},
    {"length": [128, 512], "heads": 2, "causal": True, "direction": "backward", "device": "cpu"},
    {"length": 512, "heads": 2, "layout": ["random:1", "random:0.5", "random:0.25"], "block": 64, "device": "cpu"},
)
"""Seconds on a laptop's CPU."""

QUICK_CUDA: Sequence[Mapping[str, Any]] = (
    {
        "tokens": 16384,
        "width": 2048,
        "length": [1024, 4096, 16384],
        "head_dim": [64, 128],
        "causal": [False, True],
        "dtype": "bfloat16",
        "direction": ["forward", "backward"],
        "cache": "cold",
        "device": "cuda",
    },
    {
        "width": 2048,
        "length": 8192,
        "head_dim": 128,
        "dtype": "bfloat16",
        "layout": ["random:1", "random:0.5", "random:0.25", "random:0.125"],
        "direction": ["forward", "backward"],
        "cache": "cold",
        "device": "cuda",
    },
)
"""A minute or two on a data-centre GPU, compilation aside."""
