"""The order in which the kernels over a layout run: flash's, by kernels of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.backends.block_sparse_triton.backward_bias import backward_bias
from attnzoo.backends.block_sparse_triton.backward_keys import backward_keys
from attnzoo.backends.block_sparse_triton.backward_queries import backward_queries
from attnzoo.backends.block_sparse_triton.forward import forward as forward_blocks
from attnzoo.backends.block_sparse_triton.launch import SparseProblem
from attnzoo.backends.block_sparse_triton.norms import row_norms
from attnzoo.backends.triton import launchers
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

KERNELS = launchers.BackwardKernels(SparseProblem, row_norms, backward_keys, backward_queries, backward_bias)


def forward(spec: AttentionSpec, inputs: AttentionInputs, o: Tensor) -> tuple[Tensor, Tensor]:
    """Fill `o`; returns it and the lse."""
    lse = torch.empty(spec.batch, spec.q_heads, spec.q_len, dtype=torch.float32, device=spec.device)
    with launchers.on_device(spec.device):
        forward_blocks(SparseProblem(spec, inputs), o, lse)
    return o, lse


def backward(
    spec: AttentionSpec, inputs: AttentionInputs, o: Tensor, lse: Tensor, grad_o: Tensor, grad_lse: Tensor | None
) -> dict[str, Tensor]:
    """The gradients that `spec.grads` names, see flash's."""
    return launchers.backward(spec, inputs, o, lse, grad_o, grad_lse, KERNELS)
