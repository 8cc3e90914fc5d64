"""`flash_gpu.py probes`: what only a GPU can show of the portable kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from flash_calls import PORTABLE, TOLERANCE, attend, qkv, require, values_and_grads, worst_error
from torch import Tensor

from attnzoo.backends.flash import Flash
from attnzoo.backends.naive import Naive


def probes(save: Callable[[str, Any], None]) -> None:
    bad = failing(PROBES)
    print(f"probes: {len(PROBES)}, {len(bad)} bad", *bad, sep="\n  ", flush=True)
    save("probes", bad)


def failing(probes: Iterable[Callable[[], None]]) -> list[str]:
    """Which of them raise, and what."""
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    bad = []
    for probe in probes:
        try:
            probe()
        except Exception as failure:
            bad.append(f"{probe.__name__}: {type(failure).__name__} {str(failure)[:300]}")
        torch.cuda.empty_cache()
    return bad


def both(tensors: dict[str, Tensor], **options: Any) -> float:
    """The worst error of values and gradients against naive in fp32."""
    o = tensors["q"].shape[:3]
    upstream = torch.randn(*o, tensors["v"].shape[3], device="cuda"), torch.zeros(o, device="cuda")
    exact = {name: t.float() for name, t in tensors.items()}
    return worst_error(values_and_grads(PORTABLE, tensors, options, upstream), values_and_grads(Naive(), exact, options, upstream))


def far_elements() -> None:
    """Rows 2^25 elements apart: within one tile, offsets go beyond 2^31. The results are those of rows side by side, up to a rounding."""
    storage = torch.zeros(2**25 * 100, device="cuda", dtype=torch.bfloat16)
    far = storage.as_strided((1, 1, 100, 64), (2**25, 64, 2**25, 1))
    far.copy_(torch.randn(1, 1, 100, 64))
    near, other = far.contiguous(), torch.randn(1, 1, 100, 64, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn(1, 1, 100, 64, device="cuda"), torch.randn(1, 1, 100, device="cuda")
    for what, causal, names in (("far rows", False, "qkv"), ("far keys", True, "k")):
        found = [
            values_and_grads(PORTABLE, {n: keys if n in names else other for n in "qkv"}, {"causal": causal}, upstream)
            for keys in (far, near)
        ]
        require(worst_error(*found), 1e-2, what)


def many_heads() -> None:
    """More than a grid's second and third sides hold."""
    tensors = {n: torch.randn(70000, 1, 4, 16, device="cuda", dtype=torch.float16) for n in "qkv"}
    require(both(tensors, causal=True), 4e-3, "70000 batches")
    tensors = {n: torch.randn(1, 70000, 100, 16, device="cuda", dtype=torch.float16) for n in "qkv"}
    require(both(tensors), 4e-3, "70000 heads")


def odd_strides() -> None:
    """Slices of packed projections, a head that is expanded, keys with the head dim outermost."""
    packed = torch.randn(2, 130, 3, 4, 72, device="cuda", dtype=torch.float16)
    q, k, v = [packed[:, :, n, :, 3:67].transpose(1, 2) for n in range(3)]
    require(both({"q": q, "k": k, "v": v}), 4e-3, "packed slices")
    require(both({"q": q, "k": k[:, :1].expand(2, 4, 130, 64), "v": v}), 4e-3, "expanded keys")
    require(both({"q": q.contiguous(), "k": k.mT.contiguous().mT, "v": v.contiguous()}), 4e-3, "transposed keys")


def graph_replay() -> None:
    """Captured cold (nothing compiled for this head dim yet), replayed on fresh data."""
    tensors = {n: torch.randn(1, 2, 200, 72, device="cuda", dtype=torch.float16) for n in "qkv"}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = attend(PORTABLE, tensors, {"causal": True})
    for _ in range(100):
        for tensor in tensors.values():
            tensor.normal_()
        graph.replay()
        if not torch.equal(o, attend(PORTABLE, tensors, {"causal": True})[0]):
            raise AssertionError("a graph replay differs from eager")


def graph_replay_of_gradients() -> None:
    """Forward and backward, warm, of both kinds of kernels: 100 replays on fresh data equal eager."""
    for kernels in ("portable", "hopper"):
        backend = Flash(kernels=kernels)
        tensors = qkv(1, 2, 300, 72)
        upstream = torch.randn(1, 2, 300, 72, device="cuda"), torch.randn(1, 2, 300, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                values_and_grads(backend, tensors, {"causal": True}, upstream)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = values_and_grads(backend, tensors, {"causal": True}, upstream)
        for _ in range(100):
            for tensor in tensors.values():
                tensor.normal_()
            graph.replay()
            eager = values_and_grads(backend, tensors, {"causal": True}, upstream)
            differ = [n for n, (one, other) in enumerate(zip(captured, eager)) if worst_error([one], [other]) > 1e-2]
            if differ:  # the Hopper kernels add up dq in an order that varies, hence no bits
                raise AssertionError(f"{kernels}: results {differ} of a graph replay differ from eager")


def side_stream() -> None:
    """Inputs that are still being made on the stream that is current."""
    tensors = qkv(2, 4, 1000, 64)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            tensors["q"].normal_()
        o, _ = attend(PORTABLE, tensors, {})
    stream.synchronize()
    if not torch.equal(o, attend(PORTABLE, tensors, {})[0]):
        raise AssertionError("differs on a side stream")


def bitwise() -> None:
    """200 deterministic calls, forward and backward."""
    tensors = qkv(2, 4, 777, 64)
    upstream = torch.randn(2, 4, 777, 64, device="cuda"), torch.randn(2, 4, 777, device="cuda")
    first = values_and_grads(PORTABLE, tensors, {"deterministic": True}, upstream)
    for _ in range(200):
        again = values_and_grads(PORTABLE, tensors, {"deterministic": True}, upstream)
        if not all([torch.equal(a, b) for a, b in zip(first, again)]):
            raise AssertionError("two equal calls differ")


def million() -> None:
    """S = 1,048,576, causal: memory is o, the gradients and three numbers a row."""
    tensors = {n: t.requires_grad_() for n, t in qkv(1, 1, 2**20, 64).items()}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o, _ = attend(PORTABLE, tensors, {"causal": True})
    o.backward(torch.randn_like(o))
    extra = torch.cuda.max_memory_allocated() - before
    print(f"million: {extra / 2**20:.0f} MiB beyond the inputs of {3 * 2**20 * 128 / 2**20:.0f} MiB")
    rows, statistics_bytes = 128 * 2**20, 3 * 4 * 2**20  # o, its gradient and three gradients; lse, pivot and delta
    require(extra / (5 * rows + statistics_bytes), 1.02, "memory of a forward and backward at S = 1,048,576")
    if not all([t.grad is not None and bool(t.grad.isfinite().all()) for t in tensors.values()]):
        raise AssertionError("not finite")


def shifts() -> None:
    """A bias that is the same everywhere and large, to the least of fp32, changes nothing."""
    for dtype, shift in itertools.product(TOLERANCE, (1e4, -1e4, torch.finfo(torch.float32).min)):
        tensors = {n: torch.randn(1, 2, 200, 64, device="cuda", dtype=dtype) for n in "qkv"}
        tensors["bias"] = torch.full((1, 1, 200, 200), shift, device="cuda")
        allowed = max(2e-3, TOLERANCE[dtype])
        require(both(tensors), allowed, f"shift by {shift}")


PROBES: tuple[Callable[[], None], ...] = (
    far_elements,
    many_heads,
    odd_strides,
    graph_replay,
    graph_replay_of_gradients,
    side_stream,
    bitwise,
    million,
    shifts,
)
