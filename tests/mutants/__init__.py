"""Backends with one fault each: what the conformance kit must be able to see."""

from . import around, autograd, derivatives, dropout, gradients, heads, interface, layouts, long, lse, memory, pairs, sizes, softmax, values
from .mutant import Mutant, catcher
from .reference import Reference

__all__ = ["MUTANTS", "Mutant", "Reference", "catcher"]

MODULES = (values, softmax, sizes, pairs, heads, layouts, lse, gradients, dropout, memory, long, around, autograd, derivatives, interface)
MUTANTS: tuple[type[Mutant], ...] = tuple(mutant for module in MODULES for mutant in Mutant.every if mutant.__module__ == module.__name__)
"""In the order of their modules, and as they stand there."""
