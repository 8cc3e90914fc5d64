"""Quick construction of frozen values, for those that every call makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, make_dataclass
from typing import Any, TypeVar

__all__ = ["quick_constructor"]

T = TypeVar("T")


def quick_constructor(frozen: type[T]) -> Callable[..., T]:
    """A constructor of a frozen, slotted dataclass without checks of its own; takes every field, in order.

    The generated one calls `object.__setattr__` once a field. This one fills a twin with the same slots that is not
    frozen, and then turns the twin into the real thing. torch.compile can't trace that: give it the class itself.
    """
    twin: Any = make_dataclass(f"_{frozen.__name__}Twin", [field.name for field in fields(frozen)], slots=True)  # type: ignore[arg-type]

    def construct(*values: object) -> T:
        made = twin(*values)
        made.__class__ = frozen
        return made  # type: ignore[no-any-return]

    return construct
