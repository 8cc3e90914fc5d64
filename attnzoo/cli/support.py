"""`attnzoo support`: which backend serves what, generated from certificates, never written by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnzoo.cli.output import Format, FormatOption, Section, markdown, show

if TYPE_CHECKING:
    from attnzoo.testing.certificate import Certificate


def support(
    certificates: Annotated[list[Path], typer.Argument(metavar="CERTIFICATE...", help="Written by `attnzoo check --output`.")],
    into: Annotated[
        list[Path] | None,
        typer.Option(metavar="PAGE", help="Fill the marked sections of a Markdown page instead of printing. May be repeated."),
    ] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show features by backends: pass, refused, FAILED.

    A page has the table between `<!-- support:begin -->` and `<!-- support:end -->`; between the same with `certificates`
    it has the counts, the reasons of the refusals and the failures of each.
    """
    from attnzoo.testing.certificate import Certificate

    try:
        read = ordered([Certificate.read(path) for path in certificates])
        filled = [(page, fill(page.read_text(encoding="utf-8"), read, str(page))) for page in into or ()]
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    for page, text in filled:
        page.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {page}", err=True)
    if not filled:
        show(matrix(read), [table(read)], form)


def ordered(certificates: Sequence[Certificate]) -> list[Certificate]:
    """By device, then by name; ValueError if two are about the same."""
    made = sorted(certificates, key=lambda certificate: (certificate.run.device, certificate.title))
    titles = [certificate.title for certificate in made]
    twice = sorted({title for title in titles if titles.count(title) > 1})
    if twice:
        raise ValueError(f"several certificates of {', '.join(twice)}: give one of each")
    return made


def matrix(certificates: Sequence[Certificate]) -> dict[str, dict[str, str]]:
    """Feature or dtype -> backend -> verdict."""
    from attnzoo.testing.certificate import overall

    features = dict.fromkeys(feature for certificate in certificates for feature in certificate.features)
    dtypes = dict.fromkeys(dtype for certificate in certificates for dtype in certificate.dtypes)
    made = {
        feature: {certificate.title: _of_feature(certificate.features.get(feature, {})) for certificate in certificates}
        for feature in features
    }
    made |= {dtype: {each.title: overall(each.dtypes.get(dtype, {})) for each in certificates} for dtype in dtypes}
    made["random problems"] = {each.title: overall(each.random) for each in certificates}
    made["everything"] = {each.title: each.verdict for each in certificates}
    return made


def _of_feature(directions: Mapping[str, Mapping[str, Any]]) -> str:
    """`pass`, or `pass / refused` where forward and backward differ."""
    verdicts = dict.fromkeys(directions[direction]["verdict"] for direction in ("forward", "backward") if direction in directions)
    return " / ".join(verdicts) or "not tested"


def table(certificates: Sequence[Certificate]) -> Section:
    """The matrix with its counts of cases, as a section without a title."""
    rows = [(name, *verdicts.values()) for name, verdicts in matrix(certificates).items()]
    rows.append(("cases passed", *[str(certificate.counts["passed"]) for certificate in certificates]))
    rows.append(("cases passed, forward only", *[str(certificate.counts["forward only"]) for certificate in certificates]))
    if any(certificate.without_lse for certificate in certificates):
        rows.append(("of these, without the lse", *[str(certificate.without_lse) for certificate in certificates]))
    rows.append(("cases refused", *[str(certificate.counts["refused"]) for certificate in certificates]))
    rows.append(("cases failed", *[str(certificate.counts["failed"]) for certificate in certificates]))
    return Section("", ("feature", *[certificate.title for certificate in certificates]), rows)


def fill(page: str, certificates: Sequence[Certificate], name: str) -> str:
    """The page with its marked sections made anew; ValueError if it has none.

    Args:
        name: of the page, for the message.
    """
    found = False
    for marker, write in SECTIONS.items():
        pattern = re.compile(rf"(<!-- {marker}:begin -->\n).*?(<!-- {marker}:end -->)", re.S)
        made = f"\n{write(certificates)}\n\n"
        page, count = pattern.subn(lambda match, made=made: match[1] + made + match[2], page)  # type: ignore[misc]
        found = found or bool(count)
    if not found:
        markers = " or ".join(f"<!-- {marker}:begin --> and <!-- {marker}:end -->" for marker in SECTIONS)
        raise ValueError(f"{name} has no section to fill: put {markers} where it shall be")
    return page


def support_section(certificates: Sequence[Certificate]) -> str:
    """A table for each kind of device as Markdown, failures in bold, and a warning where the certificates can't be compared."""
    by_device: dict[str, list[Certificate]] = {}
    for certificate in certificates:
        by_device.setdefault(certificate.run.device.partition(":")[0], []).append(certificate)
    parts = [f"On {_machines(device, made)}:\n\n{markdown(table(made)).strip()}" for device, made in by_device.items()]
    text = re.sub(r"\bFAILED\b", "**FAILED**", "\n\n".join(parts))
    suites = {certificate.suite["digest"] for certificate in certificates}
    if len(suites) > 1:
        text += "\n\nThese certificates come from different versions of the conformance kit."
    return text


def _machines(device: str, certificates: Sequence[Certificate]) -> str:
    """`cuda (NVIDIA H200, sm_90)`."""
    return f"{device} ({'; '.join(dict.fromkeys(certificate.run.device_name for certificate in certificates))})"


def certificates_section(certificates: Sequence[Certificate]) -> str:
    """Of each certificate where it comes from, its counts, why it refused, and what failed."""
    return "\n\n".join(map(_details, certificates))


def _details(certificate: Certificate) -> str:
    run = certificate.run
    versions = ", ".join(f"{package} {version}" for package, version in certificate.versions.items())
    counts = ", ".join(f"{count} {kind}" for kind, count in certificate.counts.items())
    counts += f"; {certificate.without_lse} of them judged without the lse" if certificate.without_lse else ""
    failed = [(f"`{failure['case']}`", failure["error"], f"`{failure['repeat']}`") for failure in certificate.failures]
    tables = [
        _counted("reason of a refusal", certificate.refusals),
        _counted("not applicable because", certificate.not_applicable),
        Section("", ("known failure", "reason"), list(certificate.known_failures.items())),
        Section("", ("failed", "error", "repeat with"), failed),
    ]
    return "\n\n".join(
        [
            f"### {certificate.title}: {certificate.verdict}",
            f"{' '.join(certificate.distribution.values())} on {run.device_name}, with {versions}; "
            f"suite {certificate.suite['digest']} of {certificate.suite['cases']} cases, profile {run.profile}, "
            f"chunks {run.seeds} of random problems.",
            f"Cases: {counts}.",
            *[markdown(each).strip() for each in tables if each.rows],
        ]
    )


def _counted(title: str, reasons: Mapping[str, int]) -> Section:
    return Section("", (title, "cases"), [(reason, str(count)) for reason, count in reasons.items()])


SECTIONS: dict[str, Callable[[Sequence[Certificate]], str]] = {"support": support_section, "certificates": certificates_section}
