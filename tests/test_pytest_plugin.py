"""The pytest plugin: cheap to load, fair with GPUs, and the same verdict however the cases are spread."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnzoo import pytest_plugin

REFUSING = """
import pytest
from attnzoo.backend import Capabilities
from attnzoo.backends.naive import Naive
from attnzoo.testing.suite import BackendConformance

ALL = Naive.capabilities

class Refusing(Naive):
    name = "refusing"
    capabilities = Capabilities(
        dtypes=ALL.dtypes, head_dims=(1, 300), forward=ALL.forward - {"dropout"}, backward=ALL.backward - {"dropout", "mask"}
    )

class Mute(Naive):
    name = "mute"
    def unsupported_reasons(self, spec):
        return ["no"]

class Nothing(Naive):
    name = "nothing"
    capabilities = Capabilities()

class Dying(Naive):
    '''Takes its process down at one window.'''
    name = "dying"
    def attend(self, spec, inputs):
        if spec.window == (3, 2):
            import os, signal
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().attend(spec, inputs)

class Half(Naive):
    '''float64 alone, and one percent off.'''
    name = "half"
    import torch
    capabilities = Capabilities(dtypes={torch.float64}, head_dims=(1, 300), forward=ALL.forward, backward=ALL.backward)
    def attend(self, spec, inputs):
        o, lse = super().attend(spec, inputs)
        return o * 1.01, lse

class Wrong(Naive):
    name = "wrong"
    def attend(self, spec, inputs):
        o, lse = super().attend(spec, inputs)
        return o * 1.5, lse

class Future(Naive):
    '''Causal is top-left whatever is asked.'''
    name = "future"
    def attend(self, spec, inputs):
        from dataclasses import replace
        return super().attend(replace(spec, align="top_left" if spec.align else None), inputs)
"""

JUDGED = (
    REFUSING
    + """
class TestIt(BackendConformance):
    known_failures = KNOWN

    @pytest.fixture
    def backend(self):
        return BACKEND()
"""
)


def without(name: str) -> dict[str, str]:
    return {known: value for known, value in os.environ.items() if known != name}


def pytest_on(folder: Path, text: str, *arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """pytest of its own on one file; the settings of this repository don't reach it."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(folder), *arguments]
    environ = {**without("OMP_NUM_THREADS"), **({"OMP_NUM_THREADS": "1"} if environ is None else environ)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)


def judged(backend: str, known: str = "{}") -> str:
    return JUDGED.replace("BACKEND()", f"{backend}()").replace("KNOWN", known)


def verdict_of(output: str) -> list[str]:
    """The lines between the heading of the verdict and the next section."""
    lines = re.split(r"=+ attnzoo verdict =+\n", output)[1].splitlines()
    return [line for line in lines if line.startswith("  ") or re.match(r"\w+: (pass|FAILED|nothing)", line)]


def counts_of(output: str) -> dict[str, int]:
    summary = output.strip().splitlines()[-1]
    return {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|xfailed|error)", summary)}


# Loading


def test_loading_is_cheap_and_imports_no_torch() -> None:
    script = (
        "import pytest, pluggy, pathlib, sys, time\n"
        "start = time.process_time()\n"
        "import attnzoo.pytest_plugin, attnzoo.time_limit\n"
        "print(time.process_time() - start, 'torch' in sys.modules, 'hypothesis' in sys.modules)\n"
    )
    runs = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split() for _ in range(5)]
    assert {tuple(run[1:]) for run in runs} == {("False", "False")}
    best = min(float(run[0]) for run in runs)
    assert best < 0.015, f"the plugin takes {best * 1000:.1f} ms of CPU time to load, which a loaded machine disturbs least"


