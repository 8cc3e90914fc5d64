"""A backend that hangs costs a test, not the run: every test of the kit has a time limit."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnzoo import time_limit
from attnzoo.testing.suite import BackendConformance

HANGING = """
import ctypes
import threading
import time

import pytest
from attnzoo.backends.naive import Naive
from attnzoo.testing.suite import BackendConformance

def sleep():
    while True:
        time.sleep(1)

def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def hold_the_interpreter():
    '''A deadlock in C: no other thread of Python runs, and no handler of a signal.'''
    c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)

HANGS = {1.0: sleep, 0.0: deadlock, -0.125: hold_the_interpreter}

class Hanging(Naive):
    '''Hangs at three scales.'''
    name = "hanging"
    def attend(self, spec, inputs):
        HANGS.get(spec.scale, lambda: None)()
        return super().attend(spec, inputs)

class TestIt(BackendConformance):
    @pytest.fixture
    def backend(self):
        return Hanging()
"""
STUCK = ("T14-scale-zero-fp32", "T14-scale-negative-fp32")
HONEST = ("T14-scale-none-fp32", "T14-scale-tiny-fp32", "T14-scale-none-fp16")


def start(folder: Path, text: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """pytest of its own on one file; the settings of this repository don't reach it."""
    if not (folder / "pytest.ini").exists():
        (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(folder), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)


def counts_of(output: str) -> dict[str, int]:
    return {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", output.strip().splitlines()[-1])}


def test_every_hang_costs_a_test_and_a_worker(tmp_path: Path) -> None:
    """In a lock, and in C with the interpreter held: each fails, with the stack; the others are judged; the verdict comes."""
    record = tmp_path / "record"
    chosen = " or ".join([*STUCK, *HONEST])
    options = ["-n", "2", "--timeout", "25", "-p", "attnzoo.testing.recorder", "--attn-record", str(record)]
    done = start(tmp_path, HANGING, "-k", chosen, *options)
    assert counts_of(done.stdout) == {"failed": 2, "passed": 3}, done.stdout + done.stderr
    *lines, end = [json.loads(line) for line in record.read_text().splitlines()]
    assert end == {"test": "the end"}
    said = {line["parameters"]: line.get("error", "") for line in lines}
    for case in STUCK:
        assert said[case] == "no end within 0:00:25, so it was stopped, and its worker with it; --timeout SECONDS sets another limit"
    assert [said[case] for case in HONEST] == ["", "", ""]
    assert "in hold_the_interpreter" in done.stdout, "the stack"
    assert "hanging: FAILED, 3 passed, 2 failed" in done.stdout


def test_without_workers_a_hang_costs_its_test(tmp_path: Path) -> None:
    """A random problem too: Hypothesis must not try it again."""
    text = HANGING.replace("HANGS.get(spec.scale, lambda: None)()", "spec.causal and sleep()")
    chosen = "T06-causal-square-64-fp32 or T14-scale-none-fp32 or random_problems"
    done = start(tmp_path, text, "-k", chosen, "--timeout", "15", "--attn-seeds", "0:1")
    assert counts_of(done.stdout) == {"failed": 2, "passed": 1}, done.stdout + done.stderr
    assert len(set(re.findall(r"repeat: (pytest .*)$", done.stdout, re.M))) == 2, done.stdout
    assert "Timeout (>15.0s)" in done.stdout
    assert re.search(r"random problems +FAILED", done.stdout)


def test_the_process_ends_where_no_handler_runs(tmp_path: Path) -> None:
    """Without workers, in C with the interpreter held: the run ends, and says where."""
    text = HANGING.replace("import ctypes", "import ctypes\nimport attnzoo.time_limit\nattnzoo.time_limit.GRACE = 5")
    done = start(tmp_path, text, "-k", "T14-scale-negative-fp32", "--timeout", "10")
    assert done.returncode == 1
    assert "Timeout (0:00:15)!" in done.stderr
    assert "in hold_the_interpreter" in done.stderr


LIMITS = """
import pytest

@pytest.fixture
def attn_record():
    pass

@pytest.fixture(autouse=True)
def limit(request):
    marker = request.node.get_closest_marker("timeout")
    print("limit", marker and marker.args[0], request.config.getoption("--timeout"))

def test_of_kit(attn_record):
    pass

@pytest.mark.timeout(33)
def test_with_its_own(attn_record):
    pass

def test_of_somebody():
    pass
"""


@pytest.mark.parametrize(
    ("arguments", "setting", "environ", "of_kit"),
    [
        ((), "", {}, "900 None"),
        (("--attn-profile", "deep"), "", {}, "3600 None"),
        (("--timeout", "0"), "", {}, "None 0.0"),
        (("--timeout", "7"), "", {}, "None 7.0"),
        ((), "timeout = 50", {}, "None None"),
        ((), "", {"PYTEST_TIMEOUT": "50"}, "None None"),
    ],
)
def test_the_limit_of_the_user_comes_first(
    tmp_path: Path, arguments: tuple[str, ...], setting: str, environ: dict[str, str], of_kit: str
) -> None:
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{setting}\n")
    done = start(tmp_path, LIMITS, "-rP", *arguments, **environ)
    option = of_kit.split()[1]
    assert re.findall(r"^limit (.*)$", done.stdout, re.M) == [of_kit, f"33 {option}", f"None {option}"], done.stdout


def test_every_test_of_the_kit_is_known_as_one() -> None:
    tests = {name: inspect.signature(test) for name, test in vars(BackendConformance).items() if name.startswith("test_")}
    assert len(tests) == 4
    unknown = [name for name, signature in tests.items() if not time_limit.is_of_kit(SimpleNamespace(fixturenames=signature.parameters))]
    assert not unknown


def test_without_pytest_timeout_the_kit_runs_as_before(tmp_path: Path) -> None:
    text = HANGING + "\ndef test_none(request):\n    assert not request.config.pluginmanager.hasplugin('timeout')\n"
    done = start(tmp_path, text, "-p", "no:timeout", "-n", "1", "-k", "T14-scale-none-fp32 or test_none")
    assert counts_of(done.stdout) == {"passed": 2}, done.stdout + done.stderr


def test_other_crashes_keep_their_message(tmp_path: Path) -> None:
    report = SimpleNamespace(longrepr="worker 'gw0' crashed", node=SimpleNamespace(gateway=SimpleNamespace(id="gw0"), workerinput={}))
    reporter = time_limit.StuckWorkers()
    reporter.pytest_configure_node(report.node)
    stacks = Path(report.node.workerinput["attn_stacks"])
    for text in (None, "", "Fatal Python error: Segmentation fault"):
        if text is not None:
            stacks.write_text(text)
        reporter.pytest_handlecrashitem(report)
        assert report.longrepr == "worker 'gw0' crashed"
    reporter.pytest_unconfigure()
    assert not stacks.parent.exists()
