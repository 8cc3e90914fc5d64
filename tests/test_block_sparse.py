"""block_sparse's Triton kernels by the kit's own rule, run by Triton's interpreter; its schedule of a layout; what it skips."""

from __future__ import annotations

import gc
import importlib.util
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attnzoo import layouts
from attnzoo.backends.block_sparse import BlockSparse
from attnzoo.backends.block_sparse_triton.schedule import FARTHEST, Schedule, _kept
from attnzoo.inputs import AttentionInputs
from attnzoo.layout import BlockLayout, BlockLists, ElementRule
from attnzoo.spec import AttentionSpec
from attnzoo.testing.case import Case, run_case
from attnzoo.testing.inputs import make_call
from attnzoo.testing.problem import Blocks, Problem, Segments, Sinks, Table
from attnzoo.testing.subject import Subject

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed (extra triton)")
interpreted = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="needs triton, in its interpreter (TRITON_INTERPRET=1)"
)

# of numpy, which the interpreter computes with: of lanes that are masked out afterwards, and of what triton takes from an array
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

SMALL = Problem(batch=1, q_heads=1, kv_heads=1, q_len=70, head_dim=16, layout=Blocks("pairs", (32, 32)), dtype="float32")
EVERYTHING = ("q", "k", "v", "bias", "sinks")

PROBLEMS: dict[str, Problem] = {
    **{
        f"blocks-{kind}-{m}x{n}": replace(SMALL, layout=Blocks(kind, (m, n)), q_len=length, return_lse=True, loss="o+lse")
        for kind, m, n, length in (
            ("pairs", 16, 16, 40),
            ("random", 16, 16, 70),
            ("pairs", 32, 64, 100),
            ("random", 64, 32, 100),
            ("pairs", 64, 64, 130),
            ("random", 128, 128, 200),
            ("pairs", 128, 128, 140),
            ("pairs", 256, 256, 70),
            ("random", 256, 64, 140),
            ("pairs", 48, 16, 70),
            ("pairs", 20, 24, 50),
            ("random", 20, 24, 50),
            ("random", 1, 1, 5),
            ("pairs", 3, 7, 10),
        )
    },
    **{
        f"rule-{kind}": replace(SMALL, layout=Blocks(kind, (32, 16)))
        for kind in (
            "all",
            "none",
            "empty_rows",
            "empty_columns",
            "last_column",
            "causal",
            "window",
            "all_partial",
            "band_rule",
            "segment_rule",
            "one_pair",
        )
    },
    **{f"{dtype}": replace(SMALL, layout=Blocks("causal", (64, 64)), q_len=130, dtype=dtype) for dtype in ("float16", "bfloat16")},
    **{
        f"per-{dims}": replace(SMALL, batch=2, q_heads=4, kv_heads=2, q_len=40, layout=Blocks("pairs", (16, 16), dims=dims))
        for dims in ("1h", "b1", "bh")
    },
    "segment-rule-per-batch": replace(SMALL, batch=2, q_len=50, layout=Blocks("segment_rule", (16, 16), dims="b1")),
    "lengths-17x33": replace(SMALL, q_len=17, kv_len=33, layout=Blocks("pairs", (16, 16))),
    "lengths-100x5": replace(SMALL, q_len=100, kv_len=5, layout=Blocks("random", (16, 16))),
    "lengths-3x100-causal": replace(SMALL, q_len=3, kv_len=100, layout=Blocks("random"), causal=True, align="bottom_right"),
    "with-causal": replace(SMALL, layout=Blocks("random", (16, 16)), causal=True),
    "with-causal-partial": replace(SMALL, causal=True),
    "with-window": replace(SMALL, layout=Blocks("all", (16, 32)), window=(20, 5)),
    "with-mask": replace(SMALL, mask=Table("random")),
    "with-segments": replace(SMALL, segments=Segments()),
    "with-segments-over-full-blocks": replace(SMALL, layout=Blocks("all", (32, 16)), segments=Segments("interleaved")),
    "with-bias": replace(SMALL, q_heads=2, kv_heads=1, bias=Table("random", "1hqk"), grads=EVERYTHING[:4]),
    "with-bias-of-keys": replace(SMALL, batch=2, q_len=40, bias=Table("random", "b11k"), grads=EVERYTHING[:4]),
    "with-bias-of-queries": replace(SMALL, q_len=40, bias=Table("random", "11q1"), grads=EVERYTHING[:4]),
    "with-bias-over-20x24": replace(SMALL, layout=Blocks("pairs", (20, 24)), bias=Table("random"), grads=EVERYTHING[:4]),
    "with-dropout": replace(SMALL, q_heads=2, dropout_p=0.3, dropout_seed=6),
    "with-dropout-over-blocks-of-7": replace(SMALL, q_len=20, layout=Blocks("random", (16, 7)), dropout_p=0.3, dropout_seed=6),
    "with-softcap": replace(SMALL, softcap=3.0),
    "with-sinks": replace(SMALL, layout=Blocks("empty_rows", (16, 16)), sinks=Sinks(), grads=("q", "k", "v", "sinks")),
    "with-value-dim": replace(SMALL, value_dim=40),
    "with-scale": replace(SMALL, scale=-0.4),
    "with-other-strides": replace(SMALL, batch=2, q_heads=2, q_len=40, storage=("bshd",) * 3, grad_storage="bshd"),
    "no-keys": replace(SMALL, q_len=20, kv_len=0, layout=Blocks("random", (16, 16))),
    "no-queries": replace(SMALL, q_len=0, kv_len=20, layout=Blocks("random", (16, 16))),
}


