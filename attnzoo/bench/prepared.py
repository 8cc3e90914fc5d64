"""Prepared: a workload's tensors and the backend that takes them: its first call, whether it is right, its times, its peak memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo.backend import Backend
from attnzoo.bench.timing import as_graph, burst, peak_bytes, synchronize
from attnzoo.bench.truth import assert_right
from attnzoo.bench.workload import Workload
from attnzoo.inputs import AttentionInputs
from attnzoo.layout import BlockLayout
from attnzoo.spec import AttentionSpec
from attnzoo.testing.failure import require

__all__ = ["Prepared"]

GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True, eq=False)
class Prepared:
    """A workload's tensors on their device, and the backend that is to take them."""

    backend: Backend
    workload: Workload
    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    grad_o: Tensor
    layout: BlockLayout | None
    sums: dict[str, Tensor]

    @classmethod
    def of(cls, backend: Backend, workload: Workload) -> Prepared:
        q, k, v, grad_o = workload.tensors()
        layout = workload.block_layout(q.device)
        spec = AttentionSpec.of(q, k, v, layout=layout, **workload.call_options())
        sums = sums_of({"q": q, "k": k, "v": v, "grad_o": grad_o})
        return cls(backend, workload, spec, q, k, v, grad_o, layout, sums)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a backend may read and not write."""
        return {"q": self.q, "k": self.k, "v": self.v, "grad_o": self.grad_o}

    def forward(self) -> Tensor:
        inputs = AttentionInputs.of(self.spec, self.q, self.k, self.v, layout=self.layout)
        o, _ = self.backend.attend(self.spec, inputs)
        return o

    def backward(self, o: Tensor, *, retains: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, (self.q, self.k, self.v), self.grad_o, retain_graph=retains)

    def call(self) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        """What is timed; for a backward alone, its forward is done here."""
        if self.workload.direction == "forward":
            return self.forward
        if self.workload.direction == "both":
            return lambda: self.backward(self.forward())
        o = self.forward()
        return lambda: self.backward(o, retains=True)

    def first_call(self, *, side_by_side: int = 1) -> tuple[float, dict[str, Tensor]]:
        """Seconds of the first call, compilation included, and its results; raises ConformanceError if they are wrong.

        They are judged with this process's share of the threads, of so many processes that judge at this time.
        """
        started = time.perf_counter()
        o = self.forward()
        grads = () if self.workload.direction == "forward" else self.backward(o)
        synchronize(self.spec.device)
        seconds = time.perf_counter() - started
        found = {"o": o.detach(), **dict(zip(GRADIENTS, grads))}
        with threads_shared_by(side_by_side):
            self.assert_right(found)
        return seconds, {name: tensor.clone() for name, tensor in found.items()}  # a backend may use its buffers again

    def assert_right(self, found: dict[str, Tensor]) -> None:
        """Judge o, dq, dk, dv, or some of them; raises ConformanceError."""
        self.assert_inputs_unwritten()
        assert_right(self.workload, self.spec, self.tensors, self.layout, found)

    def assert_inputs_unwritten(self) -> None:
        """Results of inputs that a backend changed would be right for those; raises ConformanceError."""
        now = sums_of(self.tensors)
        written = [name for name, total in self.sums.items() if total != now[name]]
        require(not written, f"it wrote to {', '.join(written)}")

    def times(self, seconds: float) -> tuple[list[float], dict[str, Tensor]]:
        """Milliseconds of each call, and what one more of them gives."""
        with self._stream() as stream:
            call = self.call()
        if stream is not None:
            call = as_graph(call, stream)
        times = burst(call, self.spec.device, seconds=seconds, is_cold=self.workload.cache == "cold")
        found = call()
        synchronize(self.spec.device)  # a graph ends with this function
        return times, {"o": found.detach()} if isinstance(found, Tensor) else dict(zip(GRADIENTS, found))

    @contextlib.contextmanager
    def _stream(self) -> Iterator[torch.cuda.Stream | None]:
        if self.workload.launch != "graph":
            yield None
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield stream
        torch.cuda.current_stream().wait_stream(stream)

    def peak(self) -> int:
        """Bytes beyond the inputs that the forward, and the backward where it is timed, take at their highest."""

        def call() -> object:
            o = self.forward()
            return o, self.backward(o) if self.workload.direction != "forward" else ()

        return peak_bytes(call, self.spec.device)


def sums_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of each tensor's bits, which a write changes as good as always."""
    as_ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {name: tensor.detach().view(as_ints[tensor.element_size()]).sum(dtype=torch.int64) for name, tensor in tensors.items()}


@contextlib.contextmanager
def threads_shared_by(processes: int) -> Iterator[None]:
    """With all of torch's threads in each process, OpenMP's would wait in a loop for those that have no core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // processes))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
