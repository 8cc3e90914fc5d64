"""A pytest plugin, `-p attnzoo.testing.recorder --attn-record FILE`: one line of JSON for every test that ended, and a last one.

Reports of all xdist workers arrive in the process that writes, also the report of a test that its worker did not survive.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from attnzoo.testing.journal import THE_END, last_of

__all__ = ["Recorder", "line_of"]

DEATH = re.compile(r"^worker '(\w+)' crashed", re.M)
OWN_ERROR = re.compile(r"^attnzoo\.testing\.failure\.\w+: (?=.)")
REPEAT = re.compile(r"^[E ]*repeat: (python -m attnzoo\.testing .*|pytest .*)$", re.M)
NOTED = ("test_case", "test_random_problems")  # those that leave in the journal what they are about to judge
KEPT = ("name", "dtype", "has_backward", "without_lse", "claimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--attn-record", metavar="FILE", help="write a line of JSON for every test of the conformance kit")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--attn-record")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(path)), "attnzoo-recorder")


class Recorder:
    """Appends to a file as tests end, so that an interrupted run leaves what it found."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not is_recorded(report):
            return
        self._append(line_of(report))

    def pytest_sessionfinish(self) -> None:
        self._append(THE_END)

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def is_recorded(report: pytest.TestReport) -> bool:
    """Whether a test ended so; its set-up and clean-up count only if they failed."""
    return report.when == "call" or report.failed


def line_of(report: pytest.TestReport) -> dict[str, Any]:
    """What a certificate needs to know of a test that ended.

    Returns:
        `test` and `parameters`: the function, and what stands in the brackets of its id.
        `name`: the case or chunk; missing where the test did not come so far.
        `kind`: "passed", "forward only", "refused", "not applicable", "failed" or "known failure".
        `dtype`: in which a case was asked.
        `has_backward`, `without_lse`, `claimed`: of a case, as of `attnzoo.testing.verdict.Entry`.
        `reasons`: of a refusal, of what is not applicable, of a known failure.
        `error`, `repeat`: of a failure; the first line of its message and the command that repeats it, if it has one.
    """
    test, _, parameters = report.nodeid.rpartition("::")[2].partition("[")
    record = dict(report.user_properties).get("attnzoo")
    found = record if isinstance(record, dict) else {"kind": "not applicable" if report.skipped else "passed", "reasons": []}
    kind, reasons = found["kind"], found["reasons"]
    if report.failed:
        kind, reasons = "failed", []
    elif hasattr(report, "wasxfail"):
        kind, reasons = "known failure", [report.wasxfail]
    line = {"test": test, "parameters": parameters.removesuffix("]"), "kind": kind, "reasons": list(reasons)}
    line |= {name: found[name] for name in KEPT if name in found}
    return {**line, **_failure(report, test)} if report.failed else line


def _failure(report: pytest.TestReport, test: str) -> dict[str, str]:
    crash = getattr(report.longrepr, "reprcrash", None)  # a worker that died leaves plain text
    message = str(crash.message if crash else report.longrepr).strip() or "failed without a message"
    commands = REPEAT.findall(report.longreprtext)
    died = DEATH.search(message)
    left = last_of(died[1]) if died and test in NOTED else ""
    return {"error": OWN_ERROR.sub("", message.splitlines()[0]), "repeat": commands[-1] if commands else left}
