"""T32, second part: malformed calls, the same error for every backend (of T07, T17, T19 and T23 too)."""

from __future__ import annotations

from attnzoo.testing.case import Case
from attnzoo.testing.checks.rejects import GOOD, MALFORMED

FAMILIES = {"mask": "T17", "bias": "T17", "heads": "T19", "layout": "T23", "k": "T07", "v": "T07", "q": "T07"}

CASES = [Case(FAMILIES.get(name.split("-")[0], "T32"), f"reject-{name}", GOOD, check=f"reject {name}", required=True) for name in MALFORMED]
