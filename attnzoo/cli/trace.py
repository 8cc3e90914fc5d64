"""`attnzoo trace`: FlashAttention on 8 tokens, a table a tile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnzoo.cli.output import Format, FormatOption, Section, show, terminal_width

if TYPE_CHECKING:
    from torch import Tensor

    from attnzoo.walkthrough import Step, Walk

WIDE = 116
"""Columns that a row of four decimals takes; of two, 80 are enough."""


def trace(
    causal: Annotated[bool, typer.Option("--causal", help="Query i sees key j only if j <= i.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of q, k and v.")] = 2,  # one whose running maximum rises
    form: FormatOption = Format.TABLE,
) -> None:
    """Walk through FlashAttention: 8 tokens, d = 4, tiles of 4 x 4, every step of `tiled`'s own recurrence.

    m is the row's running maximum, l its running sum of exp(score - m); rescale = exp(old m - new m) is what the old
    sum and accumulator are multiplied by. The last table sets the result beside standard attention's.
    """
    from attnzoo.walkthrough import walk

    walked = walk(causal=causal, seed=seed)
    show(_data(walked), sections(walked, terminal_width()), form)


def sections(walked: Walk, width: int) -> list[Section]:
    """A table a tile and one of the end, of a row a line on a terminal of 80 columns or more."""
    digits = 4 if width >= WIDE else 2
    return [*(_section(number, step, len(walked.steps), digits) for number, step in enumerate(walked.steps, 1)), _end(walked, digits)]


def _section(number: int, step: Step, count: int, digits: int) -> Section:
    title = f"tile {number} of {count}: queries {_span(step.queries)}, keys {_span(step.keys)}"
    columns = ("row", "scores of the tile", "m", "l", "rescale" if digits > 2 else "re-\nscale", "output so far")
    rows = []
    for place, query in enumerate(step.queries):
        rescale = "first" if step.rescale is None else _number(step.rescale[place], digits)
        state = (_number(step.m[place], digits), _number(step.l[place], digits), rescale)
        rows.append((str(query), _numbers(step.scores[place], digits), *state, _numbers(step.output[place], digits)))
    return Section(title, columns, rows)


def _end(walked: Walk, digits: int) -> Section:
    skipped = f"\n{walked.skipped} tile that no query can see was skipped" if walked.skipped else ""
    title = f"by tiles and by standard attention: they differ by at most {walked.difference:.1e}{skipped}"
    rows = [
        (str(query), _numbers(row, digits), _numbers(standard, digits), f"{float((row - standard).abs().max()):.1e}")
        for query, (row, standard) in enumerate(zip(walked.output, walked.standard))
    ]
    return Section(title, ("row", "by tiles", "standard", "difference"), rows)


def _span(indices: range) -> str:
    return f"{indices[0]} to {indices[-1]}"


def _number(value: Tensor, digits: int) -> str:
    return f"{float(value):.{digits}f}"


def _numbers(values: Tensor, digits: int) -> str:
    return " ".join(f"{float(value):{digits + 3}.{digits}f}" for value in values)


def _data(walked: Walk) -> dict[str, Any]:
    """Plain numbers; a score of -inf is None, which JSON can hold."""
    steps = [
        {
            "queries": list(step.queries),
            "keys": list(step.keys),
            "scores": [[None if value == float("-inf") else value for value in row] for row in step.scores.tolist()],
            "m": step.m.tolist(),
            "l": step.l.tolist(),
            "rescale": None if step.rescale is None else step.rescale.tolist(),
            "output": step.output.tolist(),
        }
        for step in walked.steps
    ]
    return {
        "steps": steps,
        "skipped": walked.skipped,
        "output": walked.output.tolist(),
        "standard": walked.standard.tolist(),
        "difference": walked.difference,
    }
