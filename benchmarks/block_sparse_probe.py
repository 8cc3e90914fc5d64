"""`block_sparse_gpu.py probe`: what only a GPU can show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from block_sparse_inputs import qkv, random_blocks
from flash_calls import attend, require, worst_error
from torch import Tensor

from attnzoo import BlockLayout, layouts
from attnzoo.backends.block_sparse import BlockSparse


def probe(save: Callable[[str, Any], None]) -> None:
    """What only a GPU can show."""
    bad = []
    probes: tuple[Callable[[], None], ...] = (no_waiting, graph_replay, side_stream, bitwise, skipped_nan, long_rows)
    for each in probes:
        try:
            each()
        except Exception as failure:
            bad.append(f"{each.__name__}: {type(failure).__name__} {str(failure)[:300]}")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    print(f"probes: {len(probes)}, {len(bad)} bad", *bad, sep="\n  ", flush=True)
    save("probe", bad)


def grads_of(tensors: dict[str, Tensor], options: dict[str, Any], g: Tensor) -> list[Tensor]:
    o, _ = attend(BlockSparse(), tensors, options)
    return [o, *torch.autograd.grad(o, list(tensors.values()), g)]


def no_waiting() -> None:
    """A layout chosen on the device, its schedule and both passes: nothing waits for the device."""
    tensors, scores = qkv(2048, 64, 4), torch.randn(1, 4, 16, 16, device="cuda")
    g = torch.randn_like(tensors["q"])
    grads_of(tensors, {"layout": layouts.topk(scores, 5, q_len=2048, kv_len=2048), "causal": True}, g)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grads_of(tensors, {"layout": layouts.topk(scores, 5, q_len=2048, kv_len=2048), "causal": True}, g)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def graph_replay() -> None:
    """Captured with a layout that no call has seen, then used eagerly, then replayed on fresh data."""
    tensors = {n: t.detach() for n, t in qkv(1000, 64, 4).items()}
    layout = layouts.random(1000, density=0.4, block=64, device="cuda")
    attend(BlockSparse(), tensors, {"layout": layouts.random(1000, density=0.5, block=64, device="cuda")})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = attend(BlockSparse(), tensors, {"layout": layout})
    for _ in range(20):
        for tensor in tensors.values():
            tensor.normal_()
        eager = attend(BlockSparse(), tensors, {"layout": layout})[0]
        graph.replay()
        if not torch.equal(o, eager):
            raise AssertionError("a graph replay differs from eager")


def side_stream() -> None:
    tensors = {n: t.detach() for n, t in qkv(3000, 64, 4).items()}
    layout = layouts.random(3000, density=0.4, block=64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        o, _ = attend(BlockSparse(), tensors, {"layout": layout})
    other, _ = attend(BlockSparse(), tensors, {"layout": layout})  # its schedule is still being made on the side stream
    torch.cuda.synchronize()
    if not torch.equal(o, other):
        raise AssertionError("differs on a side stream")


def bitwise() -> None:
    tensors, g = qkv(1500, 64, 4), torch.randn(1, 4, 1500, 64, device="cuda", dtype=torch.bfloat16)
    layout = random_blocks(1, 4, 1500, (64, 64)).to("cuda")
    first = grads_of(tensors, {"layout": layout}, g)
    for _ in range(100):
        if not all(map(torch.equal, first, grads_of(tensors, {"layout": layout}, g))):
            raise AssertionError("two equal calls differ")


def skipped_nan() -> None:
    """NaN in keys, values and queries that no block reaches."""
    tensors, g = qkv(1024, 64, 2), torch.randn(1, 2, 1024, 64, device="cuda", dtype=torch.bfloat16)
    table = torch.zeros(8, 8, dtype=torch.bool)
    table[:4, :3] = True
    layout = BlockLayout.from_blocks(table, block=128).to("cuda")
    poisoned = {n: t.detach().clone() for n, t in tensors.items()}
    poisoned["k"][:, :, 384:] = torch.nan
    poisoned["v"][:, :, 384:] = torch.nan
    found = grads_of({n: t.requires_grad_() for n, t in poisoned.items()}, {"layout": layout}, g)
    for name, one, other in zip(("o", "dq", "dk", "dv"), found, grads_of(tensors, {"layout": layout}, g)):
        if not torch.equal(one, other):
            raise AssertionError(f"{name} reads blocks that are skipped")


def long_rows() -> None:
    """S = 1,048,576 under a window: the memory and the time are those of the window."""
    tensors = qkv(2**20, 64, 1)
    layout = layouts.sliding_window(2**20, window=1024, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = grads_of(tensors, {"layout": layout}, torch.randn_like(tensors["q"]))
    extra = torch.cuda.max_memory_allocated() - before
    spec = {"window": (1024, 0)}
    o, _ = attend(BlockSparse(), tensors, spec)
    require(worst_error([found[0]], [o]), 3e-2, "the layout of a window against the window")
    print(f"long rows: {extra / 2**20:.0f} MiB beyond the inputs of {3 * 2**20 * 128 / 2**20:.0f} MiB")
