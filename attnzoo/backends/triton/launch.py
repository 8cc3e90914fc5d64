"""Kernel: a Triton function, compiled once a variant and launched without Triton's own per-call work.

Integers are never specialised, so one binary serves all lengths: sizes are int32, strides int64. All that a
variant knows of its pointers and strides is whether they are multiples of 16 bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnzoo.backends.triton.table import Tile

INTERPRETED = bool(triton.knobs.runtime.interpret)
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bool: "*u8",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
VECTOR_BYTES = 16
ROWS = ("q", "k", "v", "o", "grad_o", "grad_q", "grad_k", "grad_v")
OWN = ("pivot_ptr", "delta_ptr", "norm_ptr")  # allocated by the launchers, hence aligned

_interpreting = threading.Lock()  # the interpreter keeps its grid, and what it patches of triton, once a process


class Kernel:
    """A jit function and its binaries.

    Args:
        fn: its parameters in the order pointers and tensor tuples, sizes, scalars, constexprs.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self._binaries: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def launch(self, plan: Plan, arguments: tuple[Any, ...], aligned: tuple[str, ...], types: tuple[Any, ...]) -> None:
        """Run the plan's programs on the current stream of its device, which is the current one.

        Args:
            arguments: those that are not constexpr.
            aligned: what is in whole vectors: "rows", which stands for all of ROWS, "mask", "bias".
            types: what decides the types of the arguments, beyond the plan.
        """
        if not plan.programs:
            return
        if INTERPRETED:
            with _interpreting:
                self.fn[(plan.programs,)](*arguments, **plan.constants)
            return
        binary = plan.binaries.get((aligned, types))
        if binary is None:
            binary = plan.binaries[aligned, types] = self._binary(plan, arguments, aligned, types)
        launch(binary, plan.grid, plan.device, (*arguments, *plan.constants.values()))

    def _binary(self, plan: Plan, arguments: tuple[Any, ...], aligned: tuple[str, ...], types: tuple[Any, ...]) -> Any:
        key = (plan.types, types, tuple(plan.constants.values()), aligned, plan.tile, plan.device)
        with self._lock:
            if key not in self._binaries:
                target = GPUTarget("cuda", 10 * plan.capability[0] + plan.capability[1], 32)
                source = self.source(arguments, plan.constants, aligned)
                binary = triton.compile(source, target=target, options=plan.tile.options)
                _ = binary.run  # loads the module, which another thread must not see half done
                self._binaries[key] = binary
        return self._binaries[key]

    def source(self, arguments: tuple[Any, ...], constants: dict[str, Any], aligned: tuple[str, ...]) -> ASTSource:
        """What is compiled for such arguments; they are looked at for their types alone."""
        names = [name for name in self.fn.arg_names if name not in constants]
        signature: dict[str, Any] = {}
        constexprs: dict[tuple[int, ...], Any] = {}
        attrs: dict[tuple[int, ...], Any] = {}
        for place, (name, argument) in enumerate(zip(names, arguments, strict=True)):
            if not isinstance(argument, tuple):
                signature[name] = _type_of(argument, "i32", (place,), constexprs)
                if name in OWN:
                    attrs[place,] = [["tt.divisibility", VECTOR_BYTES]]
                continue
            integer = "i64" if isinstance(argument[0], Tensor) else "i32"  # strides, sizes
            signature[name] = tuple([_type_of(part, integer, (place, n), constexprs) for n, part in enumerate(argument)])
            if name in aligned or (name in ROWS and "rows" in aligned):
                units = [VECTOR_BYTES, *[VECTOR_BYTES // argument[0].element_size()] * (len(argument) - 1)]
                attrs.update({(place, n): [["tt.divisibility", unit]] for n, unit in enumerate(units) if (place, n) not in constexprs})
        for name, value in constants.items():
            signature[name] = "constexpr"
            constexprs[self.fn.arg_names.index(name),] = value
        return ASTSource(fn=self.fn, signature=signature, constexprs=constexprs, attrs=attrs)


def _type_of(value: Any, integer: str, path: tuple[int, ...], constexprs: dict[tuple[int, ...], Any]) -> str:
    if value is None:
        constexprs[path] = None
        return "constexpr"
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else integer


def launch(binary: Any, grid: tuple[int, int, int], device: torch.device, arguments: tuple[Any, ...]) -> None:
    """Launch a compiled kernel on the current stream of its device, by half of the host's work of `binary[grid](...)`.

    A profiler that hooks into Triton's launches gets them from Triton itself.
    """
    hooks = triton.knobs.runtime
    if _is_hooked(hooks.launch_enter_hook) or _is_hooked(hooks.launch_exit_hook):
        binary[grid](*arguments)
        return
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    binary.run(*grid, stream, binary.function, binary.packed_metadata, None, None, None, *arguments)


def _is_hooked(hook: Any) -> bool:
    return bool(getattr(hook, "calls", hook))  # a chain of hooks, empty by default, or what somebody put in its place


@dataclass(eq=False, slots=True)
class Plan:
    """One kernel for one spec: what does not depend on the tensors, and the binaries that were needed so far.

    Attributes:
        constants: the constexprs, in the order of the parameters.
        sizes: the kernel's argument of that name.
        types: what decides the types of the arguments.
    """

    kernel: Kernel
    tile: Tile
    constants: dict[str, Any]
    sizes: tuple[int, ...]
    programs: int
    types: tuple[Any, ...]
    capability: tuple[int, int]
    device: torch.device
    binaries: dict[Hashable, Any] = field(default_factory=dict)
    grid: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.grid = (self.programs, 1, 1)

    def launch(self, arguments: tuple[Any, ...], aligned: tuple[str, ...] = (), types: tuple[Any, ...] = ()) -> None:
        """See `Kernel.launch`."""
        self.kernel.launch(self, arguments, aligned, types)
