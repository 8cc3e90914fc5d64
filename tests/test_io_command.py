"""`attnzoo io`: calls that our kernels don't take have an account of the others; sizes of zero are sizes."""

from __future__ import annotations

import json
import sys

import pytest

from attnzoo.cli import main


@pytest.fixture
def io(capsys, monkeypatch):
    """The command in this process: its exit code, data and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["attnzoo", "io", *arguments, "--format", "json"])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), json.loads(captured.out or "{}"), captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(("--q", "1,2,8,512"), "head_dim is 512, our kernels take at most 256"), (("--dtype", "float64"), "dtype is float64")],
)
def test_a_call_that_our_kernels_do_not_take(io, arguments, reason):
    code, accounts, err = io(*arguments)
    assert code == 0, err
    assert list(accounts) == ["standard attention", "with mask and dropout as steps", "the paper's, 256 keys a block"], list(accounts)
    assert f"note: nothing of ours: {reason}" in err, err


@pytest.mark.parametrize("dim", ["1", "256"])
def test_the_narrowest_and_the_widest_head_dims_have_tiles(io, dim):
    for card in ("8.0", "8.9", "9.0"):
        code, accounts, err = io("--q", f"1,2,8,{dim}", "--card", card)
        assert code == 0, err
        assert f"ours on {card}" in accounts


def test_zero_is_a_length_and_no_number_of_heads(io):
    code, accounts, err = io("--q", "1,2,8,64", "--kv-len", "0")
    assert code == 0, err
    assert {account["flops"] for account in accounts.values()} == {0}, accounts
    assert io("--q", "1,2,8,64", "--kv-heads", "0")[0] == 2


def test_a_density_of_no_layout_is_refused(io):
    code, _, err = io("--density", "0.5")
    assert code == 2, err
    assert "density is 0.5, the share of a layout's blocks, and there is no --layout" in err, err
    halves = [io("--layout", "128,128", *density)[1] for density in ((), ("--density", "0.5"))]
    moved = [account["ours on 9.0"]["steps"][0]["read"] for account in halves]
    assert moved[1] < moved[0], "half of the blocks"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [((), True), (("--causal",), False), (("--kv-heads", "2"), False), (("--layout", "128,128"), False), (("--q", "64,16,1024,64"), False)],
    ids=str,
)
def test_the_papers_table_stands_beside_the_papers_call_alone(capsys, monkeypatch, arguments, shown):
    monkeypatch.setattr(sys, "argv", ["attnzoo", "io", *arguments, "--format", "md"])
    with pytest.raises(SystemExit):
        main()
    assert ("the paper's table" in capsys.readouterr().out) == shown


def test_a_small_call_moves_more_than_nothing(capsys, monkeypatch):
    """To three decimals of a GB it would read 0.000."""
    monkeypatch.setattr(sys, "argv", ["attnzoo", "io", "--q", "1,1,8,8", "--grad", "none", "--format", "md"])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().out
    assert "| S = Q K^T |  | 2.56e-07 | 1.28e-07 |" in shown, shown
    assert "| standard attention | 2.05e-06 |" in shown, shown
    assert "0.000" not in shown, shown
