"""`python -m attnzoo.testing --backend NAME "Problem(...)"`: repeat one failure, as the kit printed it."""

from __future__ import annotations

import argparse
import ast
from typing import Any

from attnzoo.testing import problem as values
from attnzoo.testing.case import Case, run_case
from attnzoo.testing.subject import Subject

TYPES = {name: getattr(values, name) for name in ("Problem", "Table", "Segments", "Blocks", "Sinks")}


def parse(text: str) -> values.Problem:
    """The problem that a repr stands for; evaluates nothing but these constructors and literals."""
    made = _value(ast.parse(text, mode="eval").body)
    if not isinstance(made, values.Problem):
        raise ValueError(f"{text!r} is a {type(made).__name__}, not a Problem(...)")
    return made


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TYPES and not node.args:
        return TYPES[node.func.id](**{keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg})
    return ast.literal_eval(node)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m attnzoo.testing", description=__doc__)
    parser.add_argument("problem", help="as printed: Problem(q_len=5, ...)")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--check", default="accuracy")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    outcome = run_case(Subject(given.backend), Case("T00", "repeated", parse(given.problem), given.check), given.device)
    print(outcome.kind, *outcome.reasons, sep="\n  ")


if __name__ == "__main__":
    main()
