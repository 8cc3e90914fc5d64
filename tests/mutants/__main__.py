"""`python -m tests.mutants` writes docs/mutants.md anew. Takes Triton, whose interpreter runs the kernels."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from .table import write

write()
