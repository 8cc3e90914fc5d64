"""docs/faults.md: every fault has a case or a sentence beside it, and every name in it exists."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

from attnzoo.testing.cases import CASES

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
ROWS = [(int(match[1]), [cell.strip() for cell in match[2].split("|")]) for match in re.finditer(r"^\| (\d+) \|(.+)\|$", TABLE, re.M)]
BEYOND = re.findall(r"^\| (?!what|---)([^|]+) \| ([^|]+) \|$", TABLE.partition("## Kinds beyond the survey")[2], re.M)
# of the survey; its gaps are entries that were dropped there
# fmt: off
ENTRIES = [
    1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26, 27, 29, 30, 31, 33, 34, 35, 37, 38, 39, 41, 42, 43, 45, 46, 47,
    49, 50, 51, 53, 54, 55, 57, 58, 59, 61, 62, 63, 65, 66, 67, 69, 70, 71, 73, 74, 75, 77, 78, 79, 81, 82, 83, 85, 86, 87, 89, 90, 91, 93,
    94, 95, 97, 98, 99, 101, 102, 103, 105, 106, 107, 109, 110, 111, 113, 114, 115, 117, 118, 119, 121, 122, 123, 125, 126, 127, 129, 130,
    131, 133, 134, 135, 137, 138, 139, 141, 142, 143, 145, 146, 147, 149, 150, 151, 153, 154, 155, 157, 158, 159, 161, 162, 163, 165, 166,
    167, 169, 170, 171, 173, 174, 175, 177,
]
# fmt: on
IDS = [case.id for case in CASES]


def test_every_fault_has_a_row() -> None:
    assert [number for number, _ in ROWS] == ENTRIES


@pytest.mark.parametrize(("number", "cells"), ROWS, ids=[str(number) for number, _ in ROWS])
def test_names_exist(number: int, cells: list[str]) -> None:
    reported, wrong, looked_for = cells
    assert reported
    assert wrong
    assert len(looked_for) > 5, f"fault {number} has neither a case nor a sentence"
    assert_named(looked_for)


@pytest.mark.parametrize(("wrong", "looked_for"), BEYOND, ids=[wrong for wrong, _ in BEYOND])
def test_names_of_kinds_beyond_the_survey_exist(wrong: str, looked_for: str) -> None:
    assert "`T" in looked_for, f"no case looks for {wrong}"
    assert_named(looked_for)


def assert_named(looked_for: str) -> None:
    """Every test file and every case that a cell names exists."""
    for name in re.findall(r"`([^`]+)`", looked_for):
        if name.startswith("tests/"):
            assert (ROOT / name).is_file(), f"there is no {name}"
        elif re.match(r"T\d\d-", name):
            assert fnmatch.filter(IDS, name), f"no case is named {name}"


def test_case_ids_are_unique() -> None:
    assert len(set(IDS)) == len(IDS)


def test_there_are_enough_cases() -> None:
    assert len(IDS) >= 1500


def test_every_family_that_a_backend_can_be_held_to_is_there() -> None:
    elsewhere = {"T35", "T36"}  # the test of tests, and benchmarks: not a backend's
    assert {case.family for case in CASES} == {f"T{number:02}" for number in range(1, 37)} - elsewhere
