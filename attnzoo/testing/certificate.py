"""Certificate: what one run of the conformance kit found out about one backend, as a value that is JSON."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnzoo.testing.verdict import FORWARD_ONLY, PLAIN, Entry, Tally

if TYPE_CHECKING:
    from attnzoo.testing.case import Case

__all__ = ["KINDS", "Certificate", "Run", "overall"]

SCHEMA = 2
KINDS = ("passed", "forward only", "refused", "not applicable", "failed", "known failure")
ROOTED_PATH = re.compile(r"(?<![\w.~/-])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+-]+){2,}")


@dataclass(frozen=True)
class Run:
    """How the kit was run.

    Attributes:
        device: "cpu", "cuda" or "cuda:N".
        device_name: the processor or card.
        seeds: `FIRST:STOP`, the chunks of random problems.
        dtypes: those judged; empty for all.
        sample: the number of cases, spread evenly; None for all.
    """

    device: str
    device_name: str
    profile: str
    seeds: str
    dtypes: tuple[str, ...] = ()
    sample: int | None = None


@dataclass(frozen=True)
class Certificate:
    """The findings about one backend on one machine. Holds no host name and no path.

    Attributes:
        verdict: "pass" or "FAILED".
        distribution: name and version of what the backend comes from.
        versions: of the packages that the result depends on.
        suite: number of cases of the kit, and a digest of their ids and problems.
        counts: kind -> number of cases.
        random: kind -> number of chunks of random problems.
        families, dtypes: name -> kind -> number of cases.
        features: name -> "forward" or "backward" -> kind -> number of cases, and the "verdict". A case judged forward
            only counts as passed in the one, as refused in the other.
        refusals, not_applicable: reason -> number of cases.
        known_failures: case -> declared reason.
        failures: of each the case, the error and the command that repeats it.
    """

    backend: str
    verdict: str
    distribution: Mapping[str, str]
    versions: Mapping[str, str]
    run: Run
    suite: Mapping[str, Any]
    counts: Mapping[str, int]
    random: Mapping[str, int]
    families: Mapping[str, Mapping[str, int]]
    dtypes: Mapping[str, Mapping[str, int]]
    features: Mapping[str, Mapping[str, Mapping[str, Any]]]
    refusals: Mapping[str, int]
    not_applicable: Mapping[str, int]
    known_failures: Mapping[str, str]
    failures: Sequence[Mapping[str, str]]

    @classmethod
    def of(
        cls,
        lines: Iterable[Mapping[str, Any]],
        *,
        backend: str,
        distribution: Mapping[str, str],
        versions: Mapping[str, str],
        run: Run,
    ) -> Certificate:
        """From the lines of `attnzoo.testing.recorder`, in any order.

        Features and dtypes count the cases that judge a result; a required case is of a dtype that the backend claims,
        whatever it asks for, so it says nothing of dtypes.
        """
        found = sorted((_named(line, backend) for line in lines), key=lambda line: (line["test"], line["name"]))
        entries = [_entry(line, backend) for line in found if line["test"] == "test_case"]
        judged = [entry for entry in entries if entry.judges_result]
        failures = [_failure(line, backend, run) for line in found if line["kind"] == "failed"]
        return cls(
            backend=backend,
            verdict="FAILED" if failures else "pass",
            distribution=dict(distribution),
            versions=dict(versions),
            run=run,
            suite=_suite(),
            counts=_counts(entry.kind for entry in entries),
            random=_counts(line["kind"] for line in found if line["test"] == "test_random_problems"),
            families=_tallied(entries, lambda entry: entry.family),
            dtypes=_tallied([entry for entry in judged if not _case(entry.case).required], lambda entry: entry.dtype),
            features=_by_feature(judged),
            refusals=_reasons(entries, "refused", FORWARD_ONLY),
            not_applicable=_reasons(entries, "not applicable"),
            known_failures={_label(line): _scrubbed("; ".join(line["reasons"])) for line in found if line["kind"] == "known failure"},
            failures=failures,
        )

    @classmethod
    def read(cls, path: Path) -> Certificate:
        """Raises ValueError if the file holds no certificate of this schema."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            schema = data.pop("schema", None)
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} is no certificate: {error}") from None
        if schema != SCHEMA:
            raise ValueError(f"{path} has schema {schema!r}; this attnzoo reads {SCHEMA}: make it again with `attnzoo check`")
        run = data.pop("run")
        return cls(run=Run(**{**run, "dtypes": tuple(run["dtypes"])}), **data)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @property
    def title(self) -> str:
        """Backend and kind of device; that it is a part, where only a part of the suite was run."""
        parts = [f"sample of {self.run.sample}"] if self.run.sample else []
        parts += [", ".join(self.run.dtypes)] if self.run.dtypes else []
        return " ".join([self.backend, f"({self.run.device.partition(':')[0]})", *parts])


