"""The pytest plugin: options, parameters, devices and the verdict of the conformance kit.

pytest loads this in every run of everybody who has attnzoo installed, so it imports neither torch nor the kit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attnzoo.backend import Backend
    from attnzoo.testing.certificate import Run

PROFILES = ("quick", "deep")
QUICK_CHUNKS, DEEP_CHUNKS = 10, 100
WORKERS_A_GPU = 16  # a host may have hundreds of cores: so many processes start for minutes, and each holds half a GB of the GPU
STICKY_CUDA_ERRORS = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
    "illegal instruction",
    "hardware stack error",
    "invalid program counter",
)
STICKY_EXIT_CODE = 17


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attnzoo", "attnzoo: judge attention backends")
    group.addoption("--attn-backend", action="append", metavar="NAME", help="backend to judge; may be repeated")
    group.addoption("--attn-device", metavar="DEVICE", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    group.addoption("--attn-dtype", action="append", metavar="DTYPE", help="judge these dtypes only, such as float16")
    group.addoption("--attn-profile", choices=PROFILES, default="quick", help="how many random problems (default: quick)")
    group.addoption(
        "--attn-seeds", metavar="FIRST:STOP", help="resume random problems: chunks FIRST to STOP - 1, of 20 problems each, 100 in deep"
    )
    group.addoption("--attn-sample", metavar="N", type=int, help="a fixed sample of N cases, spread evenly")
    group.addoption(
        "--attn-known-failure",
        action="append",
        metavar="[BACKEND:]GLOB=REASON",
        help="cases that are known to fail: strict xfails; may be repeated",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        check_options(config)
    if config.pluginmanager.hasplugin("timeout"):
        limit_time(config)
    if config.getoption("--attn-device").startswith("cuda"):
        spread_gpus(config)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(VerdictReporter(), "attnzoo-verdict")
    elif config.getoption("--attn-device").startswith("cuda"):
        config.pluginmanager.register(WorkerGuard(), "attnzoo-worker-guard")


def check_options(config: pytest.Config) -> None:
    """Raise UsageError for what no run could do, once, before a worker starts."""
    for dtype in config.getoption("--attn-dtype") or ():
        from attnzoo.testing.problem import DTYPES

        if dtype not in DTYPES:
            raise pytest.UsageError(f"--attn-dtype is {dtype}; it takes {', '.join(DTYPES)}")
    sample = config.getoption("--attn-sample")
    if sample is not None and sample < 1:
        raise pytest.UsageError(f"--attn-sample is {sample}; it takes a number of cases, 1 or more")
    seeds = config.getoption("--attn-seeds")
    if seeds is not None and chunks_of(seeds) is None:
        raise pytest.UsageError(f"--attn-seeds is {seeds!r}; it takes FIRST:STOP, two numbers of chunks")
    for name in config.getoption("--attn-backend") or ():
        import attnzoo

        try:
            backend = attnzoo.get(name).backend
        except LookupError as error:
            raise pytest.UsageError(f"--attn-backend: {error}") from None
        check_device(config)
        check_dtypes(config, backend)


def check_device(config: pytest.Config) -> None:
    """Raise UsageError if there is no such device."""
    from attnzoo.testing.judge import require_device

    try:
        require_device(config.getoption("--attn-device"))
    except ValueError as error:
        raise pytest.UsageError(f"--attn-device: {error}") from None


def check_dtypes(config: pytest.Config, backend: Backend) -> None:
    """Raise UsageError if the backend claims none of the dtypes asked for: all would be refused, which passes."""
    from attnzoo.testing.judge import require_claimed

    try:
        require_claimed(backend, config.getoption("--attn-device"), config.getoption("--attn-dtype") or ())
    except ValueError as error:
        raise pytest.UsageError(f"--attn-dtype: {error}") from None


def chunks_of(text: str) -> range | None:
    """The chunks that `FIRST:STOP` names; None if it is not of that form."""
    first, colon, stop = text.partition(":")
    return range(int(first), int(stop)) if colon and first.isdigit() and stop.isdigit() else None


def limit_time(config: pytest.Config) -> None:
    """Let pytest-timeout, which is there, limit every test of the kit."""
    from attnzoo.time_limit import StuckWorkers, TimeLimit

    inputs = getattr(config, "workerinput", None)
    config.pluginmanager.register(TimeLimit(inputs["attn_stacks"] if inputs else None), "attnzoo-time-limit")
    if inputs is None:
        config.pluginmanager.register(StuckWorkers(), "attnzoo-stuck-workers")


# Devices


def spread_gpus(config: pytest.Config) -> None:
    """Give each xdist worker another first GPU, the others behind it, before torch is initialised."""
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    gpus = visible_gpus()
    if worker.startswith("gw") and gpus:
        first = int(worker[2:]) % len(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def visible_gpus() -> list[str]:
    """Those of CUDA_VISIBLE_DEVICES, else one for each device node of the driver."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    nodes = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    return [str(place) for place in range(len(nodes))]


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto` on a GPU: the cores, but no more than a GPU serves; None leaves it to pytest-xdist."""
    device = str(config.getoption("--attn-device"))
    if not device.startswith("cuda") or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    gpus = 1 if ":" in device else max(1, len(visible_gpus()))
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, WORKERS_A_GPU * gpus)


def is_sticky(text: str) -> bool:
    """Whether an error's text tells of a CUDA error that no later call of the process survives."""
    text = text.lower()
    return "cuda" in text and any(error in text for error in STICKY_CUDA_ERRORS)


class WorkerGuard:
    """A sticky CUDA error spoils every later test of the process: report the test that hit it, then die, so that
    xdist starts another worker in its place."""

    def __init__(self) -> None:
        self.is_spoilt = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.is_spoilt = self.is_spoilt or (report.failed and is_sticky(str(report.longrepr)))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        if self.is_spoilt:
            os._exit(STICKY_EXIT_CODE)


# Parameters


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    if "attn_backend" in metafunc.fixturenames:
        names = config.getoption("--attn-backend")
        if not names:
            raise pytest.UsageError("which backend? Give --attn-backend NAME, or several; `attnzoo list` shows them")
        metafunc.parametrize("attn_backend", names, scope="session")
    if "attn_device" in metafunc.fixturenames and config.getoption("--attn-device") != "cpu":
        check_device(config)
    if "attn_case" in metafunc.fixturenames:
        cases = chosen_cases(config)
        metafunc.parametrize("attn_case", cases, ids=[case.id for case in cases])
    if "attn_random" in metafunc.fixturenames:
        metafunc.parametrize("attn_random", chosen_random_problems(config))


def chosen_cases(config: pytest.Config) -> list[Any]:
    """The cases of the dtypes asked for, and of those the sample asked for, in order."""
    from attnzoo.testing.cases import CASES

    dtypes, size = config.getoption("--attn-dtype"), config.getoption("--attn-sample")
    cases = [case for case in CASES if not dtypes or case.problem.dtype in dtypes]
    if size is None or size >= len(cases):
        return cases
    return [cases[place * len(cases) // size] for place in range(size)]


def chosen_chunks(config: pytest.Config) -> range:
    """The chunks of random problems that this run draws."""
    is_deep = config.getoption("--attn-profile") == "deep"
    text = config.getoption("--attn-seeds")
    chunks = range(DEEP_CHUNKS if is_deep else QUICK_CHUNKS) if text is None else chunks_of(text)
    return range(0) if chunks is None else chunks


def chosen_random_problems(config: pytest.Config) -> list[str]:
    """Those chunks; in the deep profile, every kernel variant before them."""
    named = [f"chunk-{number}" for number in chosen_chunks(config)]
    if config.getoption("--attn-profile") != "deep":
        return named
    from attnzoo.testing.variants import VARIANTS

    return [f"variant-{place}" for place in range(len(VARIANTS))] + named


def shares_cores(config: pytest.Config) -> bool:
    """Whether this is one of several workers, which fight for the cores, and OMP_NUM_THREADS does not say how many threads it has."""
    return getattr(config, "workerinput", {}).get("workercount", 1) > 1 and "OMP_NUM_THREADS" not in os.environ


@pytest.fixture(scope="session")
def attn_threads(request: pytest.FixtureRequest) -> None:
    """torch on one thread where workers share the cores."""
    if shares_cores(request.config):
        import torch

        torch.set_num_threads(1)


@pytest.fixture
def attn_device(request: pytest.FixtureRequest, attn_threads: None) -> str:
    """The device that --attn-device names."""
    return str(request.config.getoption("--attn-device"))


@pytest.fixture
def attn_dtypes(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The dtypes that --attn-dtype names; none for all."""
    return tuple(request.config.getoption("--attn-dtype") or ())


@pytest.fixture
def attn_profile(request: pytest.FixtureRequest) -> str:
    """The profile that --attn-profile names."""
    return str(request.config.getoption("--attn-profile"))


# Verdict


class VerdictReporter:
    """Collects the reports of every worker; prints one verdict per backend and feature at the end."""

    def __init__(self) -> None:
        self.reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or "attnzoo" in dict(report.user_properties):
            self.reports.append(report)

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if not any(is_of_kit(report) for report in self.reports):
            return
        from attnzoo.testing import summary

        certificates = summary.certificates(self.reports, run_of(config))
        if certificates:
            terminalreporter.section("attnzoo verdict")
        for line in [line for certificate in certificates for line in summary.lines(certificate)]:
            terminalreporter.write_line(line, red="FAILED" in line)


def is_of_kit(report: pytest.TestReport) -> bool:
    """Whether a backend signed it, or would have, had its worker or a fixture not failed."""
    is_named = "::test_case[" in report.nodeid or "::test_random_problems[" in report.nodeid
    return "attnzoo" in dict(report.user_properties) or is_named


def run_of(config: pytest.Config) -> Run:
    """How the kit is run, as a certificate says it, less the name of the device."""
    from attnzoo.testing.certificate import Run

    device, profile = config.getoption("--attn-device"), config.getoption("--attn-profile")
    chunks, dtypes = chosen_chunks(config), tuple(config.getoption("--attn-dtype") or ())
    return Run(device, "", profile, f"{chunks.start}:{chunks.stop}", dtypes, config.getoption("--attn-sample"))


def pytest_report_header(config: pytest.Config) -> Iterator[str] | list[str]:
    names = config.getoption("--attn-backend")
    if not names:
        return []
    return [f"attnzoo: judging {', '.join(names)} on {config.getoption('--attn-device')}, profile {config.getoption('--attn-profile')}"]
