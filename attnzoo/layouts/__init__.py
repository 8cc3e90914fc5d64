"""Makers of `BlockLayout`: presets, a mask function, blocks chosen at run time."""

from __future__ import annotations

from attnzoo.layouts.bands import causal, sliding_window
from attnzoo.layouts.combine import stack_heads
from attnzoo.layouts.documents import documents, prefix_lm
from attnzoo.layouts.mask_mod import from_mask_mod
from attnzoo.layouts.patterns import bigbird, butterfly, dilated, fixed, longformer, random, strided
from attnzoo.layouts.topk import topk

__all__ = [
    "bigbird",
    "butterfly",
    "causal",
    "dilated",
    "documents",
    "fixed",
    "from_mask_mod",
    "longformer",
    "prefix_lm",
    "random",
    "sliding_window",
    "stack_heads",
    "strided",
    "topk",
]
