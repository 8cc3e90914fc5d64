"""judge: runs the conformance kit on an installed backend, in a pytest of its own, and certifies what it found."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from attnzoo.testing.certificate import Certificate, Run
from attnzoo.testing.journal import FOLDER, THE_END

if TYPE_CHECKING:
    import torch

    from attnzoo.backend import Backend

__all__ = ["SuiteError", "device_name", "judge", "missing_packages", "require_claimed", "require_device"]

NEEDED = {"pytest": "pytest", "xdist": "pytest-xdist", "pytest_timeout": "pytest-timeout", "hypothesis": "hypothesis"}
VERSIONS = ("torch", "triton")
STDERR = 2
SANITIZER_FOUND = 86  # an exit code that nothing else here gives


class SuiteError(RuntimeError):
    """The kit came to no end, so there is nothing to certify."""


def missing_packages() -> list[str]:
    """What the kit needs and is not installed."""
    return [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]


def judge(
    backend: str,
    run: Run,
    *,
    workers: str,
    known_failures: Sequence[str],
    distribution: dict[str, str],
    sanitizer: str | None = None,
    timeout: float | None = None,
) -> Certificate:
    """Run the whole kit; pytest's own output goes to stderr.

    Args:
        workers: of pytest-xdist: a number, or "auto"; 0 for none.
        known_failures: as `--attn-known-failure` takes them.
        distribution: name and version of what the backend comes from.
        sanitizer: a tool of compute-sanitizer, under which the kit then runs; it must be on the PATH.
        timeout: seconds that a test may take, 0 for as long as it likes; None for the usual limit, and none under a sanitizer.

    Raises:
        SuiteError: pytest was interrupted, or crashed, or the sanitizer found an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        record, settings = Path(folder, "record"), Path(folder, "pytest.ini")
        settings.write_text("[pytest]\n")  # so that no settings of the folder we stand in are read
        command = [
            *sanitized(sanitizer),
            sys.executable,
            "-m",
            "pytest",
            "-c",
            str(settings),
            "-q",
            "-p",
            "no:cacheprovider",
            "-n",
            workers,
            "--dist",
            "worksteal",  # the last cases, random problems, are the longest
        ]
        command += ["-p", "attnzoo.testing.recorder", "--attn-record", str(record)]
        command += ["--pyargs", "attnzoo.conformance", *options(backend, run)]
        command += limit(timeout, sanitizer)
        command += [part for known in known_failures for part in ("--attn-known-failure", known)]
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=STDERR, env=environment(workers, folder, sanitizer), check=False
        ).returncode
        lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()] if record.exists() else []
    if sanitizer and code == SANITIZER_FOUND:
        raise SuiteError(f"compute-sanitizer's {sanitizer} found errors, printed above: nothing is certified")
    ended = THE_END in lines
    lines = [line for line in lines if line != THE_END]
    if code not in (0, 1) or not ended or not lines:
        early = "" if ended else ", before its end"
        raise SuiteError(f"pytest ended with code {code} after {len(lines)} tests{early}: nothing is certified")
    certificate = Certificate.of(lines, backend=backend, distribution=distribution, versions=versions(), run=run)
    if (certificate.verdict == "pass") != (code == 0):
        raise SuiteError(f"pytest ended with code {code}, but {len(certificate.failures)} failures were recorded: nothing is certified")
    return certificate


def options(backend: str, run: Run) -> list[str]:
    """The options of `attnzoo.pytest_plugin` for this run."""
    chosen = ["--attn-backend", backend, "--attn-device", run.device, "--attn-profile", run.profile, "--attn-seeds", run.seeds]
    chosen += [part for dtype in run.dtypes for part in ("--attn-dtype", dtype)]
    return chosen if run.sample is None else [*chosen, "--attn-sample", str(run.sample)]


def limit(timeout: float | None, sanitizer: str | None) -> list[str]:
    """The option that limits each test; a sanitizer slows some a hundredfold, so under one none is limited unless asked."""
    if timeout is None:
        return ["--timeout", "0"] if sanitizer else []
    return ["--timeout", str(timeout)]


def sanitized(tool: str | None) -> list[str]:
    """The words before a command that put it and its children under a tool of compute-sanitizer."""
    if tool is None:
        return []
    found = shutil.which("compute-sanitizer")
    if found is None:
        raise SuiteError("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    return [found, "--tool", tool, "--target-processes", "all", "--error-exitcode", str(SANITIZER_FOUND)]


def environment(workers: str, folder: str, sanitizer: str | None = None) -> dict[str, str]:
    """This process's, less the options that the user gives every pytest; a thread a worker, else they fight for cores."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "PYTEST_TIMEOUT")}
    environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder  # it keeps files in the folder we stand in, else
    environ[FOLDER] = folder
    if sanitizer:
        environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # an allocation a tensor, so that its end is seen
    return environ if workers == "0" else {"OMP_NUM_THREADS": "1", **environ}


def versions() -> dict[str, str]:
    """Package -> version, of what the result depends on; what is not installed is left out."""
    from attnzoo import __version__

    found = {"attnzoo": __version__, "python": platform.python_version()}
    for package in VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def device_name(device: str) -> str:
    """The processor's or the card's; ValueError if there is no such device."""
    import torch

    place = require_device(device)
    if place.type == "cpu":
        return platform.machine()
    card = torch.cuda.get_device_properties(place)
    return f"{card.name}, sm_{card.major}{card.minor}"


def require_device(device: str) -> torch.device:
    """Raise ValueError if there is no such device; starts none."""
    import torch

    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}: {error}") from None
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; the kit runs on cpu, cuda and cuda:N")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {device!r}; torch sees {torch.cuda.device_count()} CUDA devices")
    return place


def require_claimed(backend: Backend, device: str, dtypes: Sequence[str]) -> None:
    """Raise ValueError if the backend claims none of the dtypes there, if any are given: then nothing would be judged."""
    claimed = sorted(str(dtype).removeprefix("torch.") for dtype in backend.capabilities_on(device.partition(":")[0]).dtypes)
    if dtypes and not set(dtypes).intersection(claimed):
        takes, asked = ", ".join(claimed) or "no dtype", ", ".join(dtypes)
        raise ValueError(f"nothing would be judged: {backend.name} claims none of {asked} on {device}; it takes {takes}")
