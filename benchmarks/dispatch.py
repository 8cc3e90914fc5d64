"""What `attention()` costs over calling the backend itself with prepared arguments, in microseconds.

    python benchmarks/dispatch.py [--output benchmarks/results/dispatch.json]

The backend is a stand-in that returns a ready tensor at once, so that nothing but attnzoo's own work is timed: the
call through `attnzoo.attention`, through `attnzoo.get(name)`, and straight to the backend's `attend` are timed in
turn, best of five rounds each. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import attnzoo
from attnzoo import registry

CALLS = 20_000
ROUNDS = 5
LIMIT_US = 15.0


class Instant(attnzoo.Backend):
    """Claims what `naive` claims, and returns a tensor made beforehand."""

    name = "instant"
    capabilities = attnzoo.get("naive").capabilities

    def __init__(self, o: Tensor) -> None:
        self.o = o

    def attend(self, spec: attnzoo.AttentionSpec, inputs: attnzoo.AttentionInputs) -> tuple[Tensor, Tensor | None]:
        return self.o, None


def best_us(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=ROUNDS)) / CALLS * 1e6


def measure() -> dict[str, float]:
    q, k, v = (torch.randn(1, 8, 16, 64) for _ in range(3))
    spec = attnzoo.AttentionSpec.of(q, k, v, causal=True)
    inputs = attnzoo.AttentionInputs.of(spec, q, k, v)
    instant = Instant(q)
    registry._default = registry.Registry([instant], preference=("instant",))
    bound = attnzoo.get("instant")
    direct = best_us(lambda: instant.attend(spec, inputs))
    ways: dict[str, Callable[[], object]] = {
        'attention(backend="instant")': lambda: attnzoo.attention(q, k, v, causal=True, backend="instant"),
        "attention()": lambda: attnzoo.attention(q, k, v, causal=True),
        'get("instant")()': lambda: bound(q, k, v, causal=True),
    }
    return {name: round(best_us(call) - direct, 2) for name, call in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    result = {"command": "python benchmarks/dispatch.py", "limit_us": LIMIT_US, **machine, "overhead_us": measure()}
    text = json.dumps(result, indent=2)
    print(text)
    if output:
        output.write_text(text + "\n")


if __name__ == "__main__":
    main()