def backend() -> BlockSparse:
    return BlockSparse(is_interpreted=True)


@interpreted
@pytest.mark.parametrize("name", PROBLEMS)
def test_kernels_keep_the_accuracy_rule(name: str) -> None:
    outcome = run_case(Subject(backend()), Case("T23", name, PROBLEMS[name]), "cpu")
    assert outcome.kind == "passed", outcome


@interpreted
@pytest.mark.parametrize(
    "name", ["blocks-pairs-20x24", "blocks-random-64x32", "blocks-pairs-3x7", "blocks-pairs-256x256", "per-bh", "with-bias-over-20x24"]
)
def test_no_kernel_goes_out_of_bounds(name: str) -> None:
    from attnzoo.testing.memory_check import checked_memory

    with checked_memory():
        Subject(backend()).run(make_call(PROBLEMS[name]))


@interpreted
@pytest.mark.parametrize("kind", ["pairs", "band_rule", "segment_rule", "empty_columns"])
def test_a_layout_means_its_dense_mask(kind: str) -> None:
    problem = replace(SMALL, q_len=40, layout=Blocks(kind, (16, 16)), dtype="bfloat16")
    outcome = run_case(Subject(backend()), Case("T23", f"mask-{kind}", problem, check="layout_as_mask"), "cpu")
    assert outcome.kind == "passed", outcome


def values_and_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: BlockLayout) -> list[torch.Tensor]:
    q, k, v = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    spec = AttentionSpec.of(q, k, v, layout=layout)
    o, _ = backend().attend(spec, AttentionInputs.of(spec, q, k, v, layout=layout))
    return [o.detach(), *torch.autograd.grad(o.sum(), (q, k, v))]


@interpreted
def test_blocks_that_are_skipped_are_not_read() -> None:
    q, k, v = torch.randn(3, 1, 1, 64, 16, generator=torch.Generator().manual_seed(0))
    table = torch.zeros(4, 4, dtype=torch.bool)
    table[:2, :3] = True
    layout = BlockLayout.from_blocks(table, block=16)
    clean = values_and_gradients(q, k, v, layout)
    k[:, :, 48:], v[:, :, 48:], q[:, :, 32:] = torch.nan, torch.nan, torch.nan
    for name, one, other in zip(("o", "dq", "dk", "dv"), clean, values_and_gradients(q, k, v, layout)):
        assert torch.equal(one, other), f"{name} has read a block that the layout leaves out"


