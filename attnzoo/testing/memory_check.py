"""A memory checker for Triton kernels that needs no GPU: every access of an interpreted kernel is held to the
logical elements of the tensors it was given, so that a tail without a mask, an index of -1, or a read of the slack
between two rows is found even where it happens to do no harm.

    with checked_memory():          # TRITON_INTERPRET=1, set before triton is imported
        kernel[grid](...)

For the length of a launch each storage stands alone, with no man's land on both sides, wherever its own memory is:
what runs past the end of one argument can't land in its neighbour. What it can't see: an address that is valid in
another view of the same storage, or off by more than the no man's land.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["MemoryFault", "MemoryFaults", "checked_memory"]

_PAGE = 4096  # bytes; a multiple of every dtype's alignment
_LEAST_NO_MANS_LAND = 1 << 20  # bytes: a tile of 256 rows of 256 floats runs past the end of a small tensor, and four times that


@dataclass(frozen=True)
class MemoryFault:
    """One access of one program, with all lanes that were out of bounds.

    Attributes:
        operation: load, store, atomic_rmw or atomic_cas.
        kernel: name of the kernel; program: its grid index; line: "file:line" in the kernel's source.
        lanes: how many lanes were out of bounds; nearest: where the first of them is.
    """

    operation: str
    kernel: str
    program: tuple[int, ...]
    line: str
    lanes: int
    nearest: str

    def __str__(self) -> str:
        return f"{self.operation} out of bounds in {self.kernel}{self.program} at {self.line}: {self.lanes} lanes, the first {self.nearest}"


class MemoryFaults(AssertionError):  # noqa: N818  it holds several
    """Raised when a checked block ends, if a kernel in it went out of bounds."""

    def __init__(self, faults: list[MemoryFault]) -> None:
        self.faults = tuple(faults)
        shown = [str(fault) for fault in faults[:10]]
        more = [f"... and {len(faults) - 10} more"] if len(faults) > 10 else []
        super().__init__("\n".join([f"{len(faults)} accesses out of bounds", *shown, *more]))


class _Footprint:
    """A storage of the arguments, moved between two stretches of no man's land, and which of its bytes belong to an
    element of an argument."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        # As long as the storage, so that an index off by a row, a head or a batch stays in it; untouched pages cost nothing.
        self._before = max(_LEAST_NO_MANS_LAND, -(-storage.nbytes() // _PAGE) * _PAGE)
        self._room = torch.empty(2 * self._before + storage.nbytes(), dtype=torch.uint8)
        self._moved = self._room[self._before : self._before + storage.nbytes()]
        self._moved.copy_(_bytes_of(storage))
        self.base = self._room.data_ptr() + self._before
        self.valid = np.zeros(storage.nbytes(), dtype=bool)
        self.views: list[tuple[str, Tensor]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Make a view of the storage one of the moved bytes, and its elements valid."""
        self.views.append((name, tensor))
        item, offset = tensor.element_size(), tensor.storage_offset()
        tensor.set_(self._room.untyped_storage(), offset + self._before // item, tensor.size(), tensor.stride())
        if not tensor.numel():
            return
        whole = len(self.valid) // item * item  # a storage's last bytes may be no whole element
        elements = torch.from_numpy(self.valid[:whole].reshape(-1, item))
        for byte in range(item):
            plane = elements[:, byte]
            strides = [stride * plane.stride(0) for stride in tensor.stride()]
            plane.as_strided(tensor.shape, strides, plane.storage_offset() + offset * plane.stride(0)).fill_(True)

    def leave(self) -> None:
        """Take what the kernel wrote, and the views, back to the storage."""
        _bytes_of(self._storage).copy_(self._moved)
        for _, tensor in self.views:
            offset = tensor.storage_offset() - self._before // tensor.element_size()
            tensor.set_(self._storage, offset, tensor.size(), tensor.stride())

    def allows(self, addresses: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each address is the first of `size` valid bytes."""
        offset = addresses.astype(np.int64) - self.base
        inside = (offset >= 0) & (offset + size <= len(self.valid))
        place = np.where(inside, offset, 0)
        if not len(self.valid):
            return inside
        ends = self.valid[np.minimum(place + size - 1, len(self.valid) - 1)]
        valid: np.ndarray[Any, np.dtype[np.bool_]] = inside & self.valid[place] & ends
        return valid


class _Checker:
    """Stands in for the interpreter's memory module: refuses bad lanes, notes them, and passes the rest on."""

    def __init__(self, memory: Any, builder: Any) -> None:
        self._memory, self._builder = memory, builder
        self.kernel = "?"
        self.footprints: dict[int, _Footprint] = {}
        self.faults: list[MemoryFault] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def enter(self, kernel: str, named: list[tuple[str, Tensor]]) -> None:
        """Take the arguments of the next launch."""
        self.kernel = kernel
        self.footprints = {}
        for name, tensor in named:
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if key not in self.footprints:
                self.footprints[key] = _Footprint(storage)
            self.footprints[key].add(name, tensor)

    def leave(self) -> None:
        """Give the arguments of the launch back."""
        for footprint in self.footprints.values():
            footprint.leave()

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        return self._memory.load(addresses, self._allowed("load", addresses, mask, np.dtype(dtype).itemsize), other, dtype)

    def store(self, addresses: Any, value: Any, mask: Any) -> Any:
        return self._memory.store(addresses, value, self._allowed("store", addresses, mask, value.dtype.itemsize))

    def atomic_rmw(self, operation: Any, addresses: Any, value: Any, mask: Any, order: Any) -> Any:
        allowed = self._allowed("atomic_rmw", addresses, mask, value.dtype.itemsize)
        return self._memory.atomic_rmw(operation, addresses, value, allowed, order)

    def atomic_cas(self, addresses: Any, expected: Any, value: Any, order: Any) -> Any:
        allowed = self._allowed("atomic_cas", addresses, np.ones_like(addresses, dtype=bool), value.dtype.itemsize)
        return self._memory.atomic_cas(addresses, expected, value, order) if allowed.all() else np.zeros_like(value)

    def _allowed(self, operation: str, addresses: Any, mask: Any, size: int) -> Any:
        wanted = np.broadcast_to(mask.astype(bool), addresses.shape)
        allowed = np.zeros(addresses.shape, dtype=bool)
        for footprint in self.footprints.values():
            allowed |= footprint.allows(addresses, size)
        bad = wanted & ~allowed
        if bad.any():
            nearest = self._nearest(int(addresses[bad].flat[0]))
            program = tuple(int(index) for index in self._builder.grid_idx)
            self.faults.append(MemoryFault(operation, self.kernel, program, _kernel_line(), int(bad.sum()), nearest))
        return np.ascontiguousarray(wanted & allowed)

    def _nearest(self, address: int) -> str:
        """The argument whose storage is nearest to an address, in words."""
        found = [(self._distance(address, print_), print_) for print_ in self.footprints.values()]
        if not found:
            return f"at address {address}, with no tensor among the arguments"
        _, footprint = min(found, key=lambda pair: pair[0])
        name, tensor = footprint.views[0]
        offset = (address - tensor.data_ptr()) // tensor.element_size()
        return f"{offset:+d} elements from the start of {name} {tuple(tensor.shape)}, strides {tensor.stride()}"

    @staticmethod
    def _distance(address: int, footprint: _Footprint) -> int:
        return max(footprint.base - address, address - footprint.base - len(footprint.valid), 0)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _kernel_line() -> str:
    """The innermost line outside of triton and of this file: where the kernel made the access."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if name != __file__ and "/triton/" not in name.replace("attnzoo/backends/triton/", ""):
            return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _tensors_of(name: str, argument: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(argument, Tensor):
        yield name, argument
    elif isinstance(argument, tuple):
        for place, part in enumerate(argument):
            yield from _tensors_of(f"{name}[{place}]", part)
    elif hasattr(argument, "base") and isinstance(argument.base, Tensor):  # a tensor descriptor
        yield name, argument.base


@contextlib.contextmanager
def checked_memory() -> Iterator[list[MemoryFault]]:
    """Check every Triton kernel that is interpreted in this block; yields the list of faults as it grows.

    Bad lanes are masked out, so a planted fault can't crash the process.

    Raises:
        MemoryFaults: when the block ends without another error, if there were any.
        RuntimeError: triton is not interpreting (TRITON_INTERPRET=1 must be set before it is imported).
    """
    from triton.runtime import interpreter

    if not _is_interpreting():
        raise RuntimeError("triton compiles its kernels in this process; set TRITON_INTERPRET=1 before it is imported")
    checker = _Checker(interpreter._interpreter, interpreter.interpreter_builder)
    prepare = interpreter.GridExecutor._init_args_hst
    restore = interpreter.GridExecutor._restore_args_dev

    def prepare_and_move(self: Any, args: Any, kwargs: Any) -> Any:
        host_args, host_kwargs = prepare(self, args, kwargs)
        named = [*zip(self.arg_names, host_args), *host_kwargs.items()]
        checker.enter(self.fn.__name__, [found for name, argument in named for found in _tensors_of(name, argument)])
        return host_args, host_kwargs

    def leave_and_restore(self: Any, *arguments: Any) -> None:
        checker.leave()
        restore(self, *arguments)

    interpreter._interpreter = checker
    interpreter.GridExecutor._init_args_hst = prepare_and_move
    interpreter.GridExecutor._restore_args_dev = leave_and_restore
    try:
        yield checker.faults
    finally:
        interpreter._interpreter = checker._memory
        interpreter.GridExecutor._init_args_hst = prepare
        interpreter.GridExecutor._restore_args_dev = restore
    if checker.faults:
        raise MemoryFaults(checker.faults)


def _is_interpreting() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
