"""The run: right before fast, a crash or a hang costs one cell, finished cells are on disk, and a second run resumes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from distribution import hook, install

from attnzoo.bench.matrix import Matrix
from attnzoo.bench.prepared import Prepared
from attnzoo.bench.processes import Contestant
from attnzoo.bench.results import Results
from attnzoo.bench.run import contestants, run
from attnzoo.bench.worker import Worker, free_bytes
from attnzoo.bench.workload import Workload
from attnzoo.registry import default
from attnzoo.testing import ConformanceError

SMALL = Workload(batch=2, heads=2, kv_heads=1, length=40, kv_length=56, head_dim=16, causal=True, direction="backward")

FAULTS = """
    import os, time
    import torch

    class Faulty(Good):
        def attend(self, spec, inputs):
            if self.name == "crashing":
                os._exit(3)
            if self.name == "hanging":
                open(os.environ.get("PID_FILE", os.devnull), "w").write(str(os.getpid()))
                time.sleep(600)
            if self.name == "asking" and input():
                raise AssertionError("a plugin read a request")
            if self.name == "raising":
                raise ZeroDivisionError("divided by nothing")
            if self.name == "greedy":
                torch.empty(2**50)
            if self.name == "writing":
                inputs.q.data.zero_()
            if self.name == "broken" and (spec.grads or hasattr(self, "is_broken")):
                self.is_broken = True
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if self.name == "shouting":
                raise ValueError("\\x1b[31mred \\udcff")
            o, lse = super().attend(spec, inputs)
            self.calls = getattr(self, "calls", 0) + 1
            if self.name == "later" and self.calls > 2:
                inputs.v.data.zero_()
            if self.name == "wide":
                o = o.double()
            return (o * 1.01 if self.name == "wrong" or (self.name == "late" and self.calls > 2) else o), lse

        def unsupported_reasons(self, spec):
            return ["it is tired"] if self.name == "tired" else []