@interpreted
def test_full_and_partial_blocks_mean_the_same() -> None:
    q, k, v = torch.randn(3, 1, 1, 64, 16, generator=torch.Generator().manual_seed(0))
    full = layouts.butterfly(64, block=16)
    every_bit = torch.full((len(full.full.indices), 16, 1), -1, dtype=torch.int32)
    partial = replace(full, full=full.partial, partial=full.full, rule=ElementRule(bits=every_bit))
    for name, one, other in zip(("o", "dq", "dk", "dv"), *[values_and_gradients(q, k, v, layout) for layout in (full, partial)]):
        assert (one - other).abs().max() < 1e-5, f"{name} differs where full blocks are given as partial ones with every bit"


@interpreted
def test_segment_ids_of_two_dtypes_are_compared_as_numbers() -> None:
    q, k, v = torch.randn(3, 1, 1, 32, 16, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[255] * 10 + [3] * 22]).to(torch.uint8), torch.tensor([[-1] * 10 + [3] * 22]).to(torch.int8)
    none = BlockLists(torch.zeros(3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    every = BlockLists(torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([0, 1, 0, 1], dtype=torch.int32))
    layout = BlockLayout(32, 32, 16, 16, full=none, partial=every, rule=ElementRule(segments=ids))
    o = values_and_gradients(q, k, v, layout)[0]
    assert (o[:, :, :10] == 0.0).all(), "255 as uint8 equals -1 as int8"
    assert (o[:, :, 10:] != 0.0).any()


# The schedule


def test_lines_are_in_the_order_of_their_work() -> None:
    layout = BlockLayout.from_blocks(torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]], dtype=torch.bool), block=16)
    schedule = Schedule.of(layout)
    assert schedule.rows[4].tolist() == [[1, 3, 0, 2]]
    assert schedule.columns[4].tolist() == [[0, 1, 2]]
    assert schedule.row_shape == (4, 0, 0)


