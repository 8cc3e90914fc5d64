"""Mutant: the reference with one fault, and the cases that must catch it."""

from __future__ import annotations

import inspect
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import Tensor

from attnzoo.backends.recompute import Gradients
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec
from attnzoo.testing.case import Case, run_case
from attnzoo.testing.cases import CASES
from attnzoo.testing.failure import ConformanceError
from attnzoo.testing.subject import Subject

from .reference import Reference

PLAIN_FORWARD, PLAIN_BACKWARD = "T32-plain-forward-fp32", "T32-plain-backward-fp32"
TWO_GPUS = "two GPUs"


class Mutant(Reference):
    """A subclass is one fault. Its docstring says what is wrong.

    Attributes:
        caught_by: globs of case ids, of the family meant for the fault; each must hold a case that fails.
        passes: a case that the mutant passes, so that `caught_by` is not about what any case would see; None
            where the fault spoils every call.
        needs: what the machine must have, or "".
    """

    every: ClassVar[list[type[Mutant]]] = []
    caught_by: ClassVar[tuple[str, ...]]
    passes: ClassVar[str | None] = PLAIN_BACKWARD
    needs: ClassVar[str] = ""

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__name__
        if not abstract:
            cls.every.append(cls)

    def misread(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[AttentionSpec, AttentionInputs]:
        """What the mutant makes of the call."""
        return spec, inputs

    def misread_backward(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[AttentionSpec, AttentionInputs]:
        """The same in the backward."""
        return self.misread(spec, inputs)

    def forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        return super().forward(*self.misread(spec, inputs))

    def backward(
        self, spec: AttentionSpec, inputs: AttentionInputs, o: Tensor, lse: Tensor, grad_o: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        return super().backward(*self.misread_backward(spec, inputs), o, lse, grad_o, grad_lse)

    @classmethod
    def wrong(cls) -> str:
        return " ".join((inspect.getdoc(cls) or "").split())


def cases_of(glob: str) -> list[Case]:
    """The kit's cases of that glob, in order; at least one."""
    found = [case for case in CASES if fnmatchcase(case.id, glob)]
    assert found, f"no case of the kit is named {glob}"
    return found


def catcher(mutant: type[Mutant], glob: str, device: str = "cpu") -> str:
    """The first case of the glob that the mutant fails. Raises AssertionError if it passes them all."""
    outcomes = []
    for case in cases_of(glob):
        try:
            outcome = run_case(Subject(mutant()), case, device)
        except ConformanceError:
            return case.id
        outcomes.append(f"{case.id} {outcome.kind}")
    raise AssertionError(f"{mutant.__name__} survived: {', '.join(outcomes)}. It is wrong in this: {mutant.wrong()}")
