"""`attnzoo layout`: what it prints for each preset, what it refuses, the picture it saves."""

from __future__ import annotations

import json
import sys

import pytest

import attnzoo
from attnzoo.cli import main
from attnzoo.cli.layout import PRESETS

OPTIONS = {
    "sliding_window": ["--window", "100,0"],
    "dilated": ["--reach", "2"],
    "strided": ["--stride", "4"],
    "fixed": ["--stride", "4"],
    "longformer": ["--reach", "1"],
    "prefix_lm": ["--prefix", "100"],
    "documents": ["--documents", "300,212", "--causal"],
    "random": ["--density", "0.25", "--seed", "3"],
}


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `attnzoo layout` with these arguments: exit code, stdout, stderr."""

    def command(*arguments):
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setattr(sys, "argv", ["attnzoo", "layout", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return command


@pytest.mark.parametrize("name", PRESETS)
def test_numbers_of_every_preset(run, name):
    code, out, err = run(name, "--seq", "512", "--block", "32", "--format", "json", *OPTIONS.get(name, []))
    assert code == 0, err
    found = json.loads(out)
    assert found["rows"] == found["columns"] == 16
    blocks = found["full_blocks"] + found["partial_blocks"]
    assert found["density"] == pytest.approx(blocks / 256)
    assert found["flops"] == pytest.approx(found["dense_flops"] * blocks / 256, rel=1e-6)


def test_presets_are_those_of_the_package():
    makers = set(attnzoo.layouts.__all__) - {"from_mask_mod", "stack_heads", "topk"}  # what they take is no number
    assert makers == set(PRESETS)


def test_table_ends_with_the_picture(run):
    code, out, _ = run("butterfly", "--seq", "1024", "--block", "128")
    assert code == 0
    assert "density" in out
    assert out.endswith(f"{attnzoo.layouts.butterfly(1024)}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["butterfly", "--window", "3,3"], "error: butterfly takes no --window; it takes --reach"),
        (["random"], "error: random needs --density"),
        (["random", "--density", "2"], "error: density is 2.0; it takes 0 to 1"),
        (["causal", "--kv-len", "100"], "error: align is None"),
        (["causal", "--block", "0"], "error: block is 0"),
        (["butterfly", "--reach", "-1"], "error: reach is -1; it takes at least 0"),
        (["bigbird", "--random-blocks", "-1"], "error: random_blocks is -1"),
        (["documents", "--documents", "700,300", "--block", "128,64"], "error: block is (128, 64)"),
        (["documents", "--documents", "700,300", "--seq", "1024"], "error: --seq is 1024; the documents have 1000 tokens"),
        (["documents", "--documents", "700,300", "--kv-len", "10"], "error: --kv-len is 10; the documents have 1000 tokens"),
        (["sliding_window", "--window", "1,2,3"], "error: window is (1, 2, 3); it takes (left, right)"),
        (["causal", "--seq", "2097152", "--block", "16"], "error: the layout has 8589869056 blocks; it takes at most"),
        (["random", "--seq", "100000000", "--density", "0.1"], "error: the layout has 61035156250 blocks; it takes at most"),
        (["causal", "--save", "{folder}/none/causal.png"], "error: --save"),
        (["causal", "--save", "{folder}/causal.abc"], "error: --save"),
        (["diagonal"], "is no preset"),
    ],
)
def test_refusals(run, arguments, message, tmp_path):
    if "--save" in arguments:
        pytest.importorskip("matplotlib", reason="needs matplotlib (extra bench)")
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_a_window_of_one_number_is_that_of_the_maker(run):
    one, two = [run("sliding_window", "--seq", "512", "--window", window) for window in ("100", "100,0")]
    assert one == two
    assert one[0] == 0


def test_picture_is_saved(run, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra bench)")
    path = tmp_path / "causal.png"
    code, _, err = run("causal", "--seq", "512", "--save", str(path))
    assert code == 0, err
    assert path.read_bytes().startswith(b"\x89PNG")
