"""The measured part of docs/io.md: the committed results of io_gpu.py beside the account, which is made now.

python benchmarks/io_tables.py            write it into docs/io.md, between its two markers
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

from io_cases import CASES, EAGER, TILES, account_of_case, account_of_tile, accounts_of_paper, title
from pages import RESULTS, table, write

from attnzoo.cli.io import PAPER
from attnzoo.traffic import Traffic

FILE = RESULTS / "io.json"
ALLOWED = 0.15
"""How far the account may be off what is counted."""
PAPERS = {"flash": "FlashAttention", EAGER: "standard attention"}
TILED_TFLOP = 4 * 16 * 8192**2 * 64 / 1e12
"""Of the forward whose tiles are varied."""
A100_TFLOPS, A100_TERABYTES = 312, "1.5 to 2.0"
"""Dense fp16 of its data sheet; a second, as the paper gives it."""


def with_accounts(results: dict[str, Any]) -> dict[str, Any]:
    """What was measured, each with the bytes and FLOPs that attnzoo predicts for it today, whatever the file says of those."""
    paper = accounts_of_paper()
    sized = {title(tile): {"l2_gb": account_of_tile(tile).moved / 1e9} for tile in TILES}
    worked = {name: {"gflop": account.flops / 1e9, "l2_gb": account.moved / 1e9} for name, account in paper.items()}
    parts: dict[str, dict[str, dict[str, Any]]] = {
        "measure": {name: beside(account_of_case(CASES[name]), each) for name, each in results.get("measure", {}).items()},
        "paper": {name: each | worked.get(name, {}) for name, each in results.get("paper", {}).items()},
        "paper_bytes": {name: beside(paper[name], each) for name, each in results.get("paper_bytes", {}).items()},
        "tiles": {name: each | sized[name] for name, each in results.get("tiles", {}).items()},
    }
    return results | parts


def beside(account: Traffic, counted: dict[str, Any]) -> dict[str, Any]:
    """Counted bytes with the predicted ones and their ratio."""
    moved = counted["measured_l2"]
    ratio = None if moved is None else moved / account.moved
    return counted | {"predicted_l2": account.moved, "compulsory": account.compulsory, "ratio": ratio}


def measured(results: dict[str, Any]) -> str:
    """Everything between the markers, of `with_accounts`; what did not run is left out, what failed says so."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if name in ("torch", "triton"))
    parts = [f"One {machine['name']}, {versions}, commit {commits(results)} (`benchmarks/results/h200/io.json`)."]
    if results.get("measure"):
        parts += [
            "bf16, one batch, 16 heads, D = 128; sparse is a quarter of the blocks of 128 x 128; `both` is forward and backward, counted\n"
            "in one run, and `backward` is what it has beyond the forward. GB:",
            counted(with_backward(results["measure"])),
            verdict(with_backward(results["measure"])),
            beyond(results["measure"]),
        ]
    if results.get("paper"):
        parts += ["GPT-2 medium's attention, fp16, forward and backward, beside the paper's A100:", papers(results["paper"])]
        parts += [why(results["paper"], machine["ceilings"], results.get("paper_bytes", {}))]
    if results.get("paper_bytes"):
        parts += ["The same shape's bytes, counted by ncu, GB:", paper_counted(results["paper_bytes"])]
    if results.get("tiles"):
        parts += ["The portable forward at S = 8192, D = 64, 16 heads, by its tile:", tiles(results["tiles"])]
        parts += [turn(results["tiles"])]
    return "\n\n".join(filter(None, parts))


def commits(results: dict[str, Any]) -> str:
    """Of the first part that was measured, and of those that were measured at another."""
    first = results["machine"].get("commit")
    others = [f"{part} at {commit}" for part, commit in results.get("commits", {}).items() if commit != first]
    return ", ".join([str(first), *others])


def wrapped(text: str) -> str:
    return textwrap.fill(text, 125, break_long_words=False, break_on_hyphens=False)


