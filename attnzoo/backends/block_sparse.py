"""block_sparse: FlashAttention over the blocks of a layout, forward and recomputing backward.

Hopper kernels where they take the call, portable Triton elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from attnzoo.backends.flash import Flash, Kernels
from attnzoo.backends.hopper_sparse import support
from attnzoo.backends.recompute import Gradients, empty_output
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

LARGEST_BLOCK = 65536  # tokens a side: programs and positions within a block are int32, however short the sequence is


class BlockSparse(Flash):
    """Only the blocks that exist are loaded and computed, in both passes; a call without a layout runs as flash does.

    Needs and takes what `Flash` does.
    """

    name = "block_sparse"

    def __init__(self, *, is_interpreted: bool | None = None, kernels: Kernels = "fastest") -> None:
        super().__init__(is_interpreted=is_interpreted, kernels=kernels)
        claimed = self.capabilities
        self.capabilities = replace(claimed, forward=claimed.forward | {"layout"}, backward=claimed.backward | {"layout"})

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        reasons, layout = super().unsupported_reasons(spec), spec.layout
        if layout is not None and max(layout.block_q, layout.block_kv) > LARGEST_BLOCK:
            reasons.append(f"blocks are {layout.block_q} x {layout.block_kv}, it takes at most {LARGEST_BLOCK} a side")
        return reasons

    def _reasons_against_hopper(self, spec: AttentionSpec, name: str) -> tuple[str, ...]:
        if spec.layout is None or self.kernels == "portable":
            return super()._reasons_against_hopper(spec, name)
        return reasons_against_hopper(spec, name)

    def forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        if inputs.layout is None:
            return super().forward(spec, inputs)
        if not self._reasons_against_hopper(spec, "forward"):
            from attnzoo.backends.hopper_sparse import launch

            return launch.forward(spec, inputs.layout, inputs.q, inputs.k, inputs.v)
        from attnzoo.backends.block_sparse_triton import launchers

        return launchers.forward(spec, inputs, empty_output(spec, inputs.q))

    def backward(
        self, spec: AttentionSpec, inputs: AttentionInputs, o: Tensor, lse: Tensor, grad_o: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        if inputs.layout is None:
            return super().backward(spec, inputs, o, lse, grad_o, grad_lse)
        if not self._reasons_against_hopper(spec, "backward"):
            from attnzoo.backends.hopper_sparse import launch

            grads = launch.backward(spec, inputs.layout, (inputs.q, inputs.k, inputs.v), o, lse, grad_o, grad_lse)
            return Gradients(**{name: grad for name, grad in zip("qkv", grads) if name in spec.grads})
        from attnzoo.backends.block_sparse_triton import launchers

        return Gradients(**launchers.backward(spec, inputs, o, lse, grad_o, grad_lse))


@lru_cache(maxsize=1024)
def reasons_against_hopper(spec: AttentionSpec, name: str) -> tuple[str, ...]:
    """Why not the Hopper kernel over a layout; name: "forward" or "backward"."""
    return tuple(support.reasons_against(spec, name))
