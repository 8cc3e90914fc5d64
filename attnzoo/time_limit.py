"""A time limit for every test of the conformance kit, where pytest-timeout is installed: a hang costs a test, not the run.

pytest-timeout knows the limit of a test. What stops one in a worker of pytest-xdist is a watchdog of faulthandler, which
ends the process: it needs neither the interpreter, which a call into C may hold, nor a lock, and a GPU that is stuck is
freed with the process. xdist starts another worker. Without workers pytest-timeout raises in the test, so that the run
goes on; the watchdog ends it where no handler of a signal runs.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

__all__ = ["StuckWorkers", "TimeLimit"]

SECONDS = {"quick": 900, "deep": 3600}  # a test; in the deep profile one may compile and judge 100 problems
GRACE = 60  # seconds
TIME_IS_UP = re.compile(r"Timeout \((.+)\)!")  # what the watchdog writes, above the stacks


def is_of_kit(node: Any) -> bool:
    """Whether the test is one of `BackendConformance`, which every subclass's are."""
    return "attn_record" in getattr(node, "fixturenames", ())


def is_set_by_user(config: pytest.Config) -> bool:
    """Whether the user gave all tests of the run a limit, or none."""
    return config.getoption("--timeout") is not None or "PYTEST_TIMEOUT" in os.environ or bool(config.getini("timeout"))


class TimeLimit:
    """Sets the limits, where tests are run.

    Args:
        stacks: of a worker: the file that tells its controller where it hung. None without workers.
    """

    def __init__(self, stacks: str | None) -> None:
        self.is_worker = stacks is not None
        self.file = _copy_of_stderr() if stacks is None else os.open(stacks, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if is_set_by_user(config):
            return
        seconds = SECONDS[config.getoption("--attn-profile")]
        for item in items:
            if is_of_kit(item) and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(seconds))

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """True ends the search for a timer; None leaves it to pytest-timeout as well."""
        if not is_of_kit(item) or self.file is None:
            return None
        seconds = settings.timeout if self.is_worker else settings.timeout + GRACE
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.file)
        return True if self.is_worker else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_cancel_timer(self, item: Any) -> None:
        if is_of_kit(item):
            faulthandler.cancel_dump_traceback_later()


class StuckWorkers:
    """Says of a worker that the watchdog ended what happened, and where, in the controller of pytest-xdist."""

    def __init__(self) -> None:
        self.folder: Any = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        from tempfile import TemporaryDirectory

        self.folder = self.folder or TemporaryDirectory(prefix="attnzoo-")
        node.workerinput["attn_stacks"] = str(Path(self.folder.name, node.gateway.id))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: Any) -> None:
        stacks = Path(report.node.workerinput["attn_stacks"])
        text = stacks.read_text(encoding="utf-8", errors="replace") if stacks.exists() else ""
        up = TIME_IS_UP.match(text)
        if up:
            said = f"no end within {up[1]}, so it was stopped, and its worker with it; --timeout SECONDS sets another limit"
            report.longrepr = f"{said}\n{report.longrepr}\n{text}"

    def pytest_unconfigure(self) -> None:
        if self.folder is not None:
            self.folder.cleanup()


def _copy_of_stderr() -> int | None:
    """While a test runs, what is written to stderr is kept back, and is lost with the process."""
    try:
        return os.dup(sys.__stderr__.fileno())  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):
        return None
