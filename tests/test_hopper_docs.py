"""What docs/hopper.md says beside its tables of measurements: the targets, how right it is, and what the kit reaches."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
import torch

from attnzoo.backends import flash
from attnzoo.backends.hopper import support
from attnzoo.spec import AttentionSpec
from attnzoo.testing.cases import CASES
from attnzoo.testing.problem import Problem
from attnzoo.testing.storage import stored

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "hopper.md").read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())
Row = dict[str, Any]


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / "h200" / f"{name}.json").read_text(encoding="utf-8"))


ROWS: list[Row] = results("hopper_compare")["rows"]


def chosen(section: str, kind: str = "forward", **wanted: Any) -> list[Row]:
    found = [row for row in ROWS if row.get("section") == section and row["pass"] == kind]
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def to_best(rows: list[Row], *, least_length: int = 0) -> list[float]:
    return [row["ours_to_best"] for row in rows if row["length"] >= least_length]


def over(rows: list[Row], peer: str) -> list[float]:
    return [row["tflops"]["ours"] / row["tflops"][peer] for row in rows]


def span(ratios: list[float], digits: int) -> str:
    return f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}"


def reached() -> dict[str, tuple[str, ...]]:
    """By the start of a target's line, what the line says."""
    lines: dict[str, tuple[str, ...]] = {}
    for kind in ("forward", "backward"):
        ratios = to_best(chosen("table", kind))
        lines[kind] = (f"{geometric_mean(ratios):.3f}; least {min(ratios):.3f}",)
    causal = chosen("table", head_dim=128, causal=True)
    lines["forward"] += (f"d64 from 8k on {span(to_best(chosen('table', head_dim=64), least_length=8192), 3)}",)
    lines["forward"] += (f"d128 causal from 2k on {span(to_best(causal, least_length=2048), 3)}",)
    lines["backward"] += (f"d64 causal {span(to_best(chosen('table', 'backward', head_dim=64, causal=True)), 3)}",)
    lines["backward"] += (f"d128 from 2k on {span(to_best(chosen('table', 'backward', head_dim=128), least_length=2048), 3)}",)
    dims = chosen("dims")
    cudnn, fa2 = over(dims, "cudnn"), over(dims, "fa2")
    ahead = [ratio for ratio in cudnn if ratio > 1]
    behind = [f"{row['cell'].split()[1]} full {row['length']}: {ratio:.3f}" for row, ratio in zip(dims, cudnn) if ratio <= 1]
    lines["d96"] = (f"{span(ahead, 2)} of cuDNN in {len(ahead)} of {len(dims)} cells", f"{span(fa2, 1)} of fa2", *behind)
    grouped = chosen("grouped")
    fa4 = over(grouped, "fa4")
    ahead = [ratio for ratio in fa4 if ratio > 1]
    behind = [
        f"{'causal' if row['causal'] else 'full'} {row['length'] // 1024}k: {ratio:.3f}" for row, ratio in zip(grouped, fa4) if ratio <= 1
    ]
    lines["64/8"] = (f"{span(ahead, 2)} in {len(ahead)} of {len(grouped)} cells", *behind)
    narrow, wide = (to_best(chosen("window", window=window)) for window in (128, 1024))
    lines["window"] = (f"{span(narrow, 2)}; {span(wide, 3)}",)
    steps = [row for row in ROWS if row["pass"] == "step"]
    fa2 = [row["tokens_per_second"]["ours"] / row["tokens_per_second"]["fa2"] for row in steps]
    best = ", ".join(f"{row['ours_to_best']:.3f}" for row in steps)
    lines["GPT-2"] = (f"{best}; {', '.join(f'{ratio:.2f}' for ratio in fa2)} of fa2",)
    return lines


@pytest.mark.parametrize("target", reached())
def test_a_target_says_what_was_measured(target: str) -> None:
    (line,) = [line for line in PAGE.partition("### Against the targets")[2].splitlines() if line.startswith(f"| {target}")]
    missing = [said for said in reached()[target] if said not in line]
    assert not missing, f"the line of {target} does not say {missing}"


