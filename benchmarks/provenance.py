"""Where and how a result was measured, for the file that holds it: nothing in it is of one machine's folders."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def machine(packages: Iterable[str], output: Path | None) -> dict[str, Any]:
    """The device, the versions of Python and of these packages, the commit and the command."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": sys.version.split()[0],
        "versions": {package: version_of(package) for package in packages},
        "commit": commit(),
        "command": command(output),
    }


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def commit() -> str:
    return os.environ.get("ATTNZOO_COMMIT", "")


def command(output: Path | None) -> str:
    """What this process was started with, but for `--json` and the file it names."""
    words = [word for word in sys.argv[1:] if word not in ("--json", str(output))]
    return " ".join([f"python benchmarks/{Path(sys.argv[0]).name}", *words])
