"""End to end: training steps of whole models and loss curves, for each attention.

    python benchmarks/end_to_end/run.py --device cuda --compile 12          fills the compilers' caches first
    python benchmarks/end_to_end/run.py --device cuda --output results.json
    python benchmarks/end_to_end/run.py --device cpu --small --output results.json

Results are written as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import curves
import steps
import torch

from attnzoo.bench.machine import describe

PARTS = ("curves", "steps")


def main() -> None:
    asked = arguments()
    rows = steps.SMALL if asked.small else steps.FULL
    if asked.compile:
        for line in steps.compile_all(rows, asked.device, tuple(asked.attention), asked.compile):
            print(line, flush=True)
        return
    started = time.monotonic()
    results: dict[str, Any] = {"machine": describe(asked.device), "steps": [], "curves": []}
    runs = {
        "curves": lambda: curves.train(curves.SMALL if asked.small else curves.FULL[asked.device], asked.device),
        "steps": lambda: steps.measure(rows, asked.device, tuple(asked.attention)),
    }
    for part in asked.parts:
        for found in runs[part]():
            results[part].append(found)
            print({name: value for name, value in found.items() if name != "losses"}, flush=True)
            draft = asked.output.with_name(asked.output.name + ".part")
            draft.write_text(json.dumps(results, indent=1))
            os.replace(draft, asked.output)
            if time.monotonic() - started > asked.seconds:
                return


def arguments() -> argparse.Namespace:
    """What was asked for; a name that there isn't, and a place that there isn't, are errors before anything runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="tiny models, seconds on a CPU")
    parser.add_argument("--attention", action="append", default=[], help="these alone, of the steps; may be repeated")
    parser.add_argument("--parts", default=",".join(PARTS), help="curves, steps or both, with a comma")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after so many")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--compile", type=int, metavar="PROCESSES", help="compile what the steps need, in so many processes, and end")
    asked = parser.parse_args()
    asked.parts = asked.parts.split(",")
    known = dict.fromkeys(name for _, name in steps.asked_for(steps.SMALL if asked.small else steps.FULL, ()))
    for option, given, allowed in (("--parts", asked.parts, PARTS), ("--attention", asked.attention, known)):
        strangers = [name for name in given if name not in allowed]
        if strangers:
            parser.error(f"{option} has {', '.join(strangers)}; it takes {', '.join(allowed)}")
    if asked.output is None and not asked.compile:
        parser.error("--output is missing")
    if asked.output is not None and not asked.output.parent.is_dir():
        parser.error(f"--output is {asked.output}, and {asked.output.parent} is no folder")
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, and torch sees no CUDA device here")
    return asked


if __name__ == "__main__":
    main()
