"""`attnzoo check`: what it prints, where, with which exit code, and the certificate that it writes."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from distribution import install

from attnzoo.cli import main

CROOKED = """
    import os
    import attnzoo, torch
    from attnzoo.backends.naive import Naive

    class Crooked(Naive):
        name = "crooked"
        capabilities = attnzoo.Capabilities(
            dtypes={torch.float64}, head_dims=(1, 512), forward={"causal", "lse", "softcap"}, backward={"causal", "lse", "softcap"}
        )

        def attend(self, spec, inputs):
            if spec.softcap == 50:
                os._exit(9)
            if spec.causal:
                raise OSError("cannot open /opt/kernels/causal.so")
            o, lse = super().attend(spec, inputs)
            return (o * 1.01 if spec.scale == 1.0 or spec.softcap == 5 else o), lse

    @attnzoo.hookimpl
    def attnzoo_backends():
        return [Crooked()]
"""


def check(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "attnzoo", "check", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A check, on a worker, of a backend that raises, dies, is wrong, is known to be wrong, and refuses."""
    folder = tmp_path_factory.mktemp("crooked")
    install(folder, "zoo-crooked", {"crooked": "zoo_crooked"}, {"zoo_crooked": CROOKED})
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    options = ["--dtype", "float64", "--seeds", "0:1", "-n", "1", "--output", "crooked.json", "--format", "json"]
    known = ["--known-failure", "T14-softcap-5-*=a bad table"]
    return check(folder, "crooked", *options, *known, ATTNZOO_PLUGINS="zoo-crooked", PYTEST_ADDOPTS="--nor-this"), folder


def test_a_backend_that_fails_exits_with_1_and_has_a_certificate(ran) -> None:
    done, folder = ran
    assert done.returncode == 1, done.stderr
    made = json.loads((folder / "crooked.json").read_text())
    assert json.loads(done.stdout) == made
    assert "attnzoo verdict" in done.stderr, "progress goes to stderr"
    assert made["verdict"] == "FAILED"
    assert made["distribution"] == {"name": "zoo-crooked", "version": "1.0"}
    assert {"attnzoo", "python", "torch"} <= made["versions"].keys()
    assert made["run"] == {
        "device": "cpu",
        "device_name": platform.machine(),
        "profile": "quick",
        "seeds": "0:1",
        "dtypes": ["float64"],
        "sample": None,
    }


def test_every_failure_is_there_with_its_command(ran) -> None:
    made = json.loads(ran[0].stdout)
    failures = {failure["case"]: failure for failure in made["failures"]}
    assert "max|err|" in failures["T14-scale-one-fp64"]["error"]
    assert "cannot open causal.so" in failures["T21-lse-causal-loss-lse-fp64"]["error"]
    assert "crashed" in failures["T14-softcap-50-fp64"]["error"], "the worker died of it"
    assert failures["T14-softcap-50-fp64"]["repeat"].startswith("python -m attnzoo.testing --backend crooked")
    assert "Problem(" in failures["T14-scale-one-fp64"]["repeat"]
    (random,) = [failure for case, failure in failures.items() if case.startswith("test_random_problems")]
    assert random["repeat"].startswith("python -m attnzoo.testing --backend crooked"), "also of a problem that killed its worker"
    assert "Problem(" in random["repeat"]
    assert list(made["known_failures"]) == ["T14-softcap-5-fp64"]


def test_every_refusal_is_counted(ran) -> None:
    made = json.loads(ran[0].stdout)
    assert made["counts"]["refused"] == sum(counts["refused"] for counts in made["families"].values())
    assert made["refusals"]["mask (a bool mask) is not supported"] == made["features"]["mask"]["backward"]["refused"] > 0
    assert made["features"]["causal"]["backward"]["verdict"] == "FAILED"
    assert made["features"]["mask"]["backward"]["verdict"] == "refused"


def test_a_good_backend_exits_with_0(tmp_path: Path) -> None:
    done = check(tmp_path, "naive", "--dtype", "float64", "--sample", "5", "--seeds", "0:1", "-n", "0", ATTNZOO_PLUGINS="")
    assert done.returncode == 0, done.stderr
    assert f"naive on cpu ({platform.machine()}): pass" in done.stdout
    assert not list(tmp_path.iterdir()), "nothing is written unless --output says where"


QUITTING = """
    import os
    import attnzoo
    from attnzoo.backends.naive import Naive

    class Quitting(Naive):
        name = "quitting"

        def attend(self, spec, inputs):
            if spec.causal:
                os._exit(0)
            return super().attend(spec, inputs)

    @attnzoo.hookimpl
    def attnzoo_backends():
        return [Quitting()]
"""


