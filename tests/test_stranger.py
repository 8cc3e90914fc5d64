"""A stranger's plugin, installed from a wheel, judged by the one command: the plain wrapper of torch's
scaled_dot_product_attention, which takes is_causal for every alignment, fails causal with unequal lengths."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from wheels import install, python

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "attnzoo-stranger"
version = "0.1.0"
dependencies = ["attnzoo"]

[project.entry-points."attnzoo.backends"]
stranger = "attnzoo_stranger"

[tool.hatch.build.targets.wheel]
only-include = ["attnzoo_stranger.py"]
"""

MODULE = """
import attnzoo
import torch
from attnzoo.backend import FEATURES


class Stranger(attnzoo.Backend):
    name = "stranger"
    capabilities = attnzoo.Capabilities(dtypes={torch.float32, torch.bfloat16}, forward=set(FEATURES), backward=set(FEATURES))

    def attend(self, spec, inputs):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(inputs.q, inputs.k, inputs.v, is_causal=spec.causal, scale=spec.scale, enable_gqa=True), None


@attnzoo.hookimpl
def attnzoo_backends():
    return [Stranger()]
"""

DECODING = [f"T06-decode-{{align}}-{length}-group{group}-fp32" for length in (20, 128, 257) for group in (1, 7)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "attnzoo_stranger.py").write_text(MODULE)
    return install(folder, folder / "site")


@pytest.fixture(scope="module")
def output(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the one command, over the causal cases that ask for no lse."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-rA", "--tb=line", "--pyargs", "attnzoo.conformance"]
    chosen = ["--attn-backend", "stranger", "-k", "T06 and fp32 and (decode or square) and not long"]
    return python(*command, *chosen, cwd=elsewhere, code=1, **environment).stdout


def cases(output: str, outcome: str) -> set[str]:
    return set(re.findall(rf"^{outcome} \S*::test_case\[stranger-(\S+)\]", output, re.M))


def test_it_fails_where_the_diagonal_is_at_the_bottom_right(output: str) -> None:
    assert cases(output, "FAILED") == {name.format(align="bottom_right") for name in DECODING}


def test_it_passes_where_its_diagonal_is_right(output: str) -> None:
    passed = cases(output, "PASSED")
    assert {name.format(align="top_left") for name in DECODING} <= passed
    assert "T06-causal-square-64-fp32" in passed


def test_the_verdict_names_the_feature(output: str) -> None:
    verdicts = dict(re.findall(r"^  (\w+) backward +(\w+)  \[", output, re.M))
    assert verdicts["bottom_right"] == "FAILED", output
    assert verdicts["top_left"] == verdicts["causal"] == "pass", output


def test_a_failure_can_be_repeated(output: str, environment: dict[str, str], tmp_path: Path) -> None:
    line = re.search(r"^[E ]+repeat: python (-m attnzoo\.testing .*bottom_right.*)$", output, re.M)
    assert line, output
    assert "max|err|" in python(*shlex.split(line[1]), cwd=tmp_path, code=1, **environment).stderr
