"""Random problems: within the claims of the device, all of them; the same in every process; refused is not passed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnzoo.backend import Capabilities
from attnzoo.backends.naive import Naive
from attnzoo.testing import journal, random_problems
from attnzoo.testing.case import Outcome
from attnzoo.testing.failure import ConformanceError
from attnzoo.testing.problem import Problem
from attnzoo.testing.subject import Subject
from attnzoo.testing.variants import VARIANTS

ALL = Naive.capabilities
FORWARD = {"causal", "mask", "bias", "softcap", "lse", "window", "grouped_heads"}


class Inference(Naive):
    """Nearly everything without gradients, causal alone with them."""

    name = "inference"
    capabilities = Capabilities(dtypes={torch.float32, torch.float16}, head_dims=(1, 128), forward=FORWARD, backward={"causal"})


class Refusing(Naive):
    name = "refusing"

    def unsupported_reasons(self, spec):
        return ["not today"]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """What is drawn, while nothing is judged."""
    problems: list[Problem] = []

    def record(subject, case, device):
        problems.append(case.problem)
        return Outcome("passed")

    monkeypatch.setattr(random_problems, "run_case", record)
    return problems


def test_claims_without_gradients_are_drawn_without_gradients(drawn: list[Problem]) -> None:
    for chunk in range(10):
        random_problems.run_chunk(Subject(Inference()), "cpu", profile="quick", chunk=chunk)
    assert set().union(*[problem.features for problem in drawn]) == FORWARD
    assert {feature for problem in drawn if problem.grads for feature in problem.features} == {"causal"}
    assert 0.2 < sum(bool(problem.grads) for problem in drawn) / len(drawn) < 0.8, "both are drawn"


@pytest.mark.parametrize("profile", ["quick", "deep"])
def test_no_gradients_are_drawn_where_none_are_claimed(drawn: list[Problem], profile: str) -> None:
    class NoBackward(Inference):
        capabilities = replace(Inference.capabilities, backward=frozenset(), gradients=False)

    random_problems.run_chunk(Subject(NoBackward()), "cpu", profile=profile, chunk=0)
    random_problems.run_variant(Subject(NoBackward()), "cpu", 0)
    assert not any(problem.grads for problem in drawn)
    assert any(problem.features for problem in drawn)


@pytest.mark.parametrize("place", range(0, len(VARIANTS), 7))
def test_variants_are_drawn_with_and_without_gradients(drawn: list[Problem], place: int) -> None:
    random_problems.run_variant(Subject(Inference()), "cpu", place)
    for problem in drawn:
        assert set(problem.features) <= ({"causal"} if problem.grads else FORWARD)
    wanted = {name for name in ("mask", "bias", "softcap") if VARIANTS[place][name] != "none"}
    assert wanted <= set().union(*[problem.features for problem in drawn])


@pytest.mark.parametrize("backend", [Naive(), Inference()], ids=lambda backend: backend.name)
def test_every_feature_of_the_variants_is_claimed(drawn: list[Problem], backend: Naive) -> None:
    random_problems.run_chunk(Subject(backend), "cpu", profile="deep", chunk=0)
    for problem in drawn:
        claims = backend.capabilities.backward if problem.grads else backend.capabilities.forward
        assert set(problem.features) <= claims, problem


def test_a_wrong_forward_without_gradients_is_found() -> None:
    class Blind(Inference):
        def attend(self, spec, inputs):
            return super().attend(replace(spec, mask=None), replace(inputs, mask=None))

    def judge() -> None:
        for chunk in range(10):
            random_problems.run_chunk(Subject(Blind()), "cpu", profile="quick", chunk=chunk)

    with pytest.raises(ConformanceError, match=r"repeat: python -m attnzoo\.testing --backend inference .*mask=Table"):
        judge()


@pytest.mark.parametrize("profile", ["quick", "deep"])
def test_dtypes_are_those_asked_for(drawn: list[Problem], profile: str) -> None:
    outcome = random_problems.run_chunk(Subject(Naive()), "cpu", profile=profile, chunk=0, dtypes=("bfloat16",))
    assert outcome.kind == "passed"
    assert {problem.dtype for problem in drawn} == {"bfloat16"}


def test_no_dtype_that_is_claimed_is_not_applicable() -> None:
    outcome = random_problems.run_chunk(Subject(Inference()), "cpu", profile="quick", chunk=0, dtypes=("bfloat16",))
    assert outcome == Outcome("not applicable", ("claims none of bfloat16",))


def test_a_chunk_of_refused_problems_is_refused() -> None:
    for outcome in (
        random_problems.run_chunk(Subject(Refusing()), "cpu", profile="quick", chunk=0),
        random_problems.run_variant(Subject(Refusing()), "cpu", 0),
    ):
        assert outcome == Outcome("refused", ("not today",))


def test_a_sticky_error_is_not_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every problem after it fails as well, so a simpler one would be blamed that is innocent."""
    judged: list[Problem] = []

    def fail_from_the_third(subject, case, device):
        judged.append(case.problem)
        if len(judged) >= 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return Outcome("passed")

    monkeypatch.setattr(random_problems, "run_case", fail_from_the_third)
    with pytest.raises(ConformanceError, match="illegal memory access") as raised:
        random_problems.run_chunk(Subject(Naive()), "cpu", profile="quick", chunk=0)
    assert len(judged) == 3
    assert repr(judged[2]) in str(raised.value)


def test_the_problem_in_hand_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def record(subject, case, device):
        seen.append((repr(case.problem), journal.last_of("gw7")))
        return Outcome("passed")

    monkeypatch.setattr(random_problems, "run_case", record)
    monkeypatch.setenv(journal.FOLDER, str(tmp_path))
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw7")
    random_problems.run_chunk(Subject(Naive()), "cpu", profile="quick", chunk=0)
    assert len(seen) > 10
    assert all(problem in line for problem, line in seen)
    assert journal.last_of("gw8") == ""


DRAW = """
import sys
for path in sys.argv[1:]:
    sys.path.insert(0, path)
    import local_module
from attnzoo.backends.naive import Naive
from attnzoo.testing import random_problems
from attnzoo.testing.case import Outcome
from attnzoo.testing.subject import Subject

drawn = []

def record(subject, case, device):
    drawn.append(repr(case.problem))
    return Outcome("passed")

random_problems.run_case = record
for profile, chunks in (("quick", 10), ("deep", 2)):
    for chunk in range(chunks):
        random_problems.run_chunk(Subject(Naive()), "cpu", profile=profile, chunk=chunk)
print("\\n".join(drawn))
"""


def test_problems_are_the_same_whatever_modules_are_loaded(tmp_path: Path) -> None:
    """Hypothesis draws from the constants of modules that lie outside of site-packages: an editable install has others
    than a wheel, and each xdist worker has loaded others."""
    numbers = [*range(1000), *range(2**32 - 500, 2**32 + 500, 7), *range(2**63 - 50, 2**63 + 50), 2**64 - 1]
    (tmp_path / "local_module.py").write_text("\n".join(f"X{place} = {number}" for place, number in enumerate(numbers[::2])))
    lists = []
    for arguments, hash_seed in (([], "0"), ([str(tmp_path)], "1")):
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed, "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path / "h")}
        done = subprocess.run([sys.executable, "-c", DRAW, *arguments], env=environ, capture_output=True, text=True, check=True)
        lists.append(done.stdout.splitlines())
    assert len(lists[0]) >= 300
    assert lists[0] == lists[1]