def test_a_run_of_somebody_else_imports_no_torch(tmp_path: Path) -> None:
    done = pytest_on(
        tmp_path, "import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n    assert 'attnzoo.testing' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stdout


def test_no_backend_is_a_usage_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--pyargs", "attnzoo.conformance"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Give --attn-backend NAME" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--attn-backend", "nope"], "no backend is named 'nope'"),
        (["--attn-backend", "naive", "--attn-dtype", "fp16"], "--attn-dtype is fp16; it takes float16, bfloat16, float32, float64"),
        (["--attn-backend", "naive", "--attn-seeds", "3"], "it takes FIRST:STOP"),
        (["--attn-backend", "naive", "--attn-sample", "0"], "--attn-sample is 0; it takes a number of cases, 1 or more"),
        (["--attn-backend", "naive", "--attn-device", "cuda:99"], "--attn-device: device is 'cuda:99'; torch sees"),
        (["--attn-backend", "naive", "--attn-device", "abacus"], "--attn-device: device is 'abacus'"),
    ],
)
def test_what_no_run_could_do_is_one_usage_error(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "attnzoo.conformance", "-n", "1", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert done.stderr.count(said) == 1
    assert done.stdout == ""


def test_a_known_failure_that_names_no_case_is_reported(tmp_path: Path) -> None:
    known = "{'T06-causal-square-*': 'it is', 'random-chunk-3': 'it is', 'T06-causal-squared-*': 'it is not'}"
    done = pytest_on(tmp_path, judged("Naive", known), "-k", "known_failures_exist", "--attn-known-failure", "naive:T99-*=no")
    assert done.returncode == 1
    assert "known failures of naive that name no case: T06-causal-squared-*, T99-*" in done.stdout
    other = pytest_on(tmp_path, judged("Naive"), "-k", "known_failures_exist", "--attn-known-failure", "tiled:T99-*=no")
    assert other.returncode == 0, "another backend's"


def test_a_chunk_whose_every_problem_is_refused_is_a_skip(tmp_path: Path) -> None:
    text = judged("Mute")
    done = pytest_on(tmp_path, text, "-k", "random_problems", "--attn-seeds", "0:1")
    assert counts_of(done.stdout) == {"skipped": 1}, done.stdout
    assert "refused: no" in pytest_on(tmp_path, text, "-k", "random_problems", "--attn-seeds", "0:1", "-rs").stdout


def test_random_problems_are_of_the_dtypes_asked_for(tmp_path: Path) -> None:
    text = judged("Nothing")
    done = pytest_on(tmp_path, text, "-k", "random_problems", "--attn-seeds", "0:1", "--attn-dtype", "float16", "-rs")
    assert "not applicable: claims none of float16" in done.stdout


def test_a_device_that_is_not_there_is_no_failure_of_a_backend(tmp_path: Path) -> None:
    """Where a class names the backend, and no option does."""
    done = pytest_on(tmp_path, judged("Naive"), "--attn-device", "cuda:99")
    assert counts_of(done.stdout) == {"error": 1}, done.stdout
    assert "--attn-device: device is 'cuda:99'; torch sees" in done.stdout + done.stderr


THREADS = """
import torch
def test_it(attn_device):
    print("threads", torch.get_num_threads())
"""


def test_several_workers_have_a_thread_each(tmp_path: Path) -> None:
    done = pytest_on(tmp_path, THREADS, "-n", "2", "-rP", environ={})
    assert re.findall(r"threads (\d+)", done.stdout) == ["1"], done.stdout


@pytest.mark.parametrize(("workers", "threads", "expected"), [(2, None, True), (2, "2", False), (1, None, False), (None, None, False)])
def test_threads_are_left_alone_otherwise(
    monkeypatch: pytest.MonkeyPatch, workers: int | None, threads: str | None, expected: bool
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    config = SimpleNamespace(workerinput={"workercount": workers}) if workers else SimpleNamespace()
    assert pytest_plugin.shares_cores(config) is expected


def test_a_known_failure_whose_every_case_is_refused_is_reported(tmp_path: Path) -> None:
    known = "{'T22-dropout-*': 'it drops too much', 'T06-causal-square-*': 'it is'}"
    done = pytest_on(tmp_path, judged("Refusing", known), "-k", "known_failures_exist")
    assert done.returncode == 1, done.stdout
    assert "known failures of refusing whose every case it refuses, so that none fails: T22-dropout-*" in done.stdout
    assert pytest_on(tmp_path, judged("Naive", known), "-k", "known_failures_exist").returncode == 0


def test_the_help_says_how_many_problems_a_chunk_has() -> None:
    from attnzoo.testing.random_problems import EXAMPLES

    done = subprocess.run([sys.executable, "-m", "pytest", "--help"], capture_output=True, text=True, check=True)
    said = " ".join(done.stdout.split())
    assert f"of {EXAMPLES['quick']} problems each, {EXAMPLES['deep']} in deep" in said


# GPUs


def config_of(worker: str | None) -> SimpleNamespace:
    return SimpleNamespace(workerinput={"workerid": worker}) if worker else SimpleNamespace()


@pytest.mark.parametrize(
    ("worker", "expected"),
    [("gw0", "4,5,7"), ("gw1", "5,7,4"), ("gw2", "7,4,5"), ("gw3", "4,5,7"), (None, "4,5,7")],
)
def test_each_worker_starts_at_another_gpu(monkeypatch: pytest.MonkeyPatch, worker: str | None, expected: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    pytest_plugin.spread_gpus(config_of(worker))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(("device", "cores", "expected"), [("cuda", 288, 48), ("cuda:1", 288, 16), ("cuda", 8, 8), ("cpu", 288, None)])
def test_as_many_workers_as_the_gpus_serve(monkeypatch: pytest.MonkeyPatch, device: str, cores: int, expected: int | None) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    config = SimpleNamespace(getoption={"--attn-device": device}.get)
    assert pytest_plugin.pytest_xdist_auto_num_workers(config) == expected  # type: ignore[arg-type]


def test_without_gpus_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytest_plugin.spread_gpus(config_of("gw1"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


STICKY = """
import os, pytest

@pytest.mark.parametrize("n", range(6))
def test_it(n, tmp_path_factory):
    print("process", os.getpid())
    if n == 2:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


def test_worker_is_replaced_after_a_sticky_cuda_error(tmp_path: Path) -> None:
    done = pytest_on(tmp_path, STICKY, "-n", "1", "--attn-device", "cuda", "-rA")
    assert "worker 'gw0' crashed while running 'test_it.py::test_it[2]'" in done.stdout, done.stdout
    assert "illegal memory access" in done.stdout
    assert counts_of(done.stdout)["passed"] == 5
    assert len(set(re.findall(r"process (\d+)", done.stdout))) == 2


def test_other_failures_replace_nobody(tmp_path: Path) -> None:
    done = pytest_on(
        tmp_path, STICKY.replace("an illegal memory access was encountered", "out of memory"), "-n", "1", "--attn-device", "cuda"
    )
    assert "replacing" not in done.stdout
    assert counts_of(done.stdout) == {"failed": 1, "passed": 5}


# Verdicts


def test_verdict_is_the_same_however_cases_are_spread(tmp_path: Path) -> None:
    runs = [pytest_on(tmp_path, judged("Refusing"), "--attn-sample", "60", "-k", "test_case", "-n", workers) for workers in ("0", "2")]
    for run in runs:
        assert run.returncode == 0, run.stdout
    first, second = (verdict_of(run.stdout) for run in runs)
    assert first == second
    assert first[0].startswith("refusing: ")
    assert any(re.match(r"  dropout backward +refused \(dropout .*is not supported\)", line) for line in first), first


def test_wrong_backend_fails_and_the_verdict_says_where(tmp_path: Path) -> None:
    done = pytest_on(tmp_path, judged("Future"), "-k", "T06 and fp32", "-n", "2")
    assert done.returncode == 1
    lines = verdict_of(done.stdout)
    assert any(line.startswith("  bottom_right backward") and "FAILED" in line for line in lines), lines
    assert any(re.match(r"  top_left backward +pass", line) for line in lines), lines
    assert any(line.startswith("  families that failed: T06") for line in lines), lines
    repeat = re.search(r"repeat: (pytest .*bottom_right.*)$", done.stdout, re.M)
    assert repeat, "no other process finds this backend by its name"
    arguments = shlex.split(repeat[1])[1:]
    again = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert counts_of(again.stdout) == {"failed": 1}, again.stdout


def verdict_by_feature(output: str) -> dict[str, str]:
    found = [re.match(r"  (\w+(?: \w+)?)\s+(pass|refused|FAILED|known failure|not tested)\b", line) for line in verdict_of(output)]
    return {match[1]: match[2] for match in found if match}


def test_a_fixture_that_raises_fails_the_verdict(tmp_path: Path) -> None:
    text = judged("Naive").replace("return Naive()", "raise ImportError('no kernel')")
    done = pytest_on(tmp_path, text, "-k", "T06-causal-square-64")
    assert verdict_of(done.stdout)[0].startswith("TestIt: FAILED, "), done.stdout
    assert verdict_by_feature(done.stdout)["causal backward"] == "FAILED"


def test_random_problems_that_fail_are_in_the_verdict(tmp_path: Path) -> None:
    done = pytest_on(tmp_path, judged("Wrong"), "-k", "random_problems", "--attn-seeds", "0:2")
    lines = verdict_of(done.stdout)
    assert lines[0].startswith("wrong: FAILED, no cases")
    assert re.match(r"  random problems +FAILED  \[chunks of them: 0 passed, 0 refused, 2 failed\]", lines[1]), lines
    assert "problem: Problem(" in done.stdout
    repeat = re.search(r"repeat: (pytest .*)$", done.stdout, re.M)
    assert repeat
    assert repeat[1].endswith("--attn-device cpu --attn-profile quick --attn-seeds 0:1")


def test_too_many_refusals_are_in_the_verdict(tmp_path: Path) -> None:
    done = pytest_on(tmp_path, judged("Mute"), "-k", "refusals_are_explained or T06-causal-square-64-fp32")
    lines = verdict_of(done.stdout)
    assert lines[0].startswith("mute: FAILED, 1 refused")
    assert any(line.startswith("  test_refusals_are_explained: FAILED, ") and "mute refuses" in line for line in lines), lines


def test_the_printed_verdict_is_that_of_the_certificate(tmp_path: Path) -> None:
    """Both are made of the same records: workers that die, chunks that fail, and refusals."""
    from attnzoo.testing.certificate import Certificate, Run
    from attnzoo.testing.journal import THE_END
    from attnzoo.testing.summary import lines

    record = tmp_path / "record"
    options = ["-n", "2", "-p", "attnzoo.testing.recorder", "--attn-record", str(record), "--attn-seeds", "0:2"]
    done = pytest_on(tmp_path, judged("Dying"), "-k", "T20-window-top_left-20x65 or random_problems or explained", *options)
    *recorded, end = [json.loads(line) for line in record.read_text().splitlines()]
    assert end == THE_END
    run = Run("cpu", "", "quick", "0:2")
    made = Certificate.of(recorded, backend="dying", distribution={}, versions={}, run=run)
    assert "crashed while running" in done.stdout
    assert verdict_of(done.stdout) == lines(made)
    assert verdict_of(done.stdout)[0].startswith("dying: FAILED, "), done.stdout
    assert verdict_by_feature(done.stdout)["window backward"] == "FAILED"
    assert any(line.startswith("  families that failed: T20 (") for line in lines(made))


def test_a_claimed_feature_that_no_case_tested_is_not_called_refused(tmp_path: Path) -> None:
    """As in a sample that meets it together with what is refused alone."""
    done = pytest_on(tmp_path, judged("Refusing"), "-k", "T22-dropout-causal-fp32")
    verdicts = verdict_by_feature(done.stdout)
    assert (verdicts["dropout backward"], verdicts["causal backward"]) == ("refused", "not tested"), done.stdout


def test_a_run_that_judged_nothing_does_not_say_pass(tmp_path: Path) -> None:
    chosen = "T06-causal-square-64 or T32-plain-forward or random_problems or known_failures"
    done = pytest_on(tmp_path, judged("Half"), "-k", chosen, "--attn-dtype", "float16")
    said = "half: nothing was judged, 1 refused, 1 not applicable"
    assert verdict_of(done.stdout)[0].startswith(said), "not even what is required, in another dtype"


def test_a_required_case_is_repeated_in_the_dtype_that_was_judged(tmp_path: Path) -> None:
    text = judged("Half").replace("return Half()", "return 'half'")
    text = text.replace(
        "class TestIt", "import attnzoo.registry\nattnzoo.registry._default = attnzoo.registry.Registry([Half()])\nclass TestIt"
    )
    done = pytest_on(tmp_path, text, "-k", "T32-plain-forward-fp16")
    assert counts_of(done.stdout) == {"failed": 1}, done.stdout
    assert re.search(r"repeat: python -m attnzoo.testing --backend half .*dtype='float64'", done.stdout), done.stdout


def test_known_failures_are_strict(tmp_path: Path) -> None:
    known = "{'T06-causal-bottom_right-*': 'takes top-left for bottom-right', 'T06-decode-bottom_right-*': 'the same, decoding'}"
    chosen = "T06 and bottom_right and fp32"
    done = pytest_on(tmp_path, judged("Future", known), "-k", chosen)
    assert done.returncode == 0, done.stdout
    assert counts_of(done.stdout)["xfailed"] > 10
    said = r"  bottom_right backward +known failure \(takes top-left for bottom-right\)  \[.* \d+ known failure\]"
    assert any(re.match(said, line) for line in verdict_of(done.stdout)), done.stdout
    passes = pytest_on(tmp_path, judged("Naive", known), "-k", chosen)
    assert passes.returncode == 1
    assert "XPASS(strict)" in passes.stdout


def test_known_failures_by_option(tmp_path: Path) -> None:
    option = "future:T06-causal-bottom_right-*=takes top-left"
    done = pytest_on(tmp_path, judged("Future"), "-k", "causal-bottom_right and 64x65-fp32", "--attn-known-failure", option)
    assert (done.returncode, counts_of(done.stdout)) == (0, {"xfailed": 1}), done.stdout
    other = pytest_on(
        tmp_path, judged("Future"), "-k", "causal-bottom_right and 64x65-fp32", "--attn-known-failure", option.replace("future", "naive")
    )
    assert (other.returncode, counts_of(other.stdout)) == (1, {"failed": 1}), other.stdout


def test_sample_dtypes_and_seeds_are_options(tmp_path: Path) -> None:
    text = judged("Naive")
    listed = pytest_on(tmp_path, text, "--collect-only", "--attn-sample", "7", "--attn-dtype", "float16", "--attn-seeds", "3:5")
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    assert len([name for name in names if "::test_case[" in name]) == 7
    assert [name.split("[")[1] for name in names if "random" in name] == ["chunk-3]", "chunk-4]"]
