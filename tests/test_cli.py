"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import attnzoo
from attnzoo.cli import info, main
from attnzoo.cli.output import Format, Section, show


@dataclass
class Ran:
    code: int
    out: str
    err: str

    def json(self) -> object:
        return json.loads(self.out)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command in this process with no plugin allowed."""

    def run(*arguments: str, plugins: str = "") -> Ran:
        monkeypatch.setenv("ATTNZOO_PLUGINS", plugins)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["attnzoo", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return run


@dataclass
class Distribution:
    """A distribution as pip leaves it: a module and a dist-info folder, in a folder for PYTHONPATH."""

    folder: Path

    def add(self, name: str, code: str, *backends: str) -> None:
        module = name.replace("-", "_")
        (self.folder / f"{module}.py").write_text(code)
        info = self.folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        points = "\n".join(f"{backend} = {module}" for backend in backends)
        (info / "entry_points.txt").write_text(f"[attnzoo.backends]\n{points}\n")

    def run(self, *arguments: str, **environment: str) -> Ran:
        """The command in a process of its own, these distributions its only plugins."""
        env = {**os.environ, "PYTHONPATH": str(self.folder), "COLUMNS": "200", **environment}
        done = subprocess.run([sys.executable, "-m", "attnzoo", *arguments], env=env, capture_output=True, text=True, check=False)
        return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def installed(tmp_path: Path) -> Distribution:
    return Distribution(tmp_path)


def test_help_and_version(cli) -> None:
    assert cli("--version").out.strip() == attnzoo.__version__
    assert all(command in cli("--help").out for command in ("list", "info", "doctor", "explain"))


@pytest.mark.parametrize("arguments", [["nonsense"], ["list", "--format", "yaml"], ["explain"], ["doctor", "--timeout", "-1"]])
def test_malformed_commands_exit_with_2(cli, arguments: list[str]) -> None:
    ran = cli(*arguments)
    assert (ran.code, ran.out) == (2, ""), ran
    assert ran.err


# list


def test_list_names_every_backend_and_its_distribution(cli) -> None:
    ran = cli("list", "--format", "json")
    assert ran.code == 0
    assert {"backend": "naive", "distribution": "attnzoo", "version": attnzoo.__version__} in ran.json()


def test_list_shows_plugins_and_the_names_that_nobody_can_have(installed: Distribution) -> None:
    installed.add("zoo-one", "raise RuntimeError('imported')", "mine", "shared")
    installed.add("zoo-two", "raise RuntimeError('imported')", "shared")
    installed.add("zoo-three", "raise RuntimeError('imported')", "naive")
    ran = installed.run("list", "--format", "json", ATTNZOO_PLUGINS="zoo-one,zoo-two,zoo-three")
    rows = {row["backend"]: (row["distribution"], row["version"]) for row in ran.json()}
    assert ran.code == 0
    assert rows["mine"] == ("zoo-one", "1.0")
    assert rows["shared"] == ("declared twice", "")
    assert rows["naive"] == ("attnzoo", attnzoo.__version__), "a plugin took the name of a built-in"
    assert "zoo-one 1.0 and zoo-two 1.0" in ran.err
    assert "reserved" in ran.err


def test_strict_mode_is_a_plain_error(installed: Distribution) -> None:
    installed.add("zoo-three", "", "naive")
    ran = installed.run("list", ATTNZOO_PLUGINS="zoo-three", ATTNZOO_STRICT="1")
    assert ran.code == 1
    assert ran.err.startswith("error: attnzoo plugin zoo-three"), ran.err


# info


def test_info_reports_versions_devices_backends_and_plugins(cli) -> None:
    data = cli("info", "--format", "json").json()
    assert data["versions"]["attnzoo"] == attnzoo.__version__
    assert data["devices"][0]["device"] == "cpu"
    naive = next(entry for entry in data["backends"] if entry["backend"] == "naive")
    assert naive["state"] == "loaded"
    assert naive["dtypes"] == ["bfloat16", "float16", "float32", "float64"]
    assert naive["here"].startswith("runs on ")
    assert data["plugins"][0]["distribution"] == "attnzoo"
    assert data["failures"] == {}


@pytest.mark.parametrize(("most", "multiples", "shown"), [(128, 32, "64 to 128 by 32"), (128, 1, "64 to 128"), (2**31, 1, "from 64")])
def test_info_shows_the_head_dims_in_a_few_words(most, multiples, shown) -> None:
    assert info._cell({"least": 64, "most": most, "multiples_of": multiples}) == shown


def test_info_shows_every_load_error(installed: Distribution) -> None:
    installed.add("zoo-missing", "import a_module_that_is_not_there", "missing")
    installed.add("zoo-hookless", "", "hookless")
    ran = installed.run("info", ATTNZOO_PLUGINS="zoo-missing,zoo-hookless")
    assert ran.code == 0
    assert "No module named 'a_module_that_is_not_there'" in ran.out
    assert "has no hook" in ran.out
    assert "Warning" not in ran.err, ran.err


# explain


def test_explain_names_the_backend_and_predicts(cli) -> None:
    ran = cli("explain", "--q", "2,8,64,16", "--kv-heads", "2", "--dtype", "float32", "--causal", "--grad", "q,k,v", "--format", "json")
    data = ran.json()
    assert ran.code == 0
    assert data["chosen"] in data["able"]
    assert data["cost"]["flops"] == 2 * 2 * 8 * (64 * 65 // 2) * 16 * 7, "seven products over the causal pairs"
    assert data["spec"]["kv_heads"] == 2
    assert data["spec"]["grads"] == ["q", "k", "v"]


def test_explain_takes_every_option(cli) -> None:
    options = ["--kv-len", "96", "--value-dim", "8", "--align", "bottom_right", "--window", "32,none", "--mask", "1,1,64,96"]
    options += ["--bias", "2,1,1,96", "--segments", "--scale", "0.5", "--softcap", "30", "--sinks", "--dropout", "0.1", "--lse"]
    options += ["--deterministic", "--device", "cpu", "--backend", "naive", "--grad", "bias,sinks"]
    spec = cli("explain", "--q", "2,8,64,16", *options, "--format", "json").json()["spec"]
    assert (spec["kv_len"], spec["value_dim"], spec["align"], spec["window"]) == (96, 8, "bottom_right", [32, None])
    assert (spec["mask"], spec["bias"], spec["segments"]) == ([1, 1, 64, 96], [2, 1, 1, 96], True)
    assert (spec["scale"], spec["softcap"], spec["sinks_dtype"], spec["dropout_p"]) == (0.5, 30.0, "torch.float32", 0.1)
    assert (spec["return_lse"], spec["deterministic"], spec["grads"]) == (True, True, ["bias", "sinks"])


def test_explain_of_a_layout_counts_its_blocks(cli) -> None:
    whole = cli("explain", "--q", "1,1,256,16", "--layout", "64", "--format", "json").json()
    half = cli("explain", "--q", "1,1,256,16", "--layout", "64,32", "--density", "0.5", "--format", "json").json()
    assert whole["spec"]["layout"]["full_blocks"] == 16
    assert half["spec"]["layout"]["full_blocks"] == 16
    assert half["cost"]["flops"] == whole["cost"]["flops"] / 2


def test_explain_allocates_nothing(cli) -> None:
    ran = cli("explain", "--q", "64,128,1048576,128", "--device", "cuda", "--format", "json")
    assert ran.json()["spec"]["device"] == "cuda"


def test_explain_says_no_with_1(installed: Distribution) -> None:
    installed.add("zoo-fussy", FUSSY, "fussy")
    ran = installed.run("explain", "--q", "1,1,8,4", "--backend", "fussy", ATTNZOO_PLUGINS="zoo-fussy")
    assert ran.code == 1
    assert "no backend of fussy can serve this call" in ran.out
    assert "device is cpu, it takes [tpu]" in ran.out, "brackets in a reason are text, not markup"
    assert "could serve" in ran.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kv-len", "32", "--causal"], "align is None"),
        (["--kv-heads", "3"], "k has 3 heads"),
        (["--dtype", "int8"], "dtype is 'int8'"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--grad", "q,bias"], "grad names 'bias'"),
        (["--window", "1"], "window is"),
        (["--layout", "0"], "block is 0"),
        (["--backend", "nave"], "did you mean 'naive'?"),
    ],
)
def test_explain_of_a_malformed_call_exits_with_2(cli, options: list[str], said: str) -> None:
    ran = cli("explain", "--q", "2,8,64,16", *options)
    assert (ran.code, ran.out) == (2, ""), ran
    assert said in ran.err


@pytest.mark.parametrize("q", ["2,8,64", "2,8,x,16"])
def test_explain_checks_its_sizes(cli, q: str) -> None:
    ran = cli("explain", "--q", q)
    assert (ran.code, ran.out) == (2, ""), ran
    assert "--q" in ran.err


@pytest.mark.parametrize(
    "options",
    [["--q=-2,8,64,16"], ["--q", "2,8,64,16", "--kv-len", "-1"], ["--q", "2,8,64,16", "--mask=-64,64"], ["--q", f"1,1,{2**64},16"]],
    ids=["q", "kv_len", "mask", "beyond 64 bits"],
)
def test_explain_takes_no_impossible_size(cli, options: list[str]) -> None:
    ran = cli("explain", *options)
    assert (ran.code, ran.out) == (2, ""), ran
    assert "size" in ran.err, ran.err


# doctor

FUSSY = """
import torch
import attnzoo