"""
NAMES = ("crashing", "raising", "greedy", "wrong", "late", "wide", "tired", "writing", "later", "broken", "shouting")


def quiet(workload, step, finished):
    pass


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Backends with a fault each, as an installed plugin of the processes that are started."""
    names = (*NAMES, "hanging", "asking")
    code = {"faulty": hook(f"[Faulty(name) for name in {names!r}]", before=FAULTS)}
    install(tmp_path, "faulty", dict.fromkeys(names, "faulty"), code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ATTNZOO_PLUGINS", "faulty")
    return tmp_path


def test_every_fault_has_its_status_and_costs_its_own_cells(faulty, tmp_path):
    matrix = Matrix((SMALL, dataclasses.replace(SMALL, direction="forward")), rounds=2, seconds=0.001)
    results = Results({}, {"relative_to": "naive"}, path=tmp_path / "out.json")
    run(matrix, contestants(("naive", *NAMES), "cpu", 120, lambda note: pytest.fail(note)), results, quiet)
    found = {cell.key: cell for cell in results.cells}
    for workload in matrix.workloads:
        status = {name: found[workload.id, name].status for name in ("naive", *NAMES)}
        assert status == {
            "naive": "time",
            "crashing": "error",
            "raising": "error",
            "greedy": "out of memory",
            "wrong": "wrong",
            "late": "wrong",
            "wide": "wrong",
            "tired": "unsupported",
            "writing": "wrong",
            "later": "wrong",
            "broken": "error" if workload is SMALL else "time",
            "shouting": "error",
        }, status
    detail = {name: found[SMALL.id, name].detail for name in NAMES}
    assert "exited with code 3" in detail["crashing"], detail
    assert "ZeroDivisionError: divided by nothing" in detail["raising"], detail
    assert "o: " in detail["wrong"], detail
    assert detail["late"].startswith("when timed, unlike the first call: "), detail
    assert detail["wide"] == "o is torch.float64, q is torch.float32", detail
    assert detail["tired"] == "it is tired", detail
    assert detail["writing"] == "it wrote to q", detail
    assert detail["later"] == "when timed, unlike the first call: it wrote to v", detail
    assert detail["shouting"] == "ValueError: ?[31mred ?", detail
    timed = found[SMALL.id, "naive"]
    assert len(timed.rounds) == 2, timed
    assert timed.peak is not None
    assert timed.peak > 2 * 2 * 40 * 56 * 4, f"the scores alone take more than {timed.peak} bytes"
    assert Results.read(tmp_path / "out.json").cells == results.cells, "what is on disk is what was found"


@pytest.mark.parametrize(("error", "status"), [(MemoryError, "out of memory"), (ConformanceError, "wrong")])
def test_a_cell_that_failed_keeps_no_memory(monkeypatch, error, status):
    """The others' processes share the device, and the next that prepares may need all of it."""
    worker, held, seen = Worker("naive"), [], []

    def attend(spec, inputs):
        large, raised = torch.empty(8), error("no")
        held.extend([weakref.ref(large), weakref.ref(inputs.q)])
        raised.of = raised, large  # an error that holds what it is about, and itself
        raise raised

    monkeypatch.setattr(worker.backend, "attend", attend)
    monkeypatch.setattr(worker, "_free", lambda: seen.append([ref() for ref in held if ref() is not None]))
    answer = worker.answer({"do": "prepare", "workload": SMALL.to_dict(), "side_by_side": 1})
    assert answer["status"] == status, answer
    assert len(held) == 2
    assert seen[-1] == [], "memory is handed back while tensors still hold it"
    assert len(seen) == 2, "before it, and after it"


def test_a_hang_ends_with_the_time_limit(faulty):
    contestant = Contestant("hanging", timeout=120)
    try:
        assert contestant.ask(do="devices")["status"] == "ok"
        contestant.timeout = 0.5
        answer = contestant.ask(do="prepare", workload=SMALL.to_dict(), side_by_side=1)
        assert answer == {"status": "error", "detail": "no answer within 0.5 s (prepare)"}, answer
    finally:
        contestant.close()


@pytest.mark.parametrize(
    ("name", "limit", "free"),
    [
        ("memory.max", "max", 2**30),
        ("memory.max", str(2**20), 2**20),
        ("memory/memory.limit_in_bytes", str(2**62), 2**30),
        (None, "", 2**30),
    ],
)
def test_no_more_memory_is_free_than_a_container_may_use(tmp_path, name, limit, free):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {2**20} kB\n")
    if name is not None:
        file = tmp_path / "sys" / "fs" / "cgroup" / name
        file.parent.mkdir(parents=True)
        file.write_text(limit + "\n")
    assert free_bytes(tmp_path) == free


def test_a_plugin_can_not_read_the_requests(faulty):
    contestant = Contestant("asking", timeout=120)
    try:
        answer = contestant.ask(do="prepare", workload=SMALL.to_dict(), side_by_side=1)
        assert answer == {"status": "error", "detail": "EOFError: EOF when reading a line"}, answer
    finally:
        contestant.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_process_that_hangs_ends_with_a_benchmark_that_is_killed(faulty, tmp_path, monkeypatch):
    file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(file))
    script = "import sys, json; from attnzoo.bench.processes import Contestant\n"
    script += "Contestant('hanging', timeout=600).ask(do='prepare', workload=json.loads(sys.argv[1]), side_by_side=1)"
    parent = subprocess.Popen([sys.executable, "-c", script, json.dumps(SMALL.to_dict())])
    try:
        pid = waited_for(lambda: file.exists() and file.read_text(), 120)
        assert state(pid) != "gone"
    finally:
        parent.kill()
        parent.wait()
    waited_for(lambda: state(pid) == "gone", 30)


