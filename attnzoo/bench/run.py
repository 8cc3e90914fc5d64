"""The run: every workload on every backend, in turns, each in its process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from attnzoo.bench.matrix import Matrix
from attnzoo.bench.processes import Contestant
from attnzoo.bench.results import Cell, Results
from attnzoo.bench.workload import Workload

__all__ = ["Progress", "contestants", "run"]

Progress = Callable[[str, str, int], None]
"""Called with the workload at hand, the step, and how many cells were finished since the last time."""


@dataclass
class Turn:
    """A contestant that is right on the workload at hand, and its times so far."""

    contestant: Contestant
    first_call: float
    peak: int | None
    rounds: list[float]


def contestants(names: Sequence[str], device: str, timeout: float, note: Callable[[str], None]) -> dict[str, Contestant]:
    """A process for each backend that loads and claims the device; a note for each of the others.

    They start all at once: importing torch takes seconds.
    """
    started = [Contestant(name, timeout=timeout) for name in names]
    for contestant in started:
        contestant.start()
    found = {}
    for contestant in started:
        answer = contestant.ask(do="devices")
        if answer["status"] != "ok":
            reason = answer["detail"]
        elif answer["devices"] and device.partition(":")[0] not in answer["devices"]:
            reason = f"it takes {', '.join(answer['devices'])}, not {device}"
        else:
            found[contestant.name] = contestant
            continue
        note(f"{contestant.name} is left out: {reason}")
        contestant.close()
    return found


def run(matrix: Matrix, contestants: Mapping[str, Contestant], results: Results, progress: Progress) -> None:
    """Run what `results` does not hold yet, adding cells to it a workload at a time; ends the contestants."""
    try:
        for workload in matrix.workloads:
            taking_part = [name for name in contestants if matrix.runs(workload, name)]
            missing = [contestants[name] for name in taking_part if not results.has(workload, name)]
            progress(workload.id, "", len(taking_part) - len(missing))
            if missing:
                results.add(_cells(matrix, workload, missing, progress))
    finally:
        for contestant in contestants.values():
            contestant.close()


def _cells(matrix: Matrix, workload: Workload, contestants: Sequence[Contestant], progress: Progress) -> list[Cell]:
    cost, layout = workload.cost(), workload.block_layout("cpu")
    facts = {"flops": cost.flops, "hbm_bytes": cost.hbm_bytes, "density": 1.0 if layout is None else layout.density}
    cells: dict[str, Cell] = {}
    turns: list[Turn] = []

    def failed(contestant: Contestant, answer: dict[str, str]) -> None:
        cells[contestant.name] = Cell(contestant.name, workload, answer["status"], answer["detail"], **facts)  # type: ignore[arg-type]
        progress(workload.id, "", 1)

    for place in range(0, len(contestants), matrix.side_by_side):
        group = contestants[place : place + matrix.side_by_side]
        for contestant in group:
            progress(workload.id, f"{contestant.name} is checked", 0)
            contestant.send(do="prepare", workload=workload.to_dict(), side_by_side=len(group))
        for contestant in group:
            answer = contestant.answer()
            if answer["status"] == "ok":
                turns.append(Turn(contestant, answer["first_call"], answer["peak"], []))
            else:
                failed(contestant, answer)
    for number in range(matrix.rounds):
        first = number % max(len(turns), 1)
        for turn in turns[first:] + turns[:first]:  # nobody is always the first, on the coolest machine
            progress(workload.id, f"{turn.contestant.name}, round {number + 1} of {matrix.rounds}", 0)
            answer = turn.contestant.ask(do="burst", seconds=matrix.seconds)
            if answer["status"] == "ok":
                turn.rounds.append(statistics.median(answer["times"]))
            else:
                failed(turn.contestant, answer)
        turns = [turn for turn in turns if turn.contestant.name not in cells]
    for turn in turns:
        name = turn.contestant.name
        answer = turn.contestant.ask(do="release")
        if answer["status"] != "ok":
            failed(turn.contestant, answer)
            continue
        cells[name] = Cell(name, workload, "time", "", tuple(turn.rounds), turn.first_call, turn.peak, **facts)  # type: ignore[arg-type]
        progress(workload.id, "", 1)
    return [cells[contestant.name] for contestant in contestants]
