"""The support table: what it shows of certificates, and that the pages agree with the committed ones."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from attnzoo.cli import main
from attnzoo.cli.support import fill, matrix, ordered, support_section
from attnzoo.testing.certificate import KINDS, ROOTED_PATH, Certificate, Run

ROOT = Path(__file__).parents[1]
COMMITTED = sorted((ROOT / "docs" / "certificates").glob("*.json"))
PAGES = ("README.md", "docs/support.md")
MARKED = "# Mine\n\n<!-- support:begin -->\nold\n<!-- support:end -->\n\nkept\n"


def counts(**given: int) -> dict[str, int]:
    return {kind: given.get(kind.replace(" ", "_"), 0) for kind in KINDS}


def feature(verdict: str) -> dict[str, Any]:
    return {"verdict": verdict, **counts()}


def certificate(backend: str = "mine", **changes: Any) -> Certificate:
    made = Certificate(
        backend=backend,
        verdict="pass",
        distribution={"name": "attnzoo-mine", "version": "1.0"},
        versions={"torch": "2.13.0"},
        run=Run("cpu", "x86_64", "quick", "0:10"),
        suite={"cases": 3, "digest": "abc"},
        counts=counts(passed=2, refused=1),
        random=counts(passed=10),
        families={},
        dtypes={"float32": counts(passed=2), "float16": counts(refused=1)},
        features={
            "causal": {"forward": feature("pass"), "backward": feature("refused")},
            "lse": {"forward": feature("refused"), "backward": feature("refused")},
        },
        refusals={"a | b": 1},
        not_applicable={},
        known_failures={},
        failures=[],
    )
    return dataclasses.replace(made, **changes)


def test_matrix_says_pass_refused_and_failed() -> None:
    worse = certificate("worse", verdict="FAILED", features={"causal": {"backward": feature("FAILED")}}, random=counts(failed=1, passed=9))
    rows = matrix([certificate(), worse])
    assert rows["causal"] == {"mine (cpu)": "pass / refused", "worse (cpu)": "FAILED"}
    assert rows["lse"] == {"mine (cpu)": "refused", "worse (cpu)": "not tested"}
    assert rows["float16"]["mine (cpu)"] == "refused"
    assert rows["random problems"] == {"mine (cpu)": "pass", "worse (cpu)": "FAILED"}
    assert rows["everything"] == {"mine (cpu)": "pass", "worse (cpu)": "FAILED"}


def test_a_part_of_the_suite_is_called_one() -> None:
    part = certificate(run=Run("cuda:1", "a card", "quick", "0:1", ("float16",), 20))
    assert part.title == "mine (cuda) sample of 20 float16"


def test_cases_judged_without_their_lse_are_shown_where_there_are_any() -> None:
    assert "without the lse" not in support_section([certificate()])
    rows = support_section([certificate(), certificate("wrapper", without_lse=2)]).splitlines()
    assert "| of these, without the lse | 0 | 2 |" in rows
    page = fill("<!-- certificates:begin -->\n<!-- certificates:end -->", [certificate(without_lse=2)], "it")
    assert "; 2 of them judged without the lse." in page


def test_two_certificates_of_one_backend_and_device_are_refused() -> None:
    with pytest.raises(ValueError, match=r"several certificates of mine \(cpu\)"):
        ordered([certificate(), certificate(verdict="FAILED")])


def test_page_is_filled_between_its_marks_again_and_again() -> None:
    page = fill(MARKED, [certificate()], "README.md")
    assert "| causal | pass / refused |" in page
    assert "old" not in page
    assert page.startswith("# Mine\n\n<!-- support:begin -->\n\nOn cpu (x86_64):\n\n| feature")
    assert page.endswith("<!-- support:end -->\n\nkept\n")
    assert fill(page, [certificate()], "README.md") == page


def test_each_kind_of_device_has_its_table() -> None:
    card = Run("cuda", "a card", "quick", "0:10")
    text = support_section(ordered([certificate(run=card), certificate(), certificate("other", run=card)]))
    assert "On cpu (x86_64):\n\n| feature | mine (cpu) |" in text
    assert "On cuda (a card):\n\n| feature | mine (cuda) | other (cuda) |" in text


def test_page_holds_reasons_and_failures_where_it_asks_for_them() -> None:
    page = "<!-- certificates:begin -->\n<!-- certificates:end -->\n"
    failure = {"case": "T06-x", "error": "off by one", "repeat": "python -m attnzoo.testing --backend mine"}
    text = fill(page, [certificate(verdict="FAILED", failures=[failure], known_failures={"T07-y": "it rounds"})], "a page")
    for part in ("### mine (cpu): FAILED", "attnzoo-mine 1.0 on x86_64, with torch 2.13.0", "| a \\| b | 1 |", "off by one", "it rounds"):
        assert part in text, part


def test_page_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"README\.md has no section to fill"):
        fill("# Mine\n", [certificate()], "README.md")


def test_certificates_of_different_suites_are_told() -> None:
    assert "different versions" in support_section([certificate(), certificate("other", suite={"cases": 4, "digest": "def"})])
    assert "different versions" not in support_section([certificate(), certificate("other")])


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["attnzoo", "support", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_command_prints_and_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.json").write_text(certificate().to_json())
    Path("page.md").write_text(MARKED)
    assert command(monkeypatch, "c.json", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["causal"] == {"mine (cpu)": "pass / refused"}
    assert command(monkeypatch, "c.json", "--into", "page.md") == 0
    assert capsys.readouterr().out == ""
    assert "| causal | pass / refused |" in Path("page.md").read_text()


@pytest.mark.parametrize(("name", "said"), [("missing.json", "missing.json"), ("page.md", "page.md is no certificate")])
def test_command_refuses_what_is_no_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("page.md").write_text(MARKED)
    assert command(monkeypatch, name, "--into", "page.md") == 2
    assert said in capsys.readouterr().err
    assert Path("page.md").read_text() == MARKED


# What is committed


def test_certificates_are_committed() -> None:
    assert {"naive-cpu.json", "tiled-cpu.json", "sdpa-cpu.json"} <= {path.name for path in COMMITTED}


@pytest.mark.parametrize("page", PAGES)
def test_pages_agree_with_the_certificates(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    made = fill(text, ordered([Certificate.read(path) for path in COMMITTED]), page)
    assert text == made, f"{page} is out of date: attnzoo support docs/certificates/*.json {' '.join('--into ' + name for name in PAGES)}"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_certificates_are_whole_and_name_no_machine(path: Path) -> None:
    made, text = Certificate.read(path), path.read_text(encoding="utf-8")
    assert made.run.sample is None, f"{path.name} is of a sample"
    assert not made.run.dtypes, f"{path.name} is of some dtypes alone"
    assert path.stem == f"{made.backend}-{made.run.device}"
    assert not ROOTED_PATH.findall(text), "it holds a path of the machine it comes from"
