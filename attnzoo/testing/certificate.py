"""Certificate: what one run of the conformance kit found out about one backend, as a value that is JSON."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnzoo.testing.verdict import FORWARD_ONLY, KINDS, PLAIN, Entry, Tally, overall

if TYPE_CHECKING:
    from attnzoo.testing.case import Case

__all__ = ["KINDS", "Certificate", "Run", "overall"]

SCHEMA = 2
JUDGED = ("passed", FORWARD_ONLY, "failed", "known failure")
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
        without_lse: how many of the passed and forward only were judged without their lse, which is refused.
        random: kind -> number of chunks of random problems.
        families, dtypes: name -> kind -> number of cases.
        features: name -> "forward" or "backward" -> kind -> number of cases, the "verdict", and the "reason" of a refusal
            or a known failure. A case judged forward only counts as passed in the one, as refused in the other; one
            judged without its lse as refused for lse. Claimed, and refused each time for another reason: not tested.
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
    without_lse: int = 0

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

        Features and dtypes count the cases that judge a result, in the dtype in which each was asked; a required case is asked in
        one that the backend claims, whatever its own, so it says nothing of dtypes.
        """
        found = _one_each(sorted((_named(line, backend) for line in lines), key=lambda line: (line["test"], line["name"])))
        entries = [_entry(line) for line in found if _is_case(line)]
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
            refusals=_reasons(entry for entry in entries if entry.kind in ("refused", FORWARD_ONLY) or entry.without_lse),
            not_applicable=_reasons(entry for entry in entries if entry.kind == "not applicable"),
            known_failures={_label(line): _scrubbed("; ".join(line["reasons"])) for line in found if line["kind"] == "known failure"},
            failures=failures,
            without_lse=sum(entry.without_lse for entry in entries if entry.kind in ("passed", FORWARD_ONLY)),
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
    def is_empty(self) -> bool:
        """Whether no call was judged: all were refused, or not applicable. Then "pass" says nothing."""
        served = [*self.dtypes.values(), self.random, *[said for where in self.features.values() for said in where.values()]]
        return self.verdict == "pass" and not any(counts[kind] for counts in served for kind in JUDGED)

    @property
    def title(self) -> str:
        """Backend and kind of device; that it is a part, where only a part of the suite was run."""
        parts = [f"sample of {self.run.sample}"] if self.run.sample else []
        parts += [", ".join(self.run.dtypes)] if self.run.dtypes else []
        return " ".join([self.backend, f"({self.run.device.partition(':')[0]})", *parts])


@cache
def _cases() -> dict[str, Case]:
    from attnzoo.testing.cases import CASES

    return {case.id: case for case in CASES}


def _case(case_id: str) -> Case:
    return _cases()[case_id]


def _named(line: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """With `name`, the parameters less the backend: a case, a chunk of random problems, or nothing."""
    return {"name": line["parameters"].removeprefix(backend).removeprefix("-"), **line}


def _one_each(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a test: of one that also failed in its clean-up, or whose worker then died, the first failure."""
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        key = line["test"], line["name"]
        if key not in kept or (line["kind"] == "failed" and kept[key]["kind"] != "failed"):
            kept[key] = line
    return list(kept.values())


def _is_case(line: Mapping[str, Any]) -> bool:
    """Whether it tells of a case, not of another test, nor of a case whose parameters are lost."""
    return line["test"] == "test_case" and line["name"] in _cases()


def _label(line: Mapping[str, Any]) -> str:
    """The id of a case, the name of any other test."""
    return str(line["name"]) if _is_case(line) else f"{line['test']} {line['name']}".strip()


def _entry(line: Mapping[str, Any]) -> Entry:
    case = _case(line["name"])
    problem = case.problem
    shown = tuple(_scrubbed(reason) for reason in line["reasons"])
    return Entry(
        case=case.id,
        family=case.family,
        dtype=line.get("dtype", problem.dtype),
        features=problem.features,
        has_backward=line.get("has_backward", case.judges_gradient),
        kind=line["kind"],
        reasons=shown,
        judges_result=case.judges_result,
        without_lse=line.get("without_lse", False),
        claimed=tuple(line.get("claimed", ())),
    )


def _failure(line: Mapping[str, Any], backend: str, run: Run) -> dict[str, str]:
    return {"case": _label(line), "error": _scrubbed(line["error"]), "repeat": line["repeat"] or _command(line, backend, run)}


def _command(line: Mapping[str, Any], backend: str, run: Run) -> str:
    """What repeats a test that left no command: its worker died."""
    options = f"--attn-backend {backend} --attn-device {run.device}"
    if _is_case(line):  # perhaps asked in another dtype and head dim than its own
        return f"pytest --pyargs attnzoo.conformance {options} -k {line['name']}"
    kind, _, number = line["name"].partition("-")
    seeds = f"{number}:{int(number) + 1}" if kind == "chunk" else run.seeds
    return f"pytest --pyargs attnzoo.conformance {options} --attn-profile {run.profile} --attn-seeds {seeds} -k {line['test']}"


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

    tallies: dict[tuple[str, str], Tally] = defaultdict(Tally)
    for entry in entries:
        for credit in entry.credits:
            tallies[credit.feature, credit.direction].add(entry, credit)
    made: dict[str, dict[str, dict[str, Any]]] = {}
    for feature, direction in product((PLAIN, *FEATURES), ("forward", "backward")):
        if (feature, direction) in tallies:
            made.setdefault(feature, {})[direction] = _summed(tallies[feature, direction], feature)
    return made


def _summed(tally: Tally, feature: str) -> dict[str, Any]:
    reason = tally.reason(feature)
    return {"verdict": tally.verdict, **({"reason": reason} if reason else {}), **{kind: tally.kinds[kind] for kind in KINDS}}


def _reasons(entries: Iterable[Entry]) -> dict[str, int]:
    """Commonest first."""
    counted = Counter(reason for entry in entries for reason in entry.reasons)
    return dict(sorted(counted.items(), key=lambda item: (-item[1], item[0])))
