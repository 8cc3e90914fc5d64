"""Builds a plugin's wheel and installs it into a folder: a separate environment, as far as its plugins go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def python(*arguments: str, cwd: Path, code: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter; AssertionError with all that it printed if it ends with another exit code."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert code is None or done.returncode == code, f"{command} ended with {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}"
    return done


def install(project: Path, site: Path) -> dict[str, str]:
    """Build a project's wheel and install that into `site`; the environment in which it is found, alone."""
    python("-c", "from hatchling.build import build_wheel; build_wheel('dist')", cwd=project)
    (wheel,) = (project / "dist").glob("*.whl")
    python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=project)
    (info,) = site.glob("*.dist-info")
    return {"PYTHONPATH": str(site), "ATTNZOO_PLUGINS": info.name.split("-")[0], "OMP_NUM_THREADS": "1"}
