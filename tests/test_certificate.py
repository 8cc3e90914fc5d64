"""Certificates: what they count, what they credit a backend with, and what they never hold."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

import attnzoo
from attnzoo.testing import Subject, journal, run_case
from attnzoo.testing.cases import CASES
from attnzoo.testing.certificate import Certificate, Run, overall
from attnzoo.testing.recorder import line_of

RUN = Run("cpu", "x86_64", "quick", "0:10")


class Plain(attnzoo.Backend):
    """Serves fp32 without a single feature."""

    name = "plain"
    capabilities = attnzoo.Capabilities(dtypes={torch.float32})

    def attend(self, spec, inputs):
        return (inputs.q @ inputs.k.mT * spec.scale).softmax(-1) @ inputs.v, None


def line(name: str, kind: str = "passed", *reasons: str, test: str = "test_case", **more: Any) -> dict[str, Any]:
    """As `attnzoo.testing.recorder` writes it, of the backend mine."""
    return {"test": test, "parameters": f"mine-{name}".removesuffix("-"), "kind": kind, "reasons": list(reasons), **more}


def certificate(*lines: dict[str, Any]) -> Certificate:
    return Certificate.of(lines, backend="mine", distribution={"name": "attnzoo-mine", "version": "1.0"}, versions={}, run=RUN)


def test_it_counts_by_kind_family_and_feature() -> None:
    made = certificate(
        line("T32-claim-causal-forward"),
        line("T32-claim-causal-backward", "refused", "no causal here"),
        line("T06-causal-square-64-fp32", "refused", "no causal here", "no gradients either"),
        line("T06-causal-square-64-bf16", "known failure", "it rounds"),
        line("T32-plain-forward-fp32", "failed", error="off by one", repeat="again"),
        line("0", test="test_random_problems"),
        line("", test="test_refusals_are_explained"),
    )
    assert made.verdict == "FAILED"
    assert made.counts == {"passed": 1, "forward only": 0, "refused": 2, "not applicable": 0, "failed": 1, "known failure": 1}
    assert made.families["T06"] == {"passed": 0, "forward only": 0, "refused": 1, "not applicable": 0, "failed": 0, "known failure": 1}
    assert made.features["causal"]["forward"]["verdict"] == "pass"
    assert made.features["causal"]["backward"]["verdict"] == "known failure"
    assert made.features["causal"]["backward"]["refused"] == 2
    assert made.features["plain"]["forward"]["verdict"] == "FAILED"
    assert made.refusals == {"no causal here": 2, "no gradients either": 1}, "commonest first"
    assert made.known_failures == {"T06-causal-square-64-bf16": "it rounds"}
    assert made.failures == [{"case": "T32-plain-forward-fp32", "error": "off by one", "repeat": "again"}]
    assert made.random["passed"] == 1


def test_a_case_judged_forward_only_passes_there_and_is_refused_with_gradients() -> None:
    made = certificate(line("T16-bias-1h1k-fp32", "forward only", "no gradients here", has_backward=True))
    assert made.counts["forward only"] == 1
    assert made.features["bias"]["forward"]["passed"] == made.features["bias"]["backward"]["refused"] == 1
    assert made.features["bias"]["forward"]["verdict"] == "pass"
    assert made.features["bias"]["backward"]["verdict"] == "refused"
    assert list(made.features["bias_grad"]) == ["backward"], "no forward has the gradient of a bias"
    assert made.refusals == {"no gradients here": 1}
    assert overall(made.dtypes["float32"]) == "forward only"


def test_a_case_counts_in_the_dtype_in_which_it_was_asked() -> None:
    """A backend of bf16 alone is asked most cases there, whose own dtype is fp32: it must not seem to serve that."""
    made = certificate(line("T25-compiled-plain", dtype="bfloat16"))
    assert made.dtypes["bfloat16"]["passed"] == 1
    assert "float32" not in made.dtypes


def test_a_case_that_fails_and_then_kills_its_worker_is_one_failure() -> None:
    case = "T12-grid-heads-65536"
    made = certificate(
        line(case, "failed", error="invalid argument", repeat="again"), line(case, "failed", error="worker 'gw1' crashed", repeat="again")
    )
    assert made.counts["failed"] == 1
    assert [failure["error"] for failure in made.failures] == ["invalid argument"]
    made = certificate(line(case), line(case, "failed", error="its clean-up failed", repeat="again"))
    assert (made.counts["passed"], made.counts["failed"]) == (0, 1)


def test_a_forward_that_failed_without_its_gradients_fails_the_forward() -> None:
    made = certificate(line("T06-causal-square-64-fp32", "failed", error="off", repeat="again", has_backward=False))
    assert made.features["causal"]["forward"]["verdict"] == "FAILED"
    assert "backward" not in made.features["causal"]


def test_a_case_judged_without_its_lse_says_so() -> None:
    judged = line("T06-causal-bottom_right-64x65-fp32", "passed", "no lse here", has_backward=True, without_lse=True)
    made = certificate(judged, line("T06-causal-square-64-fp32"))
    assert (made.counts["passed"], made.without_lse) == (2, 1)
    assert made.features["bottom_right"]["backward"]["verdict"] == "pass"
    assert made.features["lse"]["backward"]["verdict"] == "refused"
    assert made.features["lse"]["backward"]["reason"] == "no lse here"
    assert made.refusals == {"no lse here": 1}


def test_a_certificate_from_before_the_lse_was_counted_is_read(tmp_path: Path) -> None:
    made = certificate(line("T32-plain-forward-fp32")).to_dict()
    del made["without_lse"]
    (tmp_path / "c.json").write_text(json.dumps(made))
    assert Certificate.read(tmp_path / "c.json").without_lse == 0


def test_a_run_that_judged_no_call_is_empty() -> None:
    refused = [line("T06-causal-square-64-fp32", "refused", "no"), line("T32-declaration"), line("T32-reject-align-word")]
    assert certificate(*refused).is_empty
    assert not certificate(*refused, line("T06-causal-square-64-fp16")).is_empty
    assert not certificate(*refused, line("T32-plain-forward-fp16")).is_empty
    assert not certificate(*refused, line("chunk-0", test="test_random_problems")).is_empty
    assert not certificate(*refused, line("", "failed", test="test_refusals_are_explained", error="no", repeat="")).is_empty


@pytest.mark.parametrize("case", ["T15-no_grad-causal", "T15-inference_mode-causal", "T26-vmapped-causal"])
def test_a_case_that_computes_no_gradient_says_nothing_of_the_backward(case: str) -> None:
    assert list(certificate(line(case)).features["causal"]) == ["forward"]


def test_a_chunk_of_refused_problems_has_not_passed() -> None:
    made = certificate(line("T32-plain-forward-fp32"), line("chunk-0", "refused", "no", test="test_random_problems"))
    assert (made.random["passed"], made.random["refused"]) == (0, 1)
    assert made.verdict == "pass"


@pytest.mark.parametrize("test", ["test_refusals_are_explained", "test_random_problems"])
def test_a_failure_outside_the_cases_fails_the_certificate(test: str) -> None:
    made = certificate(line("T32-plain-forward-fp32"), line("", "failed", test=test, error="no", repeat=""))
    assert made.verdict == "FAILED"
    assert made.failures[0]["case"] == test
    assert test in made.failures[0]["repeat"]


@pytest.mark.parametrize("case", ["T06-causal-square-64-fp16", "T32-plain-forward-fp16"])
def test_a_failure_without_a_command_is_repeated_by_its_id(case: str) -> None:
    """A crashed worker leaves no more; the case was perhaps asked in a dtype and head dim that its problem does not say."""
    made = certificate(line(case, "failed", error="worker 'gw0' crashed", repeat=""))
    expected = f"pytest --pyargs attnzoo.conformance --attn-backend mine --attn-device cpu -k {case}"
    assert made.failures[0]["repeat"] == expected


def test_a_chunk_that_killed_its_worker_is_repeated_alone() -> None:
    made = certificate(line("chunk-12", "failed", test="test_random_problems", error="worker 'gw0' crashed", repeat=""))
    assert "--attn-seeds 12:13 -k test_random_problems" in made.failures[0]["repeat"]


def test_a_worker_that_died_leaves_the_problem_that_killed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(journal.FOLDER, str(tmp_path))
    (tmp_path / "gw3").write_text("python -m attnzoo.testing --backend mine ...")
    noted = "python -m attnzoo.testing --backend mine ..."
    for test, left in (("test_random_problems[mine-chunk-2]", noted), ("test_case[mine-x]", noted), ("test_refusals_are_explained[x]", "")):
        message = f"worker 'gw3' crashed while running 'test_backend.py::{test}'"
        report = pytest.TestReport(f"test_backend.py::TestBackend::{test}", ("", 0, ""), {}, "failed", message, "???")
        assert line_of(report)["repeat"] == left
        assert line_of(report)["error"] == message


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("no file /home/someone/code/kernel.so here", "no file kernel.so here"),
        ("in '/opt/x/attnzoo_mine.py', line 3", "in 'attnzoo_mine.py', line 3"),
        (r"C:\Users\someone\kernel.dll", "kernel.dll"),
        (f"NCCL on {platform.node()}: no", "NCCL on <host>: no"),
        ("see https://pytorch.org/docs/stable for the ratio o/lse/2 and (a / b)", None),
    ],
)
def test_it_names_neither_the_machine_nor_a_folder(text: str, kept: str | None) -> None:
    made = certificate(line("T32-plain-forward-fp32", "failed", error=text, repeat="x"), line("T06-causal-square-1-fp32", "refused", text))
    assert made.failures[0]["error"] == (kept or text)
    assert list(made.refusals) == [kept or text]


def test_the_order_of_the_lines_does_not_matter() -> None:
    lines = [
        line("T32-plain-forward-fp32"),
        line("T06-causal-square-1-fp32", "refused", "b"),
        line("T06-causal-square-2-fp32", "refused", "a"),
    ]
    assert certificate(*lines).to_json() == certificate(*reversed(lines)).to_json()


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = certificate(line("T32-plain-forward-fp32"), line("T06-causal-square-1-fp32", "refused", "no ²"))
    (tmp_path / "c.json").write_text(made.to_json(), encoding="utf-8")
    assert Certificate.read(tmp_path / "c.json") == made


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"schema": 0})])
def test_another_file_is_no_certificate(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=r"c\.json"):
        Certificate.read(tmp_path / "c.json")


UNSERVED = [
    case for case in CASES if case.check not in ("accuracy", "claim") and case.judges_result and case.problem.features and not case.device
]


@pytest.mark.parametrize("check", sorted({case.check for case in UNSERVED}))
def test_no_check_credits_a_feature_that_is_refused(check: str) -> None:
    """Else the support table would say "pass" where the backend said no."""
    for case in [case for case in UNSERVED if case.check == check][:3]:
        outcome = run_case(Subject(Plain()), case, "cpu")
        made = certificate(line(case.id, outcome.kind, *outcome.reasons, without_lse=outcome.without_lse))
        passed = [name for name, said in made.features.items() if any(counts["verdict"] == "pass" for counts in said.values())]
        assert not passed, f"{case.id} credits {', '.join(passed)}, which is refused"


def test_a_fresh_interpreter_credits_nothing() -> None:
    """It says what importing needs, of no result."""
    made = certificate(line("T30-named-without-gpu"), line("T30-without-triton"))
    assert (made.counts["passed"], made.features) == (2, {})


def test_a_malformed_call_that_is_rejected_credits_nothing() -> None:
    made = certificate(line("T32-reject-align-word"), line("T32-all-reasons-backward"))
    assert made.counts["passed"] == 2
    assert made.features == {}


def test_a_required_case_says_nothing_of_dtypes() -> None:
    """It is run in a dtype that the backend claims."""
    made = certificate(line("T32-plain-forward-fp16"), line("T06-causal-square-64-fp32"))
    assert list(made.dtypes) == ["float32"]
