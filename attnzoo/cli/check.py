"""`attnzoo check`: run the conformance kit on one backend, and certify what it found."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnzoo.cli.output import Format, FormatOption, Section, show, warnings_as_notes

if TYPE_CHECKING:
    from attnzoo.testing.certificate import Certificate, Run


class Profile(StrEnum):
    """How many random problems are drawn."""

    QUICK = "quick"
    DEEP = "deep"


class Sanitizer(StrEnum):
    """The tools of compute-sanitizer."""

    MEMCHECK = "memcheck"
    RACECHECK = "racecheck"
    INITCHECK = "initcheck"
    SYNCCHECK = "synccheck"


class DType(StrEnum):
    """Of q, k and v."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


def workers(text: str) -> str:
    """`auto`, or a number."""
    if text != "auto" and not text.isdigit():
        raise typer.BadParameter(f"{text!r} is no number of workers, nor auto")
    return text


def chunks(text: str) -> str:
    """`0:10`."""
    first, _, stop = text.partition(":")
    if not (first.isdigit() and stop.isdigit() and int(first) < int(stop)):
        raise typer.BadParameter(f"{text!r} is no range of chunks such as 0:10")
    return text


def check(
    backend: Annotated[str, typer.Argument(metavar="NAME", help="Name of an installed backend.", show_default=False)],
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    profile: Annotated[Profile, typer.Option(help="How many random problems.")] = Profile.QUICK,
    dtype: Annotated[list[DType] | None, typer.Option(help="Judge these alone; may be repeated. All by default.")] = None,
    processes: Annotated[str, typer.Option("-n", "--workers", callback=workers, help="Processes: a number, or auto.")] = "auto",
    seeds: Annotated[str | None, typer.Option(parser=chunks, metavar="FIRST:STOP", help="Chunks of random problems.")] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="A fixed sample of N cases: for a look, not for a certificate.")] = None,
    known_failure: Annotated[
        list[str] | None, typer.Option(metavar="GLOB=REASON", help="Cases known to fail; one that passes is a failure. May be repeated.")
    ] = None,
    sanitizer: Annotated[
        Sanitizer | None, typer.Option(help="Run under this tool of compute-sanitizer, on CUDA; slow: use --sample.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Most that a test may take; 0 for no limit.", show_default="900, 3600 in deep"),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the certificate there, as JSON.")] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Judge a backend by the contract: every case of the conformance kit, and random problems.

    Exit code 1 if it fails one, 2 if nothing would be judged. Progress goes to stderr.
    """
    from attnzoo.testing.judge import SuiteError, device_name, judge

    if output is not None and not output.parent.is_dir():
        raise typer.BadParameter(f"{output.parent} is no folder", param_hint="'--output'")
    if sanitizer is not None and not device.startswith("cuda"):
        raise typer.BadParameter(f"it looks at CUDA kernels, and the device is {device}", param_hint="'--sanitizer'")
    _require_packages()
    try:
        run = _run_of(device, device_name(device), profile, dtype or [], seeds, sample)
        distribution = _distribution(backend, run)
        certificate = judge(
            backend,
            run,
            workers=processes,
            known_failures=known_failure or (),
            distribution=distribution,
            sanitizer=sanitizer.value if sanitizer else None,
            timeout=timeout,
        )
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except SuiteError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if output is not None:
        output.write_text(certificate.to_json(), encoding="utf-8")
    show(certificate.to_dict(), sections(certificate), form)
    if certificate.verdict != "pass":
        raise typer.Exit(1)


def _require_packages() -> None:
    from attnzoo.testing.judge import missing_packages

    missing = missing_packages()
    if missing:
        typer.echo(f"error: the conformance kit needs {', '.join(missing)}: pip install 'attnzoo[test]'", err=True)
        raise typer.Exit(2)


def _distribution(name: str, run: Run) -> dict[str, str]:
    """What the backend comes from; exit code 1 if it can't be loaded, 2 if it doesn't claim the device.

    Raises:
        ValueError: it claims none of the dtypes.
    """
    from attnzoo import __version__
    from attnzoo.errors import UnknownBackendError
    from attnzoo.registry import Registry
    from attnzoo.testing.judge import require_claimed

    with warnings_as_notes():
        registry = Registry.installed()
        registry.require_known([name])
        try:
            loaded = registry.get(name)
        except UnknownBackendError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
    claimed = loaded.capabilities.devices
    if claimed and run.device.partition(":")[0] not in claimed:
        typer.echo(f"error: {name} does not claim {run.device}: check it on {' or '.join(sorted(claimed))}, with --device", err=True)
        raise typer.Exit(2)
    require_claimed(loaded, run.device, run.dtypes)
    plugin = registry.plugin_of(name)
    return {"name": plugin.distribution, "version": plugin.version or __version__} if plugin else {}


def _run_of(device: str, name: str, profile: Profile, dtypes: list[DType], seeds: str | None, sample: int | None) -> Run:
    from attnzoo.pytest_plugin import DEEP_CHUNKS, QUICK_CHUNKS
    from attnzoo.testing.certificate import Run

    seeds = seeds or f"0:{QUICK_CHUNKS if profile is Profile.QUICK else DEEP_CHUNKS}"
    return Run(device, name, profile.value, seeds, tuple(dtype.value for dtype in dtypes), sample)


def _apart(certificate: Certificate) -> str:
    return f"{certificate.without_lse} without lse" if certificate.without_lse else ""


def sections(certificate: Certificate) -> list[Section]:
    """The verdict, the counts of each feature, and what failed."""
    from attnzoo.testing.certificate import KINDS

    title = f"{certificate.backend} on {certificate.run.device} ({certificate.run.device_name}): {certificate.verdict}"
    features = [
        (feature, direction, counts["verdict"], *[str(counts[kind]) for kind in KINDS])
        for feature, directions in certificate.features.items()
        for direction, counts in directions.items()
    ]
    rows = [
        *features,
        ("all cases", _apart(certificate), "", *[str(certificate.counts[kind]) for kind in KINDS]),
        ("random problems", "in chunks", "", *[str(certificate.random[kind]) for kind in KINDS]),
    ]
    made = [Section(title, ("feature", "direction", "verdict", *KINDS), rows)]
    if certificate.failures:
        failures = [(failure["case"], failure["error"], failure["repeat"]) for failure in certificate.failures]
        made.append(Section("Failures", ("case", "error", "repeat with"), failures))
    return made
