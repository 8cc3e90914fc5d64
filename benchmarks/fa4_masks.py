"""Rules of partial blocks in FlashAttention 4's kernel language. Imports the CuTe DSL: only where fa4 runs."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils


def window_mask(left: int) -> Callable[..., Any]:
    """Causal, reaching `left` tokens back."""

    @cute.jit
    def in_window(
        batch: cute.TensorSSA, head: cute.TensorSSA, i: cute.TensorSSA, j: cute.TensorSSA, seqlen_info, aux_tensors
    ) -> cute.TensorSSA:
        reach = utils.scalar_to_ssa(left, cutlass.Int32)
        return (i >= j) & (i - j <= reach)

    return in_window


@cute.jit
def same_document(
    batch: cute.TensorSSA, head: cute.TensorSSA, i: cute.TensorSSA, j: cute.TensorSSA, seqlen_info, aux_tensors
) -> cute.TensorSSA:
    """The only aux tensor holds the documents' ids, `(length,)` int32."""
    ids = aux_tensors[0]
    return utils.scalar_to_ssa(ids[i[0]], cutlass.Int32) == utils.scalar_to_ssa(ids[j[0]], cutlass.Int32)