def state(pid):
    """Of a process; one that nobody has waited for yet is gone too."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return "gone" if text.rpartition(")")[2].split()[0] == "Z" else "here"


def waited_for(found, seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        value = found()
        if value:
            return value
        time.sleep(0.1)
    raise TimeoutError(f"not within {seconds} s")


@dataclasses.dataclass
class Fake:
    """Answers without a process; `ends_after` requests it is interrupted, as by Ctrl-C."""

    name: str
    ends_after: int = 10**6
    asked: list = dataclasses.field(default_factory=list)
    is_closed: bool = False

    def send(self, **request):
        self.asked.append(request)
        if len(self.asked) > self.ends_after:
            raise KeyboardInterrupt

    def answer(self):
        ready = {"status": "ok", "first_call": 0.5, "peak": 1000}
        return {"status": "ok", "times": [float(len(self.asked))] * 3} if self.asked[-1]["do"] == "burst" else ready

    def ask(self, **request):
        self.send(**request)
        return self.answer()

    def close(self):
        self.is_closed = True


def test_a_run_that_is_cut_off_is_resumed(tmp_path):
    path = tmp_path / "out.json"
    matrix = Matrix((SMALL, dataclasses.replace(SMALL, length=8)), rounds=3)
    first = {"a": Fake("a", ends_after=6), "b": Fake("b")}
    with pytest.raises(KeyboardInterrupt):
        run(matrix, first, Results({"name": "here"}, path=path), quiet)
    assert all(fake.is_closed for fake in first.values()), "a process is left behind"
    kept = Results.read(path)
    assert {cell.key for cell in kept.cells} == {(SMALL.id, "a"), (SMALL.id, "b")}, "the finished workload is on disk, the other isn't"
    second = {"a": Fake("a"), "b": Fake("b")}
    run(matrix, second, kept, quiet)
    asked = {request["workload"]["length"] for request in second["a"].asked if request["do"] == "prepare"}
    assert asked == {8}, f"lengths {asked} were run again"
    assert len(Results.read(path).cells) == 4


def test_two_runs_into_one_file_lose_no_cell_of_the_first(tmp_path):
    path = tmp_path / "out.json"
    first, second = Results({}, path=path), Results({}, path=path)
    first.claim()
    with pytest.raises(ValueError, match="was written by another process"):
        second.claim()
    run(Matrix((SMALL,)), {"a": Fake("a")}, first, quiet)
    resumed = Results.read(path)
    resumed.add(())
    with pytest.raises(ValueError, match="was written by another process"):
        first.add(())
    assert [cell.key for cell in Results.read(path).cells] == [(SMALL.id, "a")]
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"], "a draft is left behind"


def test_a_file_that_got_no_cell_is_removed(tmp_path):
    path = tmp_path / "out.json"
    empty = Results({}, path=path)
    empty.claim()
    assert Results.read(path).cells == []
    empty.drop_claim()
    assert not path.exists()
    kept = Results({}, path=path)
    run(Matrix((SMALL,)), {"a": Fake("a")}, kept, quiet)
    kept.drop_claim()
    assert path.exists()


def test_a_workload_runs_on_the_backends_that_it_names():
    results = Results({})
    matrix = Matrix((SMALL, dataclasses.replace(SMALL, length=8)), rounds=3, only={SMALL.id: ("b",)})
    run(matrix, {"a": Fake("a"), "b": Fake("b")}, results, quiet)
    assert [(cell.workload.length, cell.backend) for cell in results.cells] == [(SMALL.length, "b"), (8, "a"), (8, "b")]


@pytest.mark.parametrize("side_by_side", [1, 2])
def test_backends_take_turns(side_by_side):
    order = []

    class Noted(Fake):
        def send(self, **request):
            order.append(self.name + request["do"][0])
            super().send(**request)

        def answer(self):
            order.append(self.name)
            return super().answer()

    run(Matrix((SMALL,), rounds=3, side_by_side=side_by_side), {name: Noted(name) for name in "abc"}, Results({}), quiet)
    prepared = {1: "ap a bp b cp c", 2: "ap bp a b cp c"}[side_by_side]
    timed = " ".join(f"{name}b {name}" for name in "abcbcacab")
    assert " ".join(order).startswith(f"{prepared} {timed} "), order


def test_processes_that_judge_side_by_side_share_the_threads(monkeypatch):
    prepared = Prepared.of(default().get("naive"), SMALL)
    threads, seen = torch.get_num_threads(), []
    monkeypatch.setattr(Prepared, "assert_right", lambda self, found: seen.append(torch.get_num_threads()))
    torch.set_num_threads(4)
    try:
        for side_by_side in (1, 2, 8):
            prepared.first_call(side_by_side=side_by_side)
            assert torch.get_num_threads() == 4, "what is timed has all of them"
    finally:
        torch.set_num_threads(threads)
    assert seen == [4, 2, 1]


@pytest.mark.parametrize("layout", ["", "random:0.5"])
@pytest.mark.parametrize("name", ["o", "dq", "dk", "dv"])
def test_a_small_error_in_any_head_is_wrong(name, layout):
    workload = Workload(
        batch=2, heads=6, kv_heads=3, length=96, kv_length=96, head_dim=16, causal=not layout, direction="both", layout=layout, block=32
    )
    prepared = Prepared.of(default().get("tiled"), workload)
    o = prepared.forward()
    right = dict(zip(("dq", "dk", "dv"), prepared.backward(o))) | {"o": o.detach()}
    prepared.assert_right(right)
    for batch in range(2):
        for head in range(right[name].shape[1]):
            found = {**right, name: right[name].clone()}
            found[name][batch, head, 50] *= 1.01
            kv_head = head if name in ("dk", "dv") else head // 2
            with pytest.raises(ConformanceError, match=rf"^{name}: .* in batch {batch}, key-value head {kv_head}$"):
                prepared.assert_right(found)


def test_of_more_heads_than_it_has_time_for_some_are_judged_and_all_are_finite(monkeypatch):
    from attnzoo.bench import truth

    monkeypatch.setitem(truth.JUDGED, "cpu", 3 * 32 * 32)
    prepared = Prepared.of(default().get("tiled"), Workload(batch=3, heads=3, kv_heads=3, length=32, kv_length=32, head_dim=16))
    right = prepared.forward()
    for place in range(9):
        o = right.clone()
        o[place // 3, place % 3] *= 1.001
        if place in (0, 4, 8):
            with pytest.raises(ConformanceError, match=r"^o: "):
                prepared.assert_right({"o": o})
        else:
            prepared.assert_right({"o": o})
        o[place // 3, place % 3, 5, 5] = float("nan")
        with pytest.raises(ConformanceError, match="not finite"):
            prepared.assert_right({"o": o})


def test_long_sequences_are_judged_range_by_range(monkeypatch):
    from attnzoo.bench import truth

    monkeypatch.setitem(truth.LARGEST, "cpu", 96 * 10)  # ranges of ten queries
    workload = Workload(heads=1, kv_heads=1, length=96, kv_length=96, head_dim=16, causal=True, dtype="bfloat16", direction="both")
    prepared = Prepared.of(default().get("tiled"), workload)
    prepared.first_call()
    monkeypatch.setattr(prepared.backend, "forward", lambda spec, inputs: (torch.zeros_like(inputs.q), torch.zeros(1, 1, 96)), raising=True)
    with pytest.raises(ConformanceError, match=r"^o: "):
        prepared.first_call()


def test_the_command_line(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "attnzoo", "bench", "--backend", "naive", "--backend", "tiled", "--length", "64", "--heads", "2"]
    command += ["--device", "cpu", "--rounds", "2", "--seconds", "0.001", "--output", str(out)]

    def ran(*arguments):
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)

    done = ran("--format", "json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert [cell["status"] for cell in shown["cells"]] == ["time", "time"], shown
    assert {"name", "versions", "commit", "ceilings"} <= shown["machine"].keys()
    assert shown["cells"][0]["command"].startswith("attnzoo bench --backend naive --batch 1"), shown["cells"][0]["command"]
    again = ran()
    assert again.returncode == 2, "an existing file is not written over"
    assert "--resume" in again.stderr, again.stderr
    more = ran("--resume", "--length", "32", "--format", "json")
    assert more.returncode == 0, more.stderr
    kept = Results.read(out)
    assert [(cell.workload.length, cell.run) for cell in kept.cells] == [(64, 0), (64, 0), (32, 1), (32, 1)]
    assert [each["started"] >= kept.machine["started"] for each in kept.resumed] == [True]