def test_lines_of_each_head_are_ordered_by_themselves() -> None:
    tables = torch.rand(2, 3, 8, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    schedule = Schedule.of(BlockLayout.from_blocks(tables, block=16))
    order, work = schedule.rows[4].view(2, 3, 8).long(), tables.sum(-1)
    assert (work.gather(-1, order).diff(dim=-1) <= 0).all(), "a longer line comes after a shorter one"
    assert schedule.row_shape == (8, 24, 8)
    assert schedule.column_shape == (5, 15, 5)


def test_places_lead_from_a_column_to_the_bits() -> None:
    dense = torch.rand(60, 40, generator=torch.Generator().manual_seed(0)) < 0.4
    layout = BlockLayout.from_dense(dense, block=(16, 8))
    _, _, offsets, rows, _, places = Schedule.of(layout).columns
    column = torch.repeat_interleave(torch.arange(layout.columns), offsets.diff().long())
    assert torch.equal(layout.partial.indices[places.long()].long(), column), "a place is that of another column's block"
    assert torch.equal(layout.partial.row_of_each()[places.long()], rows.long()), "a place is that of another row's block"


def test_merged_lists_hold_partial_blocks_and_then_full_ones() -> None:
    layout = layouts.sliding_window(1000, window=(300, 100), block=64)
    merged = Schedule.of(layout).merged_rows
    for row in range(layout.rows):
        found = merged.blocks[merged.offsets[row] : merged.offsets[row + 1]].tolist()
        full, partial = [x.indices[x.offsets[row] : x.offsets[row + 1]].tolist() for x in (layout.full, layout.partial)]
        assert found == partial + full[::-1], f"row {row}"


@pytest.mark.parametrize(
    ("band", "expected"),
    [((None, 0, 0), (None, 0)), ((5, 2, 3), (-2, 5)), ((2**31 - 1, None, -(2**31) + 1), (-FARTHEST, None))],
)
def test_bands_are_two_distances_within_32_bits(band: tuple[int | None, int | None, int], expected: tuple[int | None, int | None]) -> None:
    lists = BlockLists(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32))
    none = BlockLists(torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    layout = BlockLayout(16, 16, 16, 16, full=none, partial=lists, rule=ElementRule(band=band))
    assert Schedule.of(layout).rule[1:3] == expected


@pytest.mark.parametrize(("batch", "heads"), [(0, 1), (0, 3), (2, 0)])
def test_a_layout_of_nothing_has_a_schedule(batch: int, heads: int) -> None:
    layout = BlockLayout.from_blocks(torch.ones(batch, heads, 2, 3, dtype=torch.bool), block=16)
    schedule = Schedule.of(layout)
    assert schedule.rows[4].shape == (batch * heads, 2)
    assert [schedule.longest[0], schedule.longest[1]] == [0, 0]


def test_another_stream_waits_for_a_schedule_and_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layouts.documents([40, 56], block=16)
    schedule, kept = Schedule.of(layout), []
    here, there = [SimpleNamespace(name=name, device=torch.device("cpu"), wait_event=kept.append) for name in ("here", "there")]
    monkeypatch.setitem(_kept, layout, replace(schedule, made=("the event", here)))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append((tensor, stream)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    Schedule.of(layout)
    assert not kept, "on the stream that made it there is nothing to wait for"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: there)
    Schedule.of(layout)
    assert kept[0] == "the event"
    assert all(stream is there for _, stream in kept[1:])
    found = {id(tensor) for tensor, _ in kept[1:]}
    assert {id(part) for part in (schedule.rows[4], schedule.columns[4], schedule.merged_columns.blocks)} <= found


def test_a_schedule_is_made_once_and_goes_with_its_layout() -> None:
    layout = layouts.butterfly(128, block=16)
    assert Schedule.of(layout) is Schedule.of(layout)
    kept = len(_kept)
    del layout
    gc.collect()
    assert len(_kept) == kept - 1, "the schedule of a layout that is gone is still kept"


@needs_triton
@pytest.mark.parametrize(
    ("block", "tile"),
    [((128, 128), (128, 64)), ((64, 256), (64, 64)), ((48, 32), (16, 32)), ((20, 24), (32, 32)), ((1, 7), (16, 16)), ((96, 100), (32, 64))],
)
def test_tiles_lie_within_one_block(block: tuple[int, int], tile: tuple[int, int]) -> None:
    from attnzoo.backends.block_sparse_triton.launch import fitted
    from attnzoo.backends.triton.table import Tile

    found = fitted(Tile(128, 64, 8, 3), layouts.causal(500, block=block).summary)
    assert (found.block_m, found.block_n) == tile


# Claims


def test_claims_what_flash_does_and_layouts() -> None:
    from attnzoo.backends.flash import Flash

    ours, theirs = backend().capabilities, Flash(is_interpreted=True).capabilities
    assert ours.forward - theirs.forward == ours.backward - theirs.backward == {"layout"}


@pytest.mark.parametrize(("block", "is_taken"), [((65536, 16), True), ((131072, 16), False), ((16, 2**31), False)])
def test_blocks_that_would_make_too_many_programs_are_refused(block: tuple[int, int], is_taken: bool) -> None:
    """A block is cut into tiles, also where the sequence ends: beyond this they are more than a grid takes, or than int32 counts."""
    q = torch.zeros(1, 1, 10, 16)
    reasons = backend().unsupported_reasons(AttentionSpec.of(q, q, q, layout=layouts.causal(10, block=block)))
    assert [reason for reason in reasons if "triton is not installed" not in reason] == (
        [] if is_taken else [f"blocks are {block[0]} x {block[1]}, it takes at most 65536 a side"]
    )


def test_refuses_the_cpu_unless_interpreted() -> None:
    call = make_call(SMALL)
    spec = Subject(backend()).spec(call)
    assert any("device is cpu, it takes cuda" in reason for reason in BlockSparse(is_interpreted=False).unsupported_reasons(spec))
