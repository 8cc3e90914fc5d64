"""The interpreter's memory checker finds the faults that are planted, and nothing in a kernel that is right."""

from __future__ import annotations

import os

import numpy
import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed (extra triton)")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("triton compiles its kernels in this process (a GPU is here)", allow_module_level=True)

import triton.language as tl  # noqa: E402

from attnzoo.testing.memory_check import MemoryFaults, checked_memory  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.int32]


@triton.jit
def copy(x_ptr, y_ptr, length, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < length), mask=i < length)


@triton.jit
def copy_loading_without_mask(x_ptr, y_ptr, length, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i), mask=i < length)


@triton.jit
def copy_storing_without_mask(x_ptr, y_ptr, length, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < length))


@triton.jit
def copy_through_index(x_ptr, y_ptr, index_ptr, length, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    j = tl.load(index_ptr + i, mask=i < length, other=0)
    tl.store(y_ptr + j, tl.load(x_ptr + i, mask=i < length), mask=i < length)


@triton.jit
def add_without_mask(x_ptr, y_ptr, length, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + i, tl.load(x_ptr + i, mask=i < length, other=0.0))


@triton.jit
def copy_rows(x_ptr, y_ptr, rows, stride_x, stride_y, COLUMNS: tl.constexpr):
    i = tl.program_id(0)
    j = tl.arange(0, COLUMNS)
    tl.store(y_ptr + i * stride_y + j, tl.load(x_ptr + i * stride_x + j), mask=i < rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_right_kernel_passes_and_still_does_its_work(dtype):
    x, y = torch.randn(100).to(dtype), torch.zeros(100, dtype=dtype)
    with checked_memory() as faults:
        copy[(4,)](x, y, 100, BLOCK=32)
    assert not faults
    assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kernel", "operation"), [(copy_loading_without_mask, "load"), (copy_storing_without_mask, "store")], ids=["load", "store"]
)
def test_a_tail_without_a_mask_is_found(kernel, operation, dtype):
    x, y = torch.randn(100).to(dtype), torch.zeros(100, dtype=dtype)
    with pytest.raises(MemoryFaults) as caught, checked_memory():
        kernel[(4,)](x, y, 100, BLOCK=32)
    (fault,) = caught.value.faults
    assert fault.operation == operation
    assert fault.lanes == 28
    assert fault.program == (3, 0, 0)
    assert "test_memory_check.py" in fault.line
    assert "+100 elements from the start" in fault.nearest


@pytest.mark.parametrize(
    ("kernel", "operation"), [(copy_loading_without_mask, "load"), (copy_storing_without_mask, "store")], ids=["load", "store"]
)
@pytest.mark.parametrize("first", ["x", "y"])
def test_a_tail_that_ends_in_the_next_argument_is_found(kernel, operation, first):
    memory = numpy.zeros(200, numpy.float32)  # two storages of it, end to end
    x, y = (torch.from_numpy(part) for part in ((memory[:100], memory[100:]) if first == "x" else (memory[100:], memory[:100])))
    assert abs(x.data_ptr() - y.data_ptr()) == x.untyped_storage().nbytes() == 400
    x.copy_(torch.randn(100))
    before = x.clone()
    with pytest.raises(MemoryFaults) as caught, checked_memory():
        kernel[(4,)](x, y, 100, BLOCK=32)
    (fault,) = caught.value.faults
    assert (fault.operation, fault.lanes) == (operation, 28)
    assert torch.equal(x, before)
    assert torch.equal(y, before)


@pytest.mark.parametrize("bad", [-8, -1, 8, 15])
def test_an_index_out_of_range_is_found_and_not_followed(bad):
    backing = torch.zeros(24)
    y = backing[8:16]  # canaries on both sides
    index = torch.tensor([0, 1, 2, bad, 4, 5, 6, 7], dtype=torch.int32)
    with pytest.raises(MemoryFaults) as caught, checked_memory():
        copy_through_index[(1,)](torch.ones(8), y, index, 8, BLOCK=8)
    (fault,) = caught.value.faults
    assert fault.lanes == 1
    assert f"{bad:+d} elements from the start of y_ptr" in fault.nearest
    assert backing[:8].eq(0).all()
    assert backing[16:].eq(0).all()


def test_an_atomic_beyond_the_end_is_found():
    y = torch.zeros(100)
    with pytest.raises(MemoryFaults, match="atomic_rmw") as caught, checked_memory():
        add_without_mask[(1,)](torch.ones(100), y, 100, BLOCK=128)
    assert caught.value.faults[0].lanes == 28
    assert y.eq(1).all()


def test_the_slack_between_rows_is_out_of_bounds():
    x, y = torch.randn(4, 8)[:, :6], torch.zeros(4, 8)
    with pytest.raises(MemoryFaults) as caught, checked_memory():
        copy_rows[(4,)](x, y, 4, 8, 8, COLUMNS=8)
    assert {fault.lanes for fault in caught.value.faults} == {2}
    assert len(caught.value.faults) == 4


def test_a_swapped_stride_is_found():
    x, y = torch.randn(4, 16), torch.zeros(4, 16)
    with pytest.raises(MemoryFaults), checked_memory():
        copy_rows[(4,)](x, y, 4, 64, 16, COLUMNS=16)


def test_views_of_one_storage_are_all_allowed():
    storage = torch.randn(64)
    with checked_memory():
        copy[(1,)](storage[:32], storage[32:], 32, BLOCK=32)
    assert torch.equal(storage[:32], storage[32:])


def test_an_error_of_the_kernel_is_not_hidden():
    with pytest.raises(ZeroDivisionError), checked_memory():
        raise ZeroDivisionError