def overall(counts: Mapping[str, int]) -> str:
    """A word or two for counts by kind: `pass`, `forward only`, `refused`, `known failure`, `FAILED`, or `not tested`."""
    return Tally(Counter(counts)).verdict("").partition(" (")[0]


@cache
def _cases() -> dict[str, Case]:
    from attnzoo.testing.cases import CASES

    return {case.id: case for case in CASES}


def _case(case_id: str) -> Case:
    return _cases()[case_id]


def _named(line: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """With `name`, the parameters less the backend: a case, a chunk of random problems, or nothing."""
    return {**line, "name": line["parameters"].removeprefix(backend).removeprefix("-")}


def _label(line: Mapping[str, Any]) -> str:
    """The id of a case, the name of any other test."""
    return str(line["name"]) if line["test"] == "test_case" else f"{line['test']} {line['name']}".strip()


def _entry(line: Mapping[str, Any], backend: str) -> Entry:
    case = _case(line["name"])
    problem = case.problem
    shown = tuple(_scrubbed(reason) for reason in line["reasons"])
    return Entry(
        backend=backend,
        case=case.id,
        family=case.family,
        dtype=problem.dtype,
        features=problem.features,
        has_backward=line.get("has_backward", case.judges_gradient),
        kind=line["kind"],
        reasons=shown,
        judges_result=case.judges_result,
    )


def _failure(line: Mapping[str, Any], backend: str, run: Run) -> dict[str, str]:
    repeat = line["repeat"]
    if not repeat and line["test"] == "test_case":
        case = _case(line["name"])
        repeat = case.problem.reproduction(backend, case.check, run.device)
    elif not repeat:
        kind, _, number = line["name"].partition("-")
        seeds = f"{number}:{int(number) + 1}" if kind == "chunk" else run.seeds
        options = f"--attn-backend {backend} --attn-device {run.device} --attn-profile {run.profile} --attn-seeds {seeds}"
        repeat = f"pytest --pyargs attnzoo.conformance {options} -k {line['test']}"
    return {"case": _label(line), "error": _scrubbed(line["error"]), "repeat": repeat}


def _scrubbed(text: str) -> str:
    """Without this machine's name, and with no more of a path than its last part."""
    host = platform.node()
    if host:
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "<host>", text)
    return ROOTED_PATH.sub(lambda match: re.split(r"[/\\]", match[0])[-1], text)


def _suite() -> dict[str, Any]:
    digest = hashlib.sha256("\n".join(map(repr, _cases().values())).encode())
    return {"cases": len(_cases()), "digest": digest.hexdigest()[:12]}


def _counts(kinds: Iterable[str]) -> dict[str, int]:
    counted = Counter(kinds)
    return {kind: counted[kind] for kind in KINDS}


def _tallied(entries: Sequence[Entry], key: Callable[[Entry], str]) -> dict[str, dict[str, int]]:
    return {name: _counts(entry.kind for entry in entries if key(entry) == name) for name in sorted({key(entry) for entry in entries})}


def _by_feature(entries: Sequence[Entry]) -> dict[str, dict[str, dict[str, Any]]]:
    """In the order of `attnzoo.backend.FEATURES`, plain calls first."""
    from attnzoo.backend import FEATURES

    made: dict[str, dict[str, dict[str, Any]]] = {}
    for feature in (PLAIN, *FEATURES):
        said = [credit for entry in entries for credit in entry.credits if credit[0] == feature]
        for direction in ("forward", "backward"):
            counts = _counts(kind for _, where, kind in said if where == direction)
            if any(counts.values()):
                made.setdefault(feature, {})[direction] = {"verdict": overall(counts), **counts}
    return made


def _reasons(entries: Iterable[Entry], *kinds: str) -> dict[str, int]:
    """Commonest first."""
    counted = Counter(reason for entry in entries if entry.kind in kinds for reason in entry.reasons)
    return dict(sorted(counted.items(), key=lambda item: (-item[1], item[0])))
