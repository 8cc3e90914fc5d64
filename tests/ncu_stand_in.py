"""An `ncu` for tests: it knows some metrics, prints the rows it was given as CSV, and records how it was called."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

STAND_IN = """#!{python}
import json, sys
if sys.argv[1] == "--query-metrics":
    print("Device X\\n" + "\\n".join(f"{{name.partition('.')[0]}}   Counter  byte" for name in {known}))
    sys.exit()
open({record}, "a").write(json.dumps(sys.argv[1:]) + "\\n")
print("==PROF== Connected\\nwhat a backend prints")
print({lines})
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, metrics: list[str], rows: list[list[object]]) -> Path:
    """Put it first in PATH; returns the file of its calls, one a line. rows: ID, process, kernel and the values of the metrics."""
    header = ["ID", "Process ID", "Kernel Name", *metrics]
    units = ["", "", "", *["byte"] * len(metrics)]
    lines = "\n".join(",".join(f'"{cell}"' for cell in row) for row in [header, units, *rows])
    record = folder / "calls"
    program = folder / "ncu"
    program.write_text(STAND_IN.format(python=sys.executable, known=metrics, record=repr(str(record)), lines=repr(lines)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return record
