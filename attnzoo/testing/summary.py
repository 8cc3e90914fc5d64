"""The verdict that pytest prints: of every backend that a run judged, the certificate that `attnzoo check` would write, as text."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attnzoo.testing.certificate import Certificate, Run
from attnzoo.testing.recorder import is_recorded, line_of
from attnzoo.testing.verdict import KINDS, overall

if TYPE_CHECKING:
    import pytest

__all__ = ["certificates", "lines"]

OF_CHUNK = re.compile(r"(?:chunk|variant)-\d+")


def certificates(reports: Iterable[pytest.TestReport], run: Run) -> list[Certificate]:
    """One for each backend, by name, whatever the order of the reports.

    A report without a record, of a test whose worker died or whose fixture raised, belongs to the backend of the other
    tests of its class and parameters.
    """
    recorded = [report for report in reports if is_recorded(report)]
    owners = {_place(report)[:2]: record["backend"] for report in recorded if (record := _record(report))}
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for report in recorded:
        owner, rest, name = _place(report)
        if (owner, rest) in owners or name:
            backend = owners.get((owner, rest)) or rest or owner.rpartition("::")[2]
            found[backend].append({**line_of(report), "name": name})
    return [Certificate.of(found[backend], backend=backend, distribution={}, versions={}, run=run) for backend in sorted(found)]


def _record(report: pytest.TestReport) -> dict[str, Any]:
    return dict(report.user_properties).get("attnzoo") or {}  # type: ignore[return-value]


def _place(report: pytest.TestReport) -> tuple[str, str, str]:
    """The class, the parameters less the case or chunk, and that; "" where there is none."""
    owner, _, test = report.nodeid.rpartition("::")
    parameters = test.partition("[")[2].removesuffix("]")
    name = _record(report).get("name") or _name_in(parameters)
    return owner, parameters.replace(name, "", 1).strip("-") if name else parameters, name


def _name_in(parameters: str) -> str:
    """The case or chunk among parameters, which hyphens join."""
    from attnzoo.testing.cases import CASES

    parts, ids = parameters.split("-"), {case.id for case in CASES}
    spans = ("-".join(parts[start:stop]) for start, stop in itertools.combinations(range(len(parts) + 1), 2))
    return max((span for span in spans if span in ids or OF_CHUNK.fullmatch(span)), key=len, default="")


def lines(certificate: Certificate) -> list[str]:
    """The counts, a line for each feature, for random problems and for other tests, and the families that failed."""
    counts = ", ".join(f"{count} {kind}" for kind, count in certificate.counts.items() if count)
    apart = f"; {certificate.without_lse} judged without the lse" if certificate.without_lse else ""
    verdict = "nothing was judged" if certificate.is_empty else certificate.verdict
    text = [f"{certificate.backend}: {verdict}, {counts or 'no cases'}{apart}"]
    for feature, directions in certificate.features.items():
        text += [_line(feature + " backward" * (where == "backward"), said) for where, said in directions.items()]
    if any(certificate.random.values()):
        text.append(_line("random problems", {"verdict": overall(certificate.random), **certificate.random}, "chunks of them: "))
    others = [failure for failure in certificate.failures if failure["case"].startswith("test_")]
    text += [f"  {failure['case']}: FAILED, {failure['error']}" for failure in others]
    failed = [f"{family} ({kinds['failed']})" for family, kinds in certificate.families.items() if kinds["failed"]]
    return [*text, f"  families that failed: {', '.join(failed)}"] if failed else text


def _line(name: str, said: Mapping[str, Any], of: str = "") -> str:
    reason = f" ({said['reason']})" if said.get("reason") else ""
    shown = [kind for kind in KINDS if said[kind] or kind in ("passed", "refused", "failed")]
    return f"  {name:24} {said['verdict']}{reason}  [{of}{', '.join(f'{said[kind]} {kind}' for kind in shown)}]"