class Fussy(attnzoo.Backend):
    name = "fussy"
    capabilities = attnzoo.Capabilities(devices={"tpu"}, dtypes={torch.float32})
    def unsupported_reasons(self, spec):
        return [f"device is {spec.device}, it takes [tpu]"]
    def attend(self, spec, inputs):
        raise AssertionError("asked although it refused")

@attnzoo.hookimpl
def attnzoo_backends():
    return [Fussy()]
"""

PLUGIN = """
import os, signal, time
import torch
import attnzoo
from attnzoo.backends.naive import Naive

class Mine(Naive):
    name = "mine"
    def attend(self, spec, inputs):
        {attend}

@attnzoo.hookimpl
def attnzoo_backends():
    return [Mine()]
"""

BROKEN = {
    "import error": ("import a_module_that_is_not_there", "No module named 'a_module_that_is_not_there'", "ATTNZOO_PLUGINS"),
    "exit on import": ("import os; os._exit(0)", "exited early with code 0, importing its plugin", "report it to zoo-mine"),
    "crash on import": ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV, importing its plugin", "report it to zoo-mine"),
    "sys.exit": (PLUGIN.format(attend="raise SystemExit(0)"), "SystemExit: 0, running the forward", "ATTNZOO_PLUGINS"),
    "error": (
        PLUGIN.format(attend="raise RuntimeError('no kernel image')"),
        "RuntimeError: no kernel image",
        "update or uninstall zoo-mine",
    ),
    "exit": (PLUGIN.format(attend="os._exit(3)"), "exited with code 3, running the forward on", "report it to zoo-mine"),
    "hang": (PLUGIN.format(attend="time.sleep(600)"), "no end within 12 s, running the forward", "--timeout"),
    "wrong": (PLUGIN.format(attend="return super().attend(spec, inputs)[0] * 1.1, None"), "o is off by", "attnzoo.conformance"),
    "nan": (PLUGIN.format(attend="return super().attend(spec, inputs)[0] * float('nan'), None"), "o is off by nan", "attnzoo.conformance"),
    "no gradient": (PLUGIN.format(attend="return super().attend(spec, inputs)[0].detach(), None"), "running the backward", "update or"),
    "odd reasons": (
        PLUGIN.format(attend="pass\n    def unsupported_reasons(self, spec):\n        return 'no'"),
        "unsupported_reasons returned 'no'",
        "update or",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_doctor_isolates_and_advises(installed: Distribution, fault: str) -> None:
    code, said, advice = BROKEN[fault]
    installed.add("zoo-mine", code, "mine")
    timeout = "12" if fault == "hang" else "120"
    ran = installed.run("doctor", "mine", "--timeout", timeout, "--format", "json", ATTNZOO_PLUGINS="zoo-mine")
    assert ran.code == 1, ran
    (finding,) = ran.json()
    assert finding["verdict"] == "broken"
    assert said in finding["detail"], finding
    assert advice in finding["advice"], finding


def test_doctor_goes_on_after_a_crash(installed: Distribution) -> None:
    installed.add("zoo-mine", "import os; os._exit(0)", "mine")
    ran = installed.run("doctor", "mine", "naive", ATTNZOO_PLUGINS="zoo-mine")
    assert ran.code == 1
    assert "broken" in ran.out
    assert "naive" in ran.out
    assert "right" in ran.out
    assert "naive (2 of 2)" in ran.err, "progress goes to stderr"


def test_doctor_does_not_call_a_refusal_broken(installed: Distribution) -> None:
    installed.add("zoo-fussy", FUSSY, "fussy")
    ran = installed.run("doctor", "fussy", "--format", "json", ATTNZOO_PLUGINS="zoo-fussy")
    assert ran.code == 0, ran
    (finding,) = ran.json()
    assert finding["verdict"] == "refuses"
    assert "it takes [tpu]" in finding["detail"]


def test_doctor_ends_the_children_of_a_backend_that_hangs(installed: Distribution, tmp_path: Path) -> None:
    marker = tmp_path / "alive"
    spawn = f"import subprocess, sys, time; code = 'import time; time.sleep(6); open({str(marker)!r}, {'w'!r})'\n"
    installed.add("zoo-mine", spawn + "subprocess.Popen([sys.executable, '-c', code]); time.sleep(600)", "mine")
    assert installed.run("doctor", "mine", "--timeout", "4", ATTNZOO_PLUGINS="zoo-mine").code == 1
    subprocess.run([sys.executable, "-c", "import time; time.sleep(4)"], check=True)
    assert not marker.exists(), "a grandchild outlived its backend's time limit"


def test_doctor_of_an_unknown_backend_exits_with_2(cli) -> None:
    ran = cli("doctor", "nave")
    assert (ran.code, ran.out) == (2, "")
    assert "did you mean 'naive'?" in ran.err


# output


def test_markdown_keeps_a_row_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    show(None, [Section("A title", ("a", "b"), [("x | y", "two\nlines")])], Format.MD)
    assert capsys.readouterr().out == "A title\n\n| a | b |\n| --- | --- |\n| x \\| y | two<br>lines |\n"


def test_table_takes_cells_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    show(None, [Section("[title]", ("a",), [("[bold]x[/bold]",)])], Format.TABLE)
    out = capsys.readouterr().out
    assert "[bold]x[/bold]" in out
    assert "[title]" in out


@pytest.mark.parametrize(("arguments", "tiles"), [([], 4), (["--causal"], 3)])
def test_trace_shows_each_tile_and_ends_at_standard_attention(cli, arguments: list[str], tiles: int) -> None:
    shown = cli("trace", *arguments)
    assert shown.code == 0, shown.err
    assert shown.out.count("queries ") == tiles, shown.out
    assert all(word in shown.out for word in ("rescale", "output so far", "standard attention: they differ by at most")), shown.out
    data = cli("trace", *arguments, "--format", "json").json()
    assert len(data["steps"]) == tiles, data
    assert data["difference"] < 1e-6, data["difference"]


def test_io_accounts_for_the_papers_table(cli) -> None:
    shown = cli("io")
    assert shown.code == 0, shown.err
    assert all(word in shown.out for word in ("standard attention", "ours on 9.0", "dQ", "41.7", "40.3")), shown.out
    data = cli("io", "--q", "1,16,8192,128", "--layout", "128,128", "--density", "0.5", "--grad", "none", "--format", "json").json()
    assert [step["tile"] for step in data["ours on 9.0"]["steps"]] == [[128, 128]], data
    assert cli("io", "--q", "1,2,3").code == 2
