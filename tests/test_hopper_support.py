"""What the Hopper kernels say they take: every reason, from metadata alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from attnzoo import layouts
from attnzoo.backends import flash
from attnzoo.backends.hopper import support
from attnzoo.backends.recompute import rows_contiguous
from attnzoo.inputs import AttentionInputs
from attnzoo.layout import LayoutSummary
from attnzoo.spec import AttentionSpec
from attnzoo.testing.storage import STORAGES, stored

if TYPE_CHECKING:
    from attnzoo.backends.hopper.launch import Launch

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "h200"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (extra triton)")


def spec_of(
    *,
    sizes: tuple[int, int, int, int] = (2, 4, 100, 100),
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    grads: bool = False,
    **options: Any,
) -> AttentionSpec:
    batch, heads, q_len, kv_len = sizes
    q = torch.empty(batch, heads, q_len, head_dim, dtype=dtype, requires_grad=grads)
    k = torch.empty(batch, heads, kv_len, head_dim, dtype=dtype, requires_grad=grads)
    v = torch.empty(batch, heads, kv_len, head_dim if value_dim is None else value_dim, dtype=dtype, requires_grad=grads)
    return AttentionSpec.of(q, k, v, **options)


@pytest.fixture(autouse=True)
def hopper_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "machine_reasons", lambda device: [])


SERVED: dict[str, AttentionSpec] = {
    "plain": spec_of(),
    "fp16": spec_of(dtype=torch.float16),
    "odd head dim": spec_of(head_dim=72),
    "causal": spec_of(causal=True),
    "window": spec_of(window=(16, 0)),
    "lse": spec_of(return_lse=True),
    "deterministic without a gradient": spec_of(deterministic=True),
    **{f"values {dims}": spec_of(head_dim=dims[0], value_dim=dims[1]) for dims in ((192, 128), (96, 64), (128, 112), (96, 80), (64, 32))},
}

REFUSED: dict[str, tuple[AttentionSpec, str]] = {
    "fp32": (spec_of(dtype=torch.float32), "dtype is torch.float32"),
    "small head dim": (spec_of(head_dim=16), "head_dim is 16"),
    "large head dim": (spec_of(head_dim=264), "head_dim is 264"),
    "mask": (spec_of(mask=torch.ones(100, 100, dtype=torch.bool)), "a mask"),
    "bias": (spec_of(bias=torch.zeros(100, 100)), "a bias"),
    "segments": (spec_of(segment_ids=torch.zeros(2, 100, dtype=torch.int32)), "segment_ids"),
    "softcap": (spec_of(softcap=30.0), "softcap"),
    "sinks": (spec_of(sinks=torch.zeros(4)), "sinks"),
    "dropout": (spec_of(dropout_p=0.1), "dropout"),
    **{
        f"values {dims}": (spec_of(head_dim=dims[0], value_dim=dims[1]), f"value_dim {dims[1]} beside head_dim {dims[0]}")
        for dims in ((64, 16), (96, 24), (192, 24), (64, 72), (128, 192), (192, 256), (256, 128))
    },
    "values with a gradient": (spec_of(head_dim=96, value_dim=64, grads=True), "value_dim 64 beside head_dim 96"),
    "no batch": (spec_of(sizes=(0, 4, 100, 100)), "a size of zero"),
    "no heads": (spec_of(sizes=(2, 0, 100, 100)), "a size of zero"),
    "no queries": (spec_of(sizes=(2, 4, 0, 100)), "a size of zero"),
    "no keys": (spec_of(sizes=(2, 4, 100, 0), grads=True), "a size of zero"),
    "no values": (spec_of(value_dim=0), "a size of zero"),
    "zero scale": (spec_of(scale=0.0), "scale is 0.0"),
    "negative scale": (spec_of(scale=-1.0), "scale is -1.0"),
    "scale that is 0 in fp32": (spec_of(scale=1e-50), "scale is 1e-50"),
    "scale beyond fp32": (spec_of(scale=3e38), "scale is 3e+38"),
}


@pytest.mark.parametrize("name", SERVED)
def test_serves(name: str) -> None:
    assert support.reasons_against(SERVED[name]) == []


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name(name: str) -> None:
    spec, reason = REFUSED[name]
    reasons = support.reasons_against(spec)
    assert len(reasons) == 1, f"expected one reason, got {reasons}"
    assert reason in reasons[0], f"{reasons[0]!r} does not say {reason!r}"


def test_a_gradient_narrows_what_is_taken() -> None:
    q = torch.empty(1, 2, 10, 256, dtype=torch.bfloat16, requires_grad=True)
    reasons = support.reasons_against(AttentionSpec.of(q, q, q, deterministic=True))
    assert len(reasons) == 2, f"head_dim and deterministic stand against it, got {reasons}"


def test_a_gradient_narrows_the_lengths() -> None:
    """The launches of the backward count tiles along a side of the grid that ends at 65535."""
    spec = dataclasses.replace(spec_of(), q_len=5_000_000)
    assert support.reasons_against(spec) == []
    (reason,) = support.reasons_against(dataclasses.replace(spec, grads=("q",)))
    assert "a length is 5000000, the Hopper kernels take at most 4194176 with a gradient" in reason


@pytest.mark.parametrize(("stride", "is_taken"), [(64, True), (72, True), (68, False), (0, False)])
def test_the_copy_engine_takes_strides_of_16_bytes(stride: int, is_taken: bool) -> None:
    q = torch.empty(2, 4, 100, 64, dtype=torch.bfloat16)
    k = torch.empty(2 * 4 * 100 * 80, dtype=torch.bfloat16).as_strided((2, 4, 100, 64), (32000, 8000, stride, 1))
    reasons = support.reasons_against(AttentionSpec.of(q, k, q))
    assert (not reasons) == is_taken, f"stride {stride}: {reasons}"


def test_strides_of_a_dim_of_one_do_not_count() -> None:
    q = torch.empty(64, dtype=torch.bfloat16).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    assert support.reasons_against(AttentionSpec.of(q, q, q)) == []


def test_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(support, "_found_triton", ["3.8.0"])
    reasons = support.machine_reasons(torch.device("cpu"))
    assert [reason.split(" is ")[0] for reason in reasons] == ["device", "triton"], f"got {reasons}"


@pytest.mark.parametrize(
    ("found", "is_taken"), [("3.6.0", True), ("3.6.1+git1a2b", True), ("3.60.0", False), ("3.7.1", False), ("of unknown version", False)]
)
def test_tritons_are_told_apart(found: str, is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(support, "_found_triton", [found])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert (support.machine_reasons(torch.device("cuda", 0)) == []) == is_taken


@pytest.mark.parametrize(
    ("found", "grads", "expected"),
    [
        ("3.6.0", True, ["forward: Hopper kernel", "backward: Hopper kernel"]),
        ("3.6.0", False, ["forward: Hopper kernel"]),
        (
            "3.7.1",
            True,
            [f"{name}: portable kernel: triton is 3.7.1, the Hopper kernels have been run under 3.6" for name in ("forward", "backward")],
        ),
    ],
)
def test_explain_says_which_kernel_and_why(found: str, grads: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(flash, "machine_reasons", lambda device: [])
    monkeypatch.setattr(flash, "is_small", lambda spec: False)
    monkeypatch.setattr(flash, "reasons_against_hopper", flash.reasons_against_hopper.__wrapped__)  # what is kept holds for a machine
    monkeypatch.setattr(support, "_found_triton", [found])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    spec = dataclasses.replace(spec_of(grads=grads), device=torch.device("cuda", 0))
    assert flash.Flash(is_interpreted=False).notes(spec) == expected


@pytest.mark.parametrize(
    ("grads", "is_portable"),
    [("q", True), ("k", True), ("v", True), ("kv", True), ("qk", False), ("qv", False), ("qkv", False)],
)
def test_where_the_portable_backward_leaves_a_pass_out_it_serves(grads: str, is_portable: bool, processors: None) -> None:
    spec = dataclasses.replace(spec_of(sizes=(4, 16, 512, 512)), grads=tuple(grads))
    fastest = flash.reasons_against_hopper.__wrapped__(spec, "backward")
    assert bool(fastest) == is_portable, fastest
    assert not flash.reasons_against_hopper.__wrapped__(spec, "backward", "hopper"), "held to the Hopper kernels, it takes them"


def test_few_queries_over_many_keys_keep_the_hopper_backward(processors: None) -> None:
    """The portable dq kernel would walk all keys in 8 programs, on 132 multiprocessors."""
    spec = dataclasses.replace(spec_of(sizes=(1, 8, 128, 131072), head_dim=128), grads=("q",))
    assert not flash.reasons_against_hopper.__wrapped__(spec, "backward")


def test_what_was_timed_backs_the_choice_of_the_backward(processors: None) -> None:
    """The committed times: of no subset is the kernel that is chosen now the slower one."""
    rows = json.loads((RESULTS / "flash.json").read_text())["subsets"]
    assert {tuple(row["grads"]) for row in rows} >= {("q",), ("k",), ("v",), ("q", "k"), ("k", "v"), ("q", "k", "v")}
    for row in rows:
        length, dim = row["length"], row["dim"]
        spec = dataclasses.replace(spec_of(sizes=(16384 // length, 2048 // dim, length, length), head_dim=dim), grads=tuple(row["grads"]))
        chosen, other = ("portable", "hopper") if flash.is_one_sided(spec) else ("hopper", "portable")
        assert row[chosen] <= row[other], row


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches that would have been, in order."""
    from attnzoo.backends.hopper.launch import Launch

    found: list[Launch] = []
    monkeypatch.setattr(Launch, "__call__", lambda launch: found.append(launch))
    return found


