"""block_sparse: FlashAttention over the blocks of a layout, in portable Triton, forward and recomputing backward."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attnzoo.backends.flash import Flash
from attnzoo.backends.recompute import Gradients, empty_output
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec


class BlockSparse(Flash):
    """Only the blocks that exist are loaded and computed, in both passes; a call without a layout runs as flash does.

    Needs and takes what `Flash` does.
    """

    name = "block_sparse"

    def __init__(self, *, is_interpreted: bool | None = None, uses_hopper: bool = True) -> None:
        super().__init__(is_interpreted=is_interpreted, uses_hopper=uses_hopper)
        claimed = self.capabilities
        self.capabilities = replace(claimed, forward=claimed.forward | {"layout"}, backward=claimed.backward | {"layout"})

    def forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        if inputs.layout is None:
            return super().forward(spec, inputs)
        from attnzoo.backends.block_sparse_triton.launchers import forward

        return forward(spec, inputs, empty_output(spec, inputs.q))

    def backward(
        self, spec: AttentionSpec, inputs: AttentionInputs, o: Tensor, lse: Tensor, grad_o: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        if inputs.layout is None:
            return super().backward(spec, inputs, o, lse, grad_o, grad_lse)
        from attnzoo.backends.block_sparse_triton.launchers import backward

        return Gradients(**backward(spec, inputs, o, lse, grad_o, grad_lse))
