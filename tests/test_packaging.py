"""What is shipped: the wheel and its metadata, an installation elsewhere, the constraints, and the commands of README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import attnzoo
from attnzoo.registry import BUILT_IN

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PLUGINS = sorted(file.parent for file in (ROOT / "plugins").glob("*/pyproject.toml"))


def run(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(project: Path, folder: Path) -> Path:
    code = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    run(sys.executable, "-c", code, str(folder), cwd=project)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_is_pure_and_holds_the_package_alone(wheel: Path) -> None:
    assert wheel.name == f"attnzoo-{attnzoo.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"attnzoo", f"attnzoo-{attnzoo.__version__}.dist-info"}
    assert "attnzoo/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tracked = set(run("git", "ls-files", "attnzoo").splitlines())
    assert tracked <= set(names), f"not in the wheel: {sorted(tracked - set(names))}"
    assert any(name.startswith("attnzoo/template/project/") for name in names), "the template of `attnzoo new` is not shipped"


def test_metadata_says_what_is_needed(metadata: Message) -> None:
    requires = metadata.get_all("Requires-Dist", [])
    core = {re.split(r"[ ;<>=!~]", line)[0] for line in requires if "extra ==" not in line}
    assert core == {"torch", "einops", "pluggy", "typer", "rich"}
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    triton = [line for line in requires if line.startswith("triton")]
    assert triton, "the extra triton requires nothing"
    for line in triton:
        assert "extra == 'triton'" in line.replace('"', "'"), f"triton is no extra: {line}"
        assert "Linux" in line, f"no marker for Linux: {line}"
        assert "==3" not in line.replace(" ", ""), f"triton is pinned exactly: {line}"


def test_extras_are_those_promised(metadata: Message) -> None:
    assert {"triton", "bench", "test", "hf", "docs"} <= set(metadata.get_all("Provides-Extra", []))


def test_wheels_installed_elsewhere_work_plugin_included(wheel: Path, tmp_path: Path) -> None:
    """Installed into a folder that comes first on sys.path, beside the editable copy that runs the tests."""
    target = tmp_path / "site"
    wheels = [wheel]
    for plugin in PLUGINS:
        folder = tmp_path / plugin.name
        folder.mkdir()
        wheels.append(build_wheel(plugin, folder))
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), *map(str, wheels))
    code = f"""
import attnzoo, torch
assert attnzoo.__file__.startswith({str(target)!r}), attnzoo.__file__
q = torch.randn(1, 2, 8, 4)
for name in ("sdpa", "flex_eager"):
    difference = attnzoo.attention(q, q, q, causal=True, backend=name) - attnzoo.attention(q, q, q, causal=True, backend="naive")
    assert difference.abs().max() < 1e-5, name
for name in ("fa2", "fa3", "fa4"):
    assert any("is not installed: pip install" in reason for reason in attnzoo.explain(q, q, q).rejected[name]), name
import attnzoo_sdpa, attnzoo_flex, attnzoo_flash_attn
for module in (attnzoo_sdpa, attnzoo_flex, attnzoo_flash_attn):
    assert module.__file__.startswith({str(target)!r}), module.__file__
"""
    names = [plugin.name for plugin in PLUGINS]
    environment = {"PYTHONPATH": str(target), "ATTNZOO_PLUGINS": ",".join(names), "ATTNZOO_STRICT": "1"}
    run(sys.executable, "-c", code, cwd=tmp_path, **environment)
    listed = run(sys.executable, str(target / "bin" / "attnzoo"), "list", cwd=tmp_path, **environment)
    assert all(name in listed for name in names), listed


def test_constraints_pin_every_requirement() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "one exact version a line, no local builds"
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    project = PYPROJECT["project"]
    required = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    names = {re.split(r"[ ;<>=!~\[]", line)[0].lower() for line in required}
    assert not names - pinned, f"constraints.txt lacks {sorted(names - pinned)}"


def readme_block(name: str) -> str:
    """The fenced block under the marker `<!-- NAME command -->`, as .ci/run finds it."""
    found = re.search(rf"^<!-- {name} command -->\n```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert found, f"README.md has no block under <!-- {name} command -->"
    return found[1]


@pytest.mark.parametrize(("name", "runs"), [("job", "examples/sentence_embeddings.py"), ("test", "pytest -n auto")])
def test_readme_commands_set_up_and_run(name: str, runs: str) -> None:
    command = readme_block(name)
    assert "python3 -m venv .venv" in command
    assert "-c constraints.txt" in command
    assert "-e plugins/attnzoo-sdpa" in command
    assert runs in command
    run("bash", "-n", "-c", command)


def test_ci_finds_the_commands_in_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    function = re.search(r"^readme_command\(\) \{\n.*?^\}$", script, re.M | re.S)
    assert function, ".ci/run has no readme_command"
    for name in ("job", "test"):
        assert run("bash", "-c", f"{function[0]}\nreadme_command {name}") == readme_block(name)
        assert re.search(rf"^run_readme_command {name}$", script, re.M), f".ci/run does not run the {name} command"


def test_readme_paths_exist() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert (ROOT / target).exists(), f"{page} links to {target}, which is not there"


def test_readme_lists_the_backends_that_are_there() -> None:
    section = re.search(r"^## Backends\n(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)
    assert section, "README.md has no section Backends"
    rows = [line for line in section[1].splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    plugins = [tomllib.loads(file.read_text())["project"]["entry-points"] for file in (folder / "pyproject.toml" for folder in PLUGINS)]
    shipped = {*BUILT_IN.names, *[name for points in plugins for name in points["attnzoo.backends"]]}
    assert listed == shipped, f"README.md lists {sorted(listed - shipped)} too much and lacks {sorted(shipped - listed)}"
