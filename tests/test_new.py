"""The author's path: `attnzoo new`, then what it wrote is built, installed, tried and judged."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from wheels import install, python

from attnzoo.cli import main
from attnzoo.cli.new import render

MOST_LINES = 30


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run `attnzoo new` in an empty folder, with no terminal to ask on; returns the exit code."""

    def run(*arguments: str) -> int:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["attnzoo", "new", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return run


def test_it_writes_a_distribution_and_says_what_is_next(command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("my_kernel", "--defaults") == 0
    printed = capsys.readouterr()
    files = ["README.md", "attnzoo_my_kernel.py", "pyproject.toml", "test_my_kernel.py"]
    assert printed.out.split() == [str(Path("attnzoo-my-kernel", name)) for name in files]
    assert "pip install -e attnzoo-my-kernel && attnzoo check my_kernel" in printed.err
    module = (tmp_path / "attnzoo-my-kernel" / "attnzoo_my_kernel.py").read_text()
    assert "class MyKernel(attnzoo.Backend)" in module
    assert 'name = "my_kernel"' in module


def test_nothing_is_left_to_fill_in_and_little_to_read(tmp_path: Path) -> None:
    render("mine", tmp_path / "new", defaults=True)
    for path in (tmp_path / "new").iterdir():
        assert "{{" not in path.read_text(), path.name
    assert len((tmp_path / "new" / "attnzoo_mine.py").read_text().splitlines()) <= MOST_LINES
    test = (tmp_path / "new" / "test_mine.py").read_text()
    assert len(test.partition("class ")[2].strip().splitlines()) - 1 == 3, "a test of three lines below its class"


@pytest.mark.parametrize("name", ["Mine", "my-kernel", "9lives", "my__kernel", "mine_", "", "../mine", "flash", "auto"])
def test_names_that_no_backend_can_have(command, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert command(name, "--defaults") == 2
    assert "NAME" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(command, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pyproject.toml").write_text("kept")
    assert command("mine", "--defaults", "--directory", "mine") == 2
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["kept"]
    (tmp_path / "empty").mkdir()
    assert command("mine", "--defaults", "--directory", "empty") == 0


def test_without_a_terminal_it_asks_for_defaults(command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("mine") == 2
    assert "--defaults" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_copier_it_says_what_to_install(command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "copier", None)
    assert command("mine", "--defaults") == 2
    assert "pip install 'attnzoo[test]'" in capsys.readouterr().err


# What it wrote


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The files, and the environment in which their wheel is installed."""
    folder = tmp_path_factory.mktemp("attnzoo-mine")
    render("mine", folder, defaults=True)
    return folder, install(folder, tmp_path_factory.mktemp("site") / "site")


def test_its_doctor_is_content(plugin: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    _, environment = plugin
    out = python("-m", "attnzoo", "doctor", "mine", cwd=tmp_path, **environment).stdout
    assert re.search(r"mine +ok", out), out


def test_it_passes_a_sample_of_the_kit(plugin: tuple[Path, dict[str, str]]) -> None:
    """By its own test file, collected in a run of its own."""
    folder, environment = plugin
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--attn-sample", "60", "test_mine.py", "-k", "test_case"]
    out = python(*arguments, cwd=folder, **environment).stdout
    passed = re.search(r"(\d+) passed", out)
    assert passed, out
    assert int(passed[1]) >= 5, f"only {passed[1]} of 60 cases ran\n{out}"
