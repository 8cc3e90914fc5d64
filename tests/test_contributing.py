"""The plugin that CONTRIBUTING.md shows: written out as printed there, built, installed and judged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def python(*arguments: str, cwd: Path, **environment: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, and in `site` the distribution that they make."""
    folder = tmp_path_factory.mktemp("attnzoo-mine")
    files = dict(re.findall(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", PAGE.read_text(), re.M | re.S))
    assert files.keys() == {"pyproject.toml", "attnzoo_mine.py", "test_mine.py"}
    for name, text in files.items():
        (folder / name).write_text(text)
    python("-c", "from hatchling.build import build_wheel; build_wheel('.')", cwd=folder)
    wheel = next(folder.glob("*.whl"))
    python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", "site", wheel.name, cwd=folder)
    return folder


def test_file_tree_shows_every_file(plugin: Path) -> None:
    tree = re.search(r"^attnzoo-mine/\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert tree, "CONTRIBUTING.md does not open with a file tree"
    assert set(re.findall(r"─ (\S+)", tree[1])) == {"pyproject.toml", "attnzoo_mine.py", "test_mine.py"}


def test_its_doctor_is_content(plugin: Path) -> None:
    out = python("-m", "attnzoo", "doctor", "mine", cwd=plugin, PYTHONPATH="site", ATTNZOO_PLUGINS="attnzoo-mine")
    assert re.search(r"mine +ok", out), out


def test_it_passes_a_sample_of_the_kit(plugin: Path) -> None:
    """By its own test file, collected in a run of its own."""
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--attn-sample", "60", "test_mine.py", "-k", "test_case"]
    out = python(*arguments, cwd=plugin, PYTHONPATH="site", ATTNZOO_PLUGINS="attnzoo-mine")
    passed = re.search(r"(\d+) passed", out)
    assert passed, out
    assert int(passed[1]) >= 5, f"only {passed[1]} of 60 cases ran\n{out}"
