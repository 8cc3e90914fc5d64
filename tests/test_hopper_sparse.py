"""The Hopper kernels over a layout: compiled without a GPU, what ptxas says of them; which calls they take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import compile_all, needs_triton

from attnzoo import layouts
from attnzoo.backends.hopper.support import TRITONS
from attnzoo.backends.hopper.tiles import backward_tile
from attnzoo.backends.hopper_sparse.support import reasons_against
from attnzoo.layout import BlockLayout
from attnzoo.spec import AttentionSpec

SCRIPT = Path(__file__).with_name("hopper_sparse_aot.py")
SHARED_BYTES = 227 * 1024

PROCESSES = (  # one process a line
    ("forward-128-random", "forward-128-causal", "forward-128-window", "forward-128-documents"),
    ("forward-64-narrow", "forward-64-bits", "backward-64-random", "backward-64-bits"),
    ("backward-128-random", "backward-128-causal", "backward-128-documents"),
    ("forward-128-packed", "forward-64-packed", "backward-64-packed"),
    ("backward-128-packed", "backward-64-causal", "backward-64-documents"),
)

# Bytes that may spill, written and read: where partial blocks are tested, and in the producer that describes them.
SPILLS = {
    "forward-128-documents": 24,
    "forward-128-packed": 72,
    "forward-128-window": 24,
    "backward-64-bits": 300,
    "backward-64-causal": 236,
    "backward-64-documents": 1200,
    "backward-64-packed": 1720,
    "backward-128-random": 8,
    "backward-128-causal": 292,
    "backward-128-documents": 672,
    "backward-128-packed": 720,
}
LATER_SPILLS = 160  # what other versions of Triton may add; the kernels are served under 3.6 alone


def problems_of(name: str, facts: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel."""
    found = []
    if facts["serialised"]:
        found.append(f"ptxas serialises wgmma: {facts['serialised']}")
    found += [f"ptxas forgot to set what it reads: {line}" for line in facts["unset"]]
    allowed = SPILLS.get(name, 0) + (0 if facts["triton"].startswith(TRITONS) else LATER_SPILLS)
    if facts["spilled_bytes"] > allowed:
        found.append(f"{facts['spilled_bytes']} bytes spill, {allowed} allowed")
    if facts["shared_bytes"] > SHARED_BYTES:
        found.append(f"{facts['shared_bytes']} bytes of shared memory, {SHARED_BYTES} at most")
    kernel, head_dim, _ = name.split("-")
    _, columns = backward_tile(int(head_dim)).dq_block(int(head_dim))  # of a half of dQ; TMA takes 128 bytes of a row at a time
    wanted = {"UTMAREDG": 0, "ATOMG": 1} if kernel == "forward" else {"UTMAREDG": 2 * (columns * 4 // 128), "RED": 0}
    found += [f"{facts['counts'][each]} {each}, expected {count}" for each, count in wanted.items() if facts["counts"][each] != count]
    if facts["counts"]["UTMALDG"] < 4:
        found.append(f"{facts['counts']['UTMALDG']} UTMALDG: q, k and v do not all come by TMA")
    return found


@pytest.mark.kernels
@needs_triton
@pytest.mark.parametrize("names", PROCESSES, ids=[names[0] for names in PROCESSES])
def test_kernels_compile_tight(names: tuple[str, ...]) -> None:
    facts = compile_all(SCRIPT, names)
    found = [f"{name}: {problem}" for name in names for problem in problems_of(name, facts[name])]
    assert not found, "\n".join(found)


def test_problems_are_seen() -> None:
    counts = {"UTMAREDG": 1, "ATOMG": 1, "UTMALDG": 2, "RED": 0}
    facts = {"triton": "3.6.0", "serialised": ["C7511"], "unset": ["R5"], "spilled_bytes": 8, "shared_bytes": 232449, "counts": counts}
    assert len(problems_of("forward-128-random", facts)) == 6


# Which calls they take


def spec_of(layout: BlockLayout | None, *, head_dim: int = 64, grads: bool = False, **options: Any) -> AttentionSpec:
    q, k, v = [torch.zeros(1, 2, 512, head_dim, dtype=torch.bfloat16, requires_grad=grads) for _ in "qkv"]
    return AttentionSpec.of(q, k, v, layout=layout, **options)


def about_the_call(spec: AttentionSpec, name: str) -> list[str]:
    """Without what is about this machine."""
    return [reason for reason in reasons_against(spec, name) if not reason.startswith(("device is", "triton is", "compute capability"))]


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("layout", [layouts.causal(512), layouts.documents([200, 312]), layouts.random(512, density=0.5, block=256)])
def test_takes_every_rule_of_large_blocks(layout: BlockLayout, name: str) -> None:
    assert about_the_call(spec_of(layout, grads=True), name) == []


@pytest.mark.parametrize(
    ("spec", "name", "reason"),
    [
        (spec_of(None), "forward", "the call has no layout"),
        (spec_of(layouts.causal(512, block=64)), "forward", "blocks are 64 x 64, the Hopper kernel takes multiples of 128 x 64"),
        (spec_of(layouts.causal(512, block=(128, 64))), "backward", "blocks are 128 x 64, the Hopper kernel takes multiples of 128 x 128"),
        (spec_of(layouts.causal(512), head_dim=256), "forward", "head_dim is 256, the Hopper kernel over a layout takes at most 128"),
        (spec_of(layouts.causal(512), causal=True), "forward", "causal or window beside a layout, which the Hopper kernel doesn't take"),
        (spec_of(layouts.causal(512), softcap=2.0), "forward", "the call has softcap, which the Hopper kernels don't take"),
    ],
)
def test_refusals_name_what_was_found_and_what_is_taken(spec: AttentionSpec, name: str, reason: str) -> None:
    assert reason in about_the_call(spec, name)


def test_the_backward_is_not_taken_as_deterministic() -> None:
    spec = dataclasses.replace(spec_of(layouts.causal(512), grads=True), deterministic=True)
    assert about_the_call(spec, "forward") == []
    assert any("deterministic" in reason for reason in about_the_call(spec, "backward"))


@needs_triton
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("layout", "is_long"),
    [
        (layouts.bigbird(8192, block=128), True),
        (layouts.longformer(8192, reach=2), True),
        (layouts.causal(8192), False),
        (layouts.butterfly(8192, block=128), False),
        (layouts.sliding_window(8192, window=512), False),
        (layouts.random(8192, density=1 / 32, block=128), False),
        (layouts.documents([700] * 11 + [492]), False),
    ],
)
def test_lines_that_take_half_of_the_call_start_first(layout: BlockLayout, is_long: bool, axis: int) -> None:
    from attnzoo.backends.block_sparse_triton.schedule import Schedule
    from attnzoo.backends.hopper_sparse.launch import has_long_line

    q = torch.empty(1, 16, 8192, 64, dtype=torch.bfloat16, device="meta")
    spec = dataclasses.replace(AttentionSpec.of(q, q, q), layout=layout.summary)
    assert has_long_line(spec, Schedule.of(layout), axis) is is_long


@needs_triton
def test_heads_side_by_side_stay_within_the_l2() -> None:
    from attnzoo.backends.hopper_sparse.launch import backward_width

    def width(length: int, head_dim: int, q_heads: int = 16, kv_heads: int = 16) -> int:
        q, k = [torch.empty(1, heads, length, head_dim, dtype=torch.bfloat16, device="meta") for heads in (q_heads, kv_heads)]
        return backward_width(AttentionSpec.of(q, k, k))

    assert [width(8192, 128), width(32768, 64), width(32768, 128)] == [4, 2, 1]
    assert width(8192, 128, 16, 2) == 1, "q, dO and dQ are of all query heads of the group"
    assert width(1024, 64, 6, 6) == 2, "groups of heads are whole"


@needs_triton
def test_tiles_beyond_the_keys_are_tested() -> None:
    """256 keys a block and 384 of them: the last tile of 128 holds none, and its zeros are no keys to attend to."""
    from attnzoo.backends.block_sparse_triton.schedule import Schedule
    from attnzoo.backends.hopper_sparse.launch import backward_plan

    q = torch.empty(1, 2, 384, 64, dtype=torch.float16)
    for kv_len, expected in ((384, True), (512, False)):
        k = torch.empty(1, 2, kv_len, 64, dtype=torch.float16)
        layout = BlockLayout.from_blocks(torch.ones(2, 2, dtype=torch.bool), block=256, q_len=384, kv_len=kv_len)
        plan = backward_plan(AttentionSpec.of(q, k, k, layout=layout), Schedule.of(layout).types, False)
        assert plan.constants[3] is expected, "TESTED: a tile of a cut block is masked"


@needs_triton
def test_what_is_not_known_of_a_layout_is_asked_until_it_is() -> None:
    from types import SimpleNamespace

    from attnzoo.backends.block_sparse_triton.schedule import Longest

    answers = [False, True]
    event = SimpleNamespace(query=lambda: answers.pop(0))
    longest = Longest(torch.tensor([3, 5]), (event, SimpleNamespace(device=torch.device("cpu"))))
    assert [longest[0], longest[0], longest[1], longest[0]] == [None, 3, 5, 3]
    assert not answers, "an event that has happened is not asked again: another thread may be capturing"
    assert Longest(None, None)[0] is None
