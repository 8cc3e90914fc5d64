"""The order in which the kernels over a layout run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.block_sparse_triton.backward_bias import backward_bias
from attnzoo.backends.block_sparse_triton.backward_keys import backward_keys
from attnzoo.backends.block_sparse_triton.backward_queries import backward_queries
from attnzoo.backends.block_sparse_triton.forward import forward as forward_blocks
from attnzoo.backends.block_sparse_triton.launch import SparseProblem
from attnzoo.backends.block_sparse_triton.norms import row_norms
from attnzoo.backends.block_sparse_triton.schedule import Schedule
from attnzoo.backends.triton.delta import row_statistics
from attnzoo.backends.triton.launchers import empty_rows_like, on_device
from attnzoo.backends.triton.problem import Problem
from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec


def forward(spec: AttentionSpec, inputs: AttentionInputs, o: Tensor) -> tuple[Tensor, Tensor]:
    """Fill `o`; returns it and the lse."""
    assert inputs.layout is not None
    lse = torch.empty(spec.batch, spec.q_heads, spec.q_len, dtype=torch.float32, device=spec.device)
    with on_device(spec.device):
        forward_blocks(SparseProblem(Problem(spec, inputs), Schedule.of(inputs.layout)), o, lse)
    return o, lse


def backward(
    spec: AttentionSpec, inputs: AttentionInputs, o: Tensor, lse: Tensor, grad_o: Tensor, grad_lse: Tensor | None
) -> dict[str, Tensor]:
    """The gradients that `spec.grads` names; each kernel writes its own results, no atomics, so equal calls give equal bits."""
    assert inputs.layout is not None
    if grad_o.stride(-1) != 1 and spec.value_dim > 1:
        grad_o = grad_o.contiguous()
    grads: dict[str, Any] = {name: empty_rows_like(getattr(inputs, name)) for name in spec.grads if name in ("q", "k", "v")}
    with on_device(spec.device):
        problem = Problem(spec, inputs)
        sparse = SparseProblem(problem, Schedule.of(inputs.layout))
        stats, grad_sinks = row_statistics(problem, o, grad_o, lse, grad_lse, row_norms(sparse, lse))
        if "k" in grads or "v" in grads:
            backward_keys(sparse, grad_o, stats, grads.get("k"), grads.get("v"))
        if "q" in grads:
            backward_queries(sparse, grad_o, stats, grads["q"])
        if "bias" in spec.grads:
            grads["bias"] = backward_bias(sparse, grad_o, stats)
    if grad_sinks is not None:
        grads["sinks"] = grad_sinks
    return grads
