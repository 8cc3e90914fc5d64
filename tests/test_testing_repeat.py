"""`python -m attnzoo.testing`: a failure repeated from its line; bad arguments are told without a traceback."""

from __future__ import annotations

import sys

import pytest

from attnzoo.testing.__main__ import main, parse
from attnzoo.testing.cases import CASES


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["attnzoo.testing", *arguments])
    main()


@pytest.mark.parametrize("case", CASES[::150], ids=lambda case: case.id)
def test_every_problem_is_read_as_it_is_printed(case) -> None:
    assert parse(repr(case.problem)) == case.problem


def test_a_problem_is_judged_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "--backend", "naive", "Problem(q_len=4)")
    assert capsys.readouterr().out == "passed\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backend", "nope", "Problem()"], "no backend is named 'nope'"),
        (["--backend", "naive", "--check", "acuracy", "Problem()"], "--check is 'acuracy'; it takes one of accuracy, "),
        (["--backend", "naive", "--device", "abacus", "Problem()"], "device is 'abacus'"),
        (["--backend", "naive", "--device", "cuda:99", "Problem()"], "CUDA devices"),
        (["--backend", "naive", "Problem(q_lem=3)"], "unexpected keyword argument 'q_lem'"),
        (["--backend", "naive", "Problem("], "is no Problem(...)"),
        (["--backend", "naive", "Table()"], "is a Table, not a Problem(...)"),
        (["--backend", "naive", "Problem(mask=Table('all'))"], "Table takes its arguments by keyword"),
        (["--backend", "naive", "Problem(mask=Table(kind='al'))"], "no call can be made of Problem(mask=Table(kind='al')): KeyError: 'al'"),
        (["--backend", "naive", "Problem(dtype='int8')"], "dtype is 'int8'; it takes float16"),
        (["--backend", "naive", "Problem(q_heads=3, kv_heads=2)"], "k has 2 heads, not a divisor of the 3 heads of q"),
        (["--backend", "naive", "__import__('os').getcwd()"], "is no Problem(...)"),
    ],
)
def test_bad_arguments_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