@needs_triton
@pytest.mark.parametrize("has_layout", [False, True])
def test_what_hooks_on_saved_tensors_moved_is_aligned_again(has_layout: bool, launched: list[Launch]) -> None:
    """The kernels read 16 bytes at a time; o comes from the graph, and a hook may have packed it anywhere."""
    from attnzoo.backends.hopper import launch as dense
    from attnzoo.backends.hopper_sparse import launch as sparse

    q, o, grad_o = [torch.empty(1 + 4 * 128 * 64, dtype=torch.bfloat16)[1:].view(1, 4, 128, 64) for _ in range(3)]
    q.requires_grad_()
    lse = torch.empty(1, 4, 128)
    if has_layout:
        layout = layouts.causal(128, block=128)
        sparse.backward(AttentionSpec.of(q, q, q, layout=layout), layout, (q, q, q), o, lse, grad_o, None)
    else:
        dense.backward(AttentionSpec.of(q, q, q), q, q, q, o, lse, grad_o, None)
    assert [tensor.data_ptr() % 16 for tensor in launched[0].arguments[:2]] == [0, 0]


# What is taken of each way to lie in memory, of a tensor without a dim of one: odd or zero strides are not
TAKEN = {name: not name.startswith(("odd", "expand", "overlap")) for name in STORAGES if not name.startswith("far")}


