"""`python -m tests.mutants` writes docs/mutants.md anew."""

from .table import write

write()
