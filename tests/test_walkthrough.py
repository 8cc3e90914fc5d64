"""The walk-through: it is tiled's own recurrence, its numbers can be checked by hand, and it ends at standard attention."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from attnzoo.backends.tiled import Tiled
from attnzoo.cli.trace import sections
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec
from attnzoo.tables import rich_table
from attnzoo.walkthrough import SIZES, walk


@pytest.mark.parametrize("causal", [False, True])
def test_it_gives_what_tiled_gives_bit_for_bit(causal):
    q, k, v = torch.randn(3, 1, 1, 8, 4, generator=torch.Generator().manual_seed(5))
    spec = AttentionSpec.of(q, k, v, causal=causal)
    expected, _ = Tiled(SIZES).attend(spec, AttentionInputs.of(spec, q, k, v))
    walked = walk(causal=causal, seed=5)
    assert torch.equal(walked.output, expected[0, 0]), f"the walk gives {walked.output}, tiled {expected[0, 0]}"
    assert walked.difference < 1e-6, f"by tiles and by standard attention differ by {walked.difference}"


def test_causal_skips_the_tile_above_the_diagonal():
    walked = walk(causal=True)
    tiles = [(step.queries, step.keys) for step in walked.steps]
    assert tiles == [(range(4), range(4)), (range(4, 8), range(4)), (range(4, 8), range(4, 8))]
    assert walked.skipped == 1, f"{walked.skipped} tiles were skipped"


def test_the_numbers_of_a_step_follow_from_the_one_before():
    first, second = walk().steps[:2]
    assert torch.equal(first.m, first.scores.amax(-1)), "m of the first tile is the largest score"
    assert first.rescale is None, "nothing comes before the first tile"
    assert torch.equal(second.m, torch.maximum(first.m, second.scores.amax(-1))), "m is a running maximum"
    assert second.rescale is not None
    torch.testing.assert_close(second.rescale, torch.exp(first.m - second.m))
    torch.testing.assert_close(second.l, first.l * second.rescale + torch.exp(second.scores - second.m[:, None]).sum(-1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [80, 116, 160])
@pytest.mark.parametrize("seed", range(5))
def test_a_row_is_a_line_from_80_columns_on(width, causal, seed):
    for section in sections(walk(causal=causal, seed=seed), width):
        out = io.StringIO()
        Console(file=out, width=width).print(rich_table(section.columns, section.rows))
        lines = out.getvalue().splitlines()
        head = max(column.count("\n") + 1 for column in section.columns)
        assert len(lines) == head + 1 + len(section.rows), out.getvalue()
        assert all(len(line) <= width for line in section.title.splitlines()), section.title