@needs_triton
@pytest.mark.parametrize("storage", TAKEN)
@pytest.mark.parametrize(("batch", "heads", "length"), [(2, 2, 65), (1, 2, 128), (2, 1, 1), (1, 1, 1)])
def test_the_copy_engine_is_told_the_truth_of_whatever_is_taken(
    storage: str, batch: int, heads: int, length: int, launched: list[Launch]
) -> None:
    """From any address: descriptors lie on 16 bytes, and say of every dim of more than one how it really goes on."""
    from attnzoo.backends.hopper import launch as dense
    from attnzoo.backends.hopper.descriptors import Descriptor
    from attnzoo.backends.hopper_sparse import launch as sparse

    tensors = [stored(torch.zeros(batch, heads, length, 64, dtype=torch.bfloat16), storage, offset=offset) for offset in (0, 1, 8, 3, 4)]
    lse, layout = torch.empty(batch, heads, length), layouts.causal(length)
    spec = AttentionSpec.of(*tensors[:3])
    q, k, v = [getattr(AttentionInputs.of(spec, *tensors[:3]), name) for name in "qkv"]
    is_taken = not support.reasons_against(spec)
    assert is_taken == TAKEN[storage] or 1 in (batch, heads, length), f"strides {spec.strides}"
    if not is_taken:
        return
    with_layout = AttentionSpec.of(*tensors[:3], layout=layout)
    o, grad_o = [rows_contiguous(tensor) for tensor in tensors[3:]]
    dense.forward(spec, q, k, v)
    dense.backward(spec, q, k, v, o, lse, grad_o, lse.mean().expand(lse.shape))
    sparse.forward(with_layout, layout, q, k, v)
    sparse.backward(with_layout, layout, (q, k, v), o, lse, grad_o, None)
    found = [argument for launch in launched for argument in launch.arguments if isinstance(argument, Descriptor)]
    assert len(found) == 4 + 9 + 4 + 9
    for each in found:
        unit = 16 // each.base.element_size()
        assert each.base.data_ptr() % 16 == 0, f"a base of {tuple(each.shape)} lies between two of 16 bytes"
        assert each.strides[-1] == 1
        assert all(0 < stride < 2**40 // each.base.element_size() and stride % unit == 0 for stride in each.strides[:-1]), each.strides
        real = each.base.stride()
        assert all(size == 1 or stride == goes_on for size, stride, goes_on in zip(each.shape, each.strides, real)), (each.strides, real)


@needs_triton
@pytest.mark.parametrize("heads", [1, 7])
@pytest.mark.parametrize(  # what fits into the memory of a card
    ("batch", "q_len", "kv_len"),
    [(1, 1, 4_194_176), (2, 4_194_176, 1), (1, 129, 4_000_001), (65_536, 3, 129), (99_991, 1, 1), (99_991, 130, 1)],
)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block", [None, (128, 128), (65_536, 65_536)])
def test_no_call_has_more_programs_than_a_grid(
    batch: int, heads: int, q_len: int, kv_len: int, is_causal: bool, block: tuple[int, int] | None
) -> None:
    from attnzoo.backends.hopper import launch as dense
    from attnzoo.backends.hopper_sparse import launch as sparse
    from attnzoo.backends.hopper_sparse.support import reasons_against

    spec = dataclasses.replace(spec_of(), batch=batch, q_heads=heads, kv_heads=heads, q_len=q_len, kv_len=kv_len, grads=("q", "k", "v"))
    if block is None:
        spec = dataclasses.replace(spec, causal=is_causal, align="bottom_right" if is_causal else None)
        assert support.reasons_against(spec) == []
        plans = [dense.forward_plan(dataclasses.replace(spec, grads=())), dense.backward_plan(spec)]
    else:
        spec = dataclasses.replace(spec, layout=LayoutSummary(1, 1, *block, 1, 1, ("band",)))
        assert reasons_against(spec, "forward") == reasons_against(spec, "backward") == []
        types = (True, None, False, True, True, True, True)
        plans = [sparse.forward_plan(spec, types, is_causal), sparse.backward_plan(spec, types, is_causal)]
    for plan in plans:
        assert all(0 < side <= most for side, most in zip(plan.grid, (2**31 - 1, 65_535, 65_535))), plan.grid
        assert all(abs(size) < 2**31 for size in plan.sizes), plan.sizes
