"""Kernel: a Triton function, compiled once a variant and launched without Triton's own per-call work.

Integers are never specialised, so one binary serves all lengths: sizes are int32, strides int64. All that a
variant knows of its pointers and strides is whether they are multiples of 16 bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

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
OWN = ("pivot_ptr", "delta_ptr")  # allocated by the launchers, hence aligned


class Variant(NamedTuple):
    """What tells apart the binaries of one kernel.

    Attributes:
        problem: whatever decides the types of the arguments and the constants.
        aligned: the tensor tuples whose pointer and strides are multiples of 16 bytes.
    """

    problem: Hashable
    aligned: tuple[str, ...]
    tile: Tile
    capability: tuple[int, int]
    device: int | None


class Kernel:
    """A jit function and its compiled variants.

    Args:
        fn: its parameters in the order pointers and tensor tuples, scalars, constexprs.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self._compiled: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def launch(self, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], variant: Variant) -> None:
        """Run `programs` programs on the device's current stream; arguments are those that are not constexpr."""
        if not programs:
            return
        if INTERPRETED:
            self.fn[(programs,)](*arguments, **constants)
            return
        compiled = self._compiled.get(variant)
        if compiled is None:
            compiled = self._compile(arguments, constants, variant)
        compiled[(programs, 1, 1)](*arguments, *constants.values())

    def _compile(self, arguments: tuple[Any, ...], constants: dict[str, Any], variant: Variant) -> Any:
        with self._lock:
            if variant not in self._compiled:
                target = GPUTarget("cuda", 10 * variant.capability[0] + variant.capability[1], 32)
                source = self.source(arguments, constants, variant.aligned)
                self._compiled[variant] = triton.compile(source, target=target, options=variant.tile.options)
        return self._compiled[variant]

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
            if name in aligned:
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
