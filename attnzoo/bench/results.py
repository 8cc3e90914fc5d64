"""Results: cells and the machine they come from, written as they come, read again to resume, compare and draw. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from attnzoo.bench.workload import Workload

__all__ = ["STATUSES", "Cell", "Results"]

FORMAT = 1
STATUSES = ("time", "unsupported", "out of memory", "wrong", "error")


@dataclass(frozen=True)
class Cell:
    """One backend on one workload.

    Attributes:
        status: one of STATUSES; only a "time" has numbers.
        detail: the reason of any other status.
        rounds: the median time of each round, ms.
        first_call: seconds of the very first call, compilation included.
        peak: bytes that torch allocates for forward, and backward where it is timed, at their highest.
        flops, hbm_bytes: useful FLOPs and compulsory bytes of the workload, predicted.
        density: share of the layout's blocks that exist; 1 without a layout.
        run: 0 for the run that began the file, n for the nth that resumed it.
    """

    backend: str
    workload: Workload
    status: str
    detail: str = ""
    rounds: tuple[float, ...] = ()
    first_call: float | None = None
    peak: int | None = None
    flops: int = 0
    hbm_bytes: int = 0
    density: float = 1.0
    run: int = 0

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"a cell's status is {self.status!r}; it is one of {', '.join(STATUSES)}")
        if (self.status == "time") != bool(self.rounds) or not all(time > 0 for time in self.rounds):
            raise ValueError(f"a cell is {self.status!r} and its rounds are {self.rounds}; those of a time are positive, others have none")

    @property
    def key(self) -> tuple[str, str]:
        return self.workload.id, self.backend

    @property
    def median(self) -> float:
        """ms, over the rounds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Half the distance between the fastest and the slowest round, as a share of the median."""
        return (max(self.rounds) - min(self.rounds)) / 2 / self.median

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s."""
        return self.flops / self.median / 1e9

    @property
    def bandwidth(self) -> float:
        """Compulsory bytes a second, GB/s."""
        return self.hbm_bytes / self.median / 1e6

    def command(self, settings: Mapping[str, Any]) -> str:
        """A command line that repeats this cell alone, as it was timed: settings: of its `Results`."""
        timed = [f"--{name} {settings[name]}" for name in ("rounds", "seconds") if name in settings]
        return " ".join(["attnzoo bench", "--backend", self.backend, *self.workload.options(), *timed])

    def to_dict(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        derived = {}
        if self.status == "time":
            names = ("median", "spread", "tflops", "bandwidth")
            derived = {name: float(f"{getattr(self, name):.5g}") for name in names}
        return {"id": self.workload.id, **asdict(self), **derived, "command": self.command(settings)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cell:
        kept = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        return cls(**{**kept, "workload": Workload(**data["workload"]), "rounds": tuple(data["rounds"])})


@dataclass
class Results:
    """A benchmark's cells so far.

    Attributes:
        machine: as `machine.describe` gives it.
        settings: rounds, seconds a turn, the backend that speed is relative to.
        path: where `add` writes the whole at once; None keeps it in memory.
        resumed: the machine of each later run that went on with them, with its own start, clocks and ceilings.
    """

    machine: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    path: Path | None = None
    resumed: list[dict[str, Any]] = field(default_factory=list)
    _written: tuple[int, ...] | None = field(default=None, init=False, compare=False)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Raises ValueError for a file that is not such results."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']}, this attnzoo reads {FORMAT}")
            for name, kind in (("machine", dict), ("settings", dict), ("cells", list), ("resumed", list)):
                if not isinstance(data.get(name, []), kind):
                    raise ValueError(f"its {name} is no {kind.__name__}")
            resumed = data.get("resumed", [])
            for machine in (data["machine"], *resumed):
                _require_machine(machine)
            cells = [Cell.from_dict(cell) for cell in data["cells"]]
            unknown = {cell.run for cell in cells} - set(range(len(resumed) + 1))
            if unknown:
                raise ValueError(f"its cells are of runs {sorted(unknown, key=str)}, and it was resumed {len(resumed)} times")
            results = cls(data["machine"], data["settings"], cells, path, list(resumed))
            results._written = _state(path)
            return results
        except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no results of attnzoo bench: {type(error).__name__}: {error}") from None

    def resume(self, machine: dict[str, Any]) -> None:
        """Further cells are of a new run; raises ValueError unless it is on such a machine, with the same versions."""
        found = self.differences(machine, ("name", "device", "versions", "commit"))
        if found:
            raise ValueError(f"{self.path} holds results of {found[0]}")
        self.resumed.append(machine)

    def require_same_settings(self, **settings: Any) -> None:
        """Raise ValueError where a setting was another: one line describes all cells."""
        for name, value in settings.items():
            kept = self.settings.get(name, value)
            if kept != value:
                raise ValueError(f"{self.path} holds results with {name} {kept}, here {value}: --{name} {kept} goes on with it")

    def differences(self, machine: Mapping[str, Any], names: Sequence[str]) -> list[str]:
        """What is another here than on that machine, in words."""
        pairs = {name: (self.machine.get(name), machine.get(name)) for name in names}
        return [_difference(name, ours, theirs) for name, (ours, theirs) in pairs.items() if ours != theirs]

    def add(self, cells: Iterable[Cell]) -> None:
        """Keep finished cells, and write the file anew: killed at any moment, it is the one before or the one after.

        Raises:
            OSError: it can't be written.
            ValueError: another process wrote it since, whose cells would be lost.
        """
        self.cells += [replace(cell, run=len(self.resumed)) for cell in cells]
        if self.path is None:
            return
        if self._written is None:
            with contextlib.suppress(FileExistsError):  # of two that start at one time, one makes it
                self.path.open("x").close()
                self._written = _state(self.path)
        if _state(self.path) != self._written:
            raise ValueError(f"{self.path} was written by another process; these results are not added to it")
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        draft.write_text(self.to_json(), encoding="utf-8")
        os.replace(draft, self.path)
        self._written = _state(self.path)

    def claim(self) -> None:
        """Write the file before there is a cell: another run sees it, and one that could not be written is known at once."""
        self.add(())

    def drop_claim(self) -> None:
        """Remove a file that got no cell."""
        if self.path is not None and not self.cells and self._written is not None and _state(self.path) == self._written:
            self.path.unlink()

    def to_dict(self) -> dict[str, Any]:
        resumed = self.resumed[: max((cell.run for cell in self.cells), default=0)]  # a run that added nothing is none
        cells = [cell.to_dict(self.settings) for cell in self.cells]
        return {"format": FORMAT, "machine": self.machine, "settings": self.settings, "resumed": resumed, "cells": cells}

    def to_json(self) -> str:
        """One line a cell."""
        data = self.to_dict()
        head = {name: data[name] for name in data if name != "cells"}
        lines = ",\n".join(json.dumps(cell) for cell in data["cells"])
        return json.dumps(head, indent=1)[:-2] + ',\n "cells": [\n' + lines + "\n]}\n"

    def has(self, workload: Workload, backend: str) -> bool:
        return (workload.id, backend) in {cell.key for cell in self.cells}

    def families(self) -> dict[str, list[Cell]]:
        """Cells by the family of their workload, in the order in which they came."""
        made: dict[str, list[Cell]] = {}
        for cell in self.cells:
            made.setdefault(cell.workload.family, []).append(cell)
        return made

    def base(self, cell: Cell) -> Cell | None:
        """The time of the backend that speed is relative to, on that cell's workload."""
        name = self.settings.get("relative_to")
        return next((c for c in self.cells if c.workload == cell.workload and c.backend == name and c.status == "time"), None)

    def relative(self, cell: Cell) -> float | None:
        """How much faster a cell is than the chosen backend on that workload: the median of the rounds' ratios, since
        those of one round ran side by side, or in two runs the ratio of the medians; None where that backend has no time."""
        other = self.base(cell)
        if other is None or cell.status != "time":
            return None
        if other.run != cell.run:
            return other.median / cell.median
        pairs: Sequence[tuple[float, float]] = list(zip(other.rounds, cell.rounds))
        return statistics.median(theirs / ours for theirs, ours in pairs)


def _difference(name: str, ours: Any, theirs: Any) -> str:
    """In words; of two dicts, what differs between them."""
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return f"another {name}: {ours}, here {theirs}"
    pairs = {key: (ours.get(key, "none"), theirs.get(key, "none")) for key in ours | theirs}
    return f"other {name}: " + "; ".join(f"{key} {one}, here {other}" for key, (one, other) in pairs.items() if one != other)


def _require_machine(machine: Any) -> None:
    if not isinstance(machine, dict):
        raise ValueError(f"a machine of it is {machine!r}")
    for name, kinds in (("versions", (str,)), ("ceilings", (int, float))):
        found = machine.get(name, {})
        if not isinstance(found, dict) or not all(isinstance(value, kinds) for value in found.values()):
            raise ValueError(f"its machine's {name} are {found!r}")


def _state(path: Path) -> tuple[int, ...] | None:
    """What changes when a file is replaced; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