def with_backward(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each `both` is followed by a `backward`: its numbers less those of the forward, where both were counted."""
    found: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        found[name] = case
        forward = cases.get(name.replace("-both-", "-forward-"))
        if "-both-" not in name or forward is None:
            continue
        sums = ("predicted_l2", "compulsory", "measured_l2", "measured_dram")
        less = {key: None if None in (case[key], forward[key]) else case[key] - forward[key] for key in sums}
        if less["measured_l2"] is not None and less["predicted_l2"]:
            found[name.replace("-both-", "-backward-")] = less | {"ratio": less["measured_l2"] / less["predicted_l2"]}
    return found


def counted(cases: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, case in cases.items():
        kind, direction, length = name.split("-")
        numbers = [_gigabytes(case[key]) for key in ("predicted_l2", "measured_l2")]
        ratio = "" if case["ratio"] is None else f"{case['ratio']:.3f}"
        memory = [_gigabytes(case[key]) for key in ("compulsory", "measured_dram")]
        rows.append((kind, direction, length, *numbers, ratio, *memory))
    head = ("call", "pass", "S", "account, L2", "counted, L2", "counted / account", "device memory, at least", "device memory, counted")
    return table(head, rows)


def verdict(cases: dict[str, dict[str, Any]]) -> str:
    """How many are within what is allowed, and which are not."""
    off = {name: case["ratio"] for name, case in cases.items() if case["ratio"] is not None and abs(case["ratio"] - 1) > ALLOWED}
    told = [case for case in cases.values() if case["ratio"] is not None]
    text = f"{len(told) - len(off)} of {len(cases)} cases are within {ALLOWED:.0%} of the account."
    if off:
        text += " Beyond it: " + ", ".join(f"{name} ({ratio:.2f})" for name, ratio in off.items()) + "."
    missing = {name: case.get("problem", "") for name, case in cases.items() if case["ratio"] is None}
    return text + "".join(f" {name} was not counted: {' '.join(problem.split())[-120:]}." for name, problem in missing.items())


def beyond(cases: dict[str, dict[str, Any]]) -> str:
    """What moves far more of device memory than it must, and in which kernel."""
    said = []
    for name, case in cases.items():
        counted, least = case["measured_dram"], case["compulsory"]
        if counted is None or counted <= 3 * least:
            continue
        kernel = max(case["kernels"], key=lambda each: each["dram_read"] + each["dram_written"])
        most = kernel["dram_read"] + kernel["dram_written"]
        said.append(f"{name}: {counted / least:.1f} times the least, {_gigabytes(most)} GB of it in `{kernel['kernel']}`.")
    return "Device memory, beyond 3 times what must move: " + " ".join(said) if said else ""


def paper_counted(found: dict[str, dict[str, Any]]) -> str:
    """A row an attention: to and from L2 and in device memory, beside what the paper counted of the latter."""
    rows = []
    for name, each in found.items():
        if each["measured_l2"] is None and each["measured_dram"] is None:
            rows.append((name, " ".join(each.get("problem", "not counted").split())[-120:], "", "", "", ""))
            continue
        numbers = [_gigabytes(each[key]) for key in ("predicted_l2", "measured_l2", "compulsory", "measured_dram")]
        rows.append((name, *numbers, PAPER[PAPERS[name]][1]))
    memory = ("device memory, at least", "device memory, counted", "the paper's, device memory of an A100")
    return table(("attention", "account, L2", "counted, L2", *memory), rows)


def why(found: dict[str, dict[str, Any]], ceilings: dict[str, float], counted: dict[str, dict[str, Any]]) -> str:
    """Where the time of flash and of eager attention goes, here and in the paper."""
    ours, eager = found.get("flash", {}), found.get(EAGER, {})
    if "ms" not in ours or "ms" not in eager:
        return ""
    _, flash_gb, flash_ms = map(float, PAPER["FlashAttention"])
    _, eager_gb, eager_ms = map(float, PAPER["standard attention"])
    rate, theirs = ours["gflop"] / ours["ms"], ours["gflop"] / flash_ms
    moved, copy, product = eager["l2_gb"] / eager["ms"], ceilings["copy"] / 1e3, ceilings["float16"]
    fewer, theirs_fewer = eager["l2_gb"] / ours["l2_gb"], eager_gb / flash_gb
    sentences = (
        f"Why the gain is {eager['ms'] / ours['ms']:.1f} and not the paper's {eager_ms / flash_ms:.1f}: from the A100 to this card",
        f"flash takes {flash_ms / ours['ms']:.1f} times less time, eager {eager_ms / eager['ms']:.1f} times. Flash is bound by arithmetic:",
        f"its products are {rate:.0f} TFLOP/s, {rate / product:.0%} of what a matrix product reaches here ({product:.0f}); the paper's",
        f"time is {theirs:.0f} TFLOP/s for the same products, {theirs / A100_TFLOPS:.0%} of an A100's {A100_TFLOPS}. Eager is bound by",
        f"device memory and uses less of it: the account's {eager['l2_gb']:.1f} GB in its time are {moved:.2f} TB/s, {moved / copy:.0%}",
        f"of a copy's {copy:.2f} (its scaling is a further pass that isn't in the account); the paper's {eager_gb} GB are",
        f"{eager_gb / eager_ms:.2f} TB/s of an A100's {A100_TERABYTES}. The bytes fall by {fewer:.1f} by the account, by",
        f"{theirs_fewer:.1f} in the paper: ours are counted before L2, theirs behind it, {_behind(counted)}",
    )
    return wrapped(" ".join(sentences))


def _behind(counted: dict[str, dict[str, Any]]) -> str:
    """The bytes that the paper counted, if they were counted here."""
    ours, eager = (counted.get(name, {}).get("measured_dram") for name in ("flash", EAGER))
    if not ours or not eager:
        return "which was not counted for this shape here."
    return f"where this card's fall by {eager / ours:.1f}."


def turn(found: dict[str, dict[str, Any]]) -> str:
    """Where larger tiles stop paying, beside the paper's figure."""
    timed = {name: each for name, each in found.items() if "ms" in each}
    if len(timed) < 2:
        return ""
    names, best = list(timed), min(timed, key=lambda name: timed[name]["ms"])
    first, fastest, last = (timed[name] for name in (names[0], best, names[-1]))
    longer, share = last["ms"] / fastest["ms"], last["l2_gb"] / fastest["l2_gb"]
    sentences = (
        f"As in the paper's figure time falls with the bytes at first: from {names[0]} to {best} by {first['ms'] / fastest['ms']:.1f}, the",
        f"bytes by {first['l2_gb'] / fastest['l2_gb']:.1f}. The paper's time stops falling at 256 keys, where arithmetic binds; ours",
        f"turns at {best}, and {names[-1]} takes {longer:.2f} times as long for {share:.2f} of the bytes.",
        "A head's K and V are 2 MB of an L2 of 50, so that what a larger tile saves here are reads of L2, whose rate is not at its",
        "limit there (other tiles have more TB/s); it costs registers, and programs side by side. The small tiles are slow for their",
        "instructions too: no wide product fits them. The paper's third figure, time against density, is [here](block_sparse.md#measured).",
    )
    return wrapped(" ".join(sentences))


def papers(found: dict[str, dict[str, Any]]) -> str:
    base = found.get(EAGER, {}).get("ms")
    theirs_base = float(PAPER["standard attention"][2])
    rows = []
    for name, each in found.items():
        theirs = PAPER.get(PAPERS.get(name, ""))
        if "ms" not in each:
            rows.append((name, each["error"], "", "", "", ""))
            continue
        gain = f"{base / each['ms']:.1f} x" if base else ""
        account = [f"{each[key]:,.1f}" if key in each else "" for key in ("gflop", "l2_gb")]
        beside = ("", "") if theirs is None else (theirs[2], f"{theirs_base / float(theirs[2]):.1f} x")
        rows.append((name, f"{each['ms']:.2f}", gain, *account, " / ".join(filter(None, beside))))
    return table(("attention", "ms", "against eager", "GFLOP", "GB to and from L2, account", "the paper's ms / gain"), rows)


def tiles(found: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, each in found.items():
        rates = ("", "") if "ms" not in each else (f"{each['l2_gb'] / each['ms']:.2f}", f"{TILED_TFLOP / each['ms'] * 1e3:.0f}")
        rows.append((name, f"{each['l2_gb']:.2f}", f"{each['ms']:.3f}" if "ms" in each else each["error"], *rates))
    return table(("queries x keys", "GB to and from L2, account", "ms", "TB/s", "TFLOP/s"), rows)


def _gigabytes(count: float | None) -> str:
    return "" if count is None else f"{count / 1e9:.3g}"


if __name__ == "__main__":
    write("io.md", measured(with_accounts(json.loads(FILE.read_text()))))
