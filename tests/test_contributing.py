"""The plugin that CONTRIBUTING.md shows is the one that `attnzoo new mine --defaults` writes, which tests/test_new.py judges."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnzoo.cli.new import render

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("attnzoo-mine")
    render("mine", folder, defaults=True)
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_files_are_those_of_the_template(rendered: dict[str, str]) -> None:
    shown = dict(re.findall(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", PAGE, re.M | re.S))
    assert shown == {name: text for name, text in rendered.items() if name != "README.md"}


def test_file_tree_shows_every_file(rendered: dict[str, str]) -> None:
    tree = re.search(r"^attnzoo-mine/\n(.*?)^```$", PAGE, re.M | re.S)
    assert tree, "CONTRIBUTING.md shows no file tree"
    assert set(re.findall(r"─ (\S+)", tree[1])) == rendered.keys()


def test_commands_are_three() -> None:
    commands = re.search(r"^## A plugin, whole\n\n```sh\n(.*?)^```$", PAGE, re.M | re.S)
    assert commands, "CONTRIBUTING.md does not open with the commands"
    lines = [line.partition("#")[0].strip() for line in commands[1].splitlines()]
    assert lines == ["attnzoo new mine --defaults", "pip install -e attnzoo-mine", "attnzoo check mine"]