def test_backwards_that_have_no_target_are_as_the_page_says() -> None:
    for section, what in (("window", "windows"), ("grouped", "grouped heads")):
        assert f"{what} {span(to_best(chosen(section, 'backward')), 2)}" in PROSE


def test_the_page_says_how_far_the_matrix_is_from_one_process() -> None:
    speeds: dict[tuple[Any, ...], dict[str, float]] = {}
    for cell in results("bench")["cells"]:
        work = cell["workload"]
        if cell["status"] == "time" and (work["cache"], work["launch"], work["layout"]) == ("cold", "eager", ""):
            key = work["direction"], work["head_dim"], work["causal"], work["length"], work["heads"], work["kv_heads"]
            speeds.setdefault(key, {})[cell["backend"]] = cell["tflops"]
    apart = []
    for row in (*chosen("table"), *chosen("table", "backward")):
        found = speeds[row["pass"], row["head_dim"], row["causal"], row["length"], row["q_heads"], row["kv_heads"]]
        ours = found["flash"] / max(found[peer] for peer in ("sdpa_flash", "sdpa_cudnn", "flex", "fa3", "fa4") if peer in found)
        apart.append(ours / row["ours_to_best"] - 1)
    assert f"by up to {max(map(abs, apart)):.0%}, the long ones to our loss" in PROSE


def test_the_page_says_how_right_it_is() -> None:
    checked, repeated = results("hopper_check")["rows"], results("hopper_repeat")["rows"]
    worst = {name: max(row["errors"].get(name, 0.0) for row in checked) for name in ("o", "dq", "dk", "dv")}
    gradient = max(worst[name] for name in ("dq", "dk", "dv"))
    right = sum(not row["bad"] for row in checked)
    assert f"{right} of {len(checked)} kinds of call were right" in PROSE
    assert f"at most {worst['o']:.1e} for o, {gradient:.1e} for gradients".replace("e-0", "e-") in PROSE
    assert f"{repeated[0]['times']:,} repeats of {len(repeated)} kinds".replace(" 10 ", " ten ") in PROSE
    assert not any(row["changed"] or row["dq_far"] for row in repeated)


def spec_of(problem: Problem) -> AttentionSpec:
    """Of tensors without memory; without the features that the Hopper kernels refuse."""
    lengths = ((problem.q_heads, problem.q_len), (problem.k_heads, problem.k_len), (problem.k_heads, problem.k_len))
    tensors = [
        stored(torch.empty(problem.batch, *each, dim, dtype=getattr(torch, problem.dtype), device="meta"), storage, offset=problem.offset)
        for each, dim, storage in zip(lengths, (problem.head_dim, problem.head_dim, problem.v_dim), problem.storage)
    ]
    q, k, v = [tensor.requires_grad_(name in problem.grads) for name, tensor in zip("qkv", tensors)]
    options = {name: getattr(problem, name) for name in ("causal", "align", "window", "scale", "deterministic", "return_lse")}
    return AttentionSpec.of(q, k, v, **options)


def test_the_page_says_what_of_the_kit_reaches_the_kernels(monkeypatch: pytest.MonkeyPatch, processors: None) -> None:
    """On a card of 132 multiprocessors."""
    monkeypatch.setattr(support, "machine_reasons", lambda device: [])
    reasons = flash.reasons_against_hopper.__wrapped__
    served = {"float16", "bfloat16"}
    refused = ("mask", "bias", "segments", "layout", "sinks", "softcap")
    problems = [case.problem for case in CASES]
    specs = [spec_of(p) for p in problems if p.dtype in served and not p.dropout_p and all(getattr(p, name) is None for name in refused)]
    forward, held = (sum(not reasons(spec, "forward", kernels) for spec in specs) for kernels in ("fastest", "hopper"))
    backward = sum(bool(spec.grads) and not reasons(spec, "backward") for spec in specs)
    assert f"{forward} of the {len(CASES):,} cases to the Hopper forward and {backward} to the Hopper backward" in PROSE
    assert f"where {held} cases run the forward" in PROSE
