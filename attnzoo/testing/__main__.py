"""`python -m attnzoo.testing --backend NAME "Problem(...)"`: repeat one failure, as the kit printed it."""

from __future__ import annotations

import argparse
import ast
from typing import Any

import torch

from attnzoo.testing import problem as values
from attnzoo.testing.case import Case, run_case
from attnzoo.testing.checks import CHECKS
from attnzoo.testing.inputs import make_call
from attnzoo.testing.judge import device_name
from attnzoo.testing.subject import Subject

TYPES = {name: getattr(values, name) for name in ("Problem", "Table", "Segments", "Blocks", "Sinks")}


def parse(text: str) -> values.Problem:
    """The problem that a repr stands for; evaluates nothing but these constructors and literals.

    Raises:
        ValueError: it is something else.
    """
    try:
        made = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as error:
        raise ValueError(f"{text!r} is no Problem(...): {error}") from None
    if not isinstance(made, values.Problem):
        raise ValueError(f"{text!r} is a {type(made).__name__}, not a Problem(...)")
    if made.dtype not in values.DTYPES:
        raise ValueError(f"dtype is {made.dtype!r}; it takes {', '.join(values.DTYPES)}")
    return made


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TYPES:
        if node.args:
            raise ValueError(f"{node.func.id} takes its arguments by keyword")
        return TYPES[node.func.id](**{keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg})
    return ast.literal_eval(node)


def main() -> None:
    """Exit code 0 if the backend passed or refused, 1 with the traceback if it failed, 2 for malformed arguments."""
    parser = argparse.ArgumentParser(prog="python -m attnzoo.testing", description=__doc__)
    parser.add_argument("problem", help="as printed: Problem(q_len=5, ...)")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--check", default="accuracy")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if given.check not in CHECKS:
        parser.error(f"--check is {given.check!r}; it takes one of {', '.join(CHECKS)}")
    try:
        problem = parse(given.problem)
        device_name(given.device)
        subject = Subject(given.backend)
    except (ValueError, LookupError) as error:
        parser.error(str(error))
    try:
        subject.spec(make_call(problem, torch.device(given.device)))
    except (ValueError, TypeError, LookupError) as error:
        parser.error(f"no call can be made of {problem}: {type(error).__name__}: {error}")
    outcome = run_case(subject, Case("T00", "repeated", problem, given.check), given.device)
    print(outcome.kind + " without the lse" * outcome.without_lse, *outcome.reasons, sep="\n  ")


if __name__ == "__main__":
    main()