def test_a_run_that_a_backend_ends_is_not_certified(tmp_path: Path) -> None:
    """Without workers it takes pytest along, with an exit code that says that all went well."""
    install(tmp_path, "zoo-quitting", {"quitting": "zoo_quitting"}, {"zoo_quitting": QUITTING})
    options = ["--dtype", "float64", "--sample", "20", "--seeds", "0:1", "-n", "0", "--output", "quitting.json"]
    done = check(tmp_path, "quitting", *options, ATTNZOO_PLUGINS="zoo-quitting")
    assert done.returncode == 1, done.stdout
    assert re.search(r"pytest ended with code 0 after \d+ tests, before its end: nothing is certified", done.stderr), done.stderr
    assert not (tmp_path / "quitting.json").exists()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run `attnzoo check` in this process, up to where pytest would start; returns the exit code."""

    def run(*arguments: str, plugins: str = "") -> int:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("ATTNZOO_PLUGINS", plugins)
        monkeypatch.setattr(sys, "argv", ["attnzoo", "check", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nave"], "did you mean 'naive'?"),
        (["naive", "--device", "abacus"], "device is 'abacus'"),
        (["naive", "--device", "meta"], "cpu, cuda and cuda:N"),
        (["naive", "--device", "cuda:99"], "CUDA devices"),
        (["naive", "--profile", "slow"], "--profile"),
        (["naive", "--dtype", "int8"], "--dtype"),
        (["naive", "-n", "many"], "no number of workers"),
        (["naive", "--seeds", "3:3"], "no range of chunks"),
        (["naive", "--sample", "0"], "--sample"),
        (["naive", "--timeout", "-1"], "--timeout"),
        (["naive", "--output", "nowhere/c.json"], "nowhere is no folder"),
        ([], "NAME"),
    ],
)
def test_malformed_commands_exit_with_2(command, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert command(*arguments) == 2
    printed = capsys.readouterr()
    assert said in " ".join(printed.err.replace("│", "").split())
    assert printed.out == ""


@pytest.mark.parametrize(("arguments", "expected"), [((), None), (("--timeout", "0"), 0), (("--timeout", "7.5"), 7.5)])
def test_the_time_limit_reaches_the_kit(command, monkeypatch: pytest.MonkeyPatch, arguments, expected) -> None:
    from attnzoo.testing import judge

    given = []

    def stopped(*_: object, timeout: float | None, **__: object) -> None:
        given.append(timeout)
        raise judge.SuiteError("stopped here")

    monkeypatch.setattr(judge, "judge", stopped)
    assert command("naive", *arguments) == 1
    assert given == [expected]


def test_a_device_that_is_not_claimed_is_no_failure(tmp_path: Path) -> None:
    source = CROOKED.replace("dtypes=", 'devices={"cuda"}, dtypes=')
    install(tmp_path, "zoo-crooked", {"crooked": "zoo_crooked"}, {"zoo_crooked": source})
    done = check(tmp_path, "crooked", ATTNZOO_PLUGINS="zoo-crooked")
    assert done.returncode == 2, done
    assert "crooked does not claim cpu: check it on cuda" in done.stderr


def test_dtypes_that_are_not_claimed_are_no_pass(tmp_path: Path) -> None:
    install(tmp_path, "zoo-crooked", {"crooked": "zoo_crooked"}, {"zoo_crooked": CROOKED})
    done = check(tmp_path, "crooked", "--dtype", "float16", ATTNZOO_PLUGINS="zoo-crooked")
    assert done.returncode == 2, done
    assert "nothing would be judged: crooked claims none of float16 on cpu; it takes float64" in done.stderr
    assert done.stdout == ""


def test_without_the_packages_it_says_what_to_install(command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "xdist" else found(name, *rest))
    assert command("naive") == 2
    assert "needs pytest-xdist: pip install 'attnzoo[test]'" in capsys.readouterr().err


def test_a_plugin_that_cannot_be_loaded_exits_with_1(tmp_path: Path) -> None:
    install(tmp_path, "zoo-broken", {"broken": "zoo_broken"}, {"zoo_broken": "import a_module_that_is_not_there"})
    done = check(tmp_path, "broken", ATTNZOO_PLUGINS="zoo-broken")
    assert done.returncode == 1, done
    assert "a_module_that_is_not_there" in done.stderr
