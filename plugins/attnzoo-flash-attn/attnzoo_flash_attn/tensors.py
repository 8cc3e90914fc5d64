"""Tensors as flash-attn takes them: `(B, S, H, D)`, rows that start at multiples of 16 bytes, a positive scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo import AttentionInputs, AttentionSpec
from attnzoo.copied import copied

__all__ = ["ReadyGradient", "aligned", "oriented", "ready", "window_of"]

ALIGNMENT = 16  # bytes


def ready(spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor, float]:
    """q, k, v as the kernels read them, and the scale."""
    q, k, v, scale = oriented(spec, inputs)
    return aligned(q), aligned(k), aligned(v), scale


def oriented(spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor, float]:
    """q, k, v `(B, S, H, D)` and the scale. Its sign goes into q, exactly: the kernels take the maximum before they scale."""
    q, scale = inputs.q, spec.scale
    if scale < 0:
        q, scale = -q, -scale
    elif scale == 0:
        q, scale = q * 0.0, 1.0
    return q.transpose(1, 2), inputs.k.transpose(1, 2), inputs.v.transpose(1, 2), scale


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where TMA could not read it: an address or stride that is no multiple of 16 bytes, or a
    stride of 0. Under torch.compile always a copy, since Dynamo can't tell an address."""
    if not torch.compiler.is_compiling():
        strides = [stride * tensor.element_size() for stride, size in zip(tensor.stride()[:-1], tensor.shape) if size > 1]
        is_ready = tensor.stride(-1) == 1 and tensor.data_ptr() % ALIGNMENT == 0
        if is_ready and all(stride > 0 and stride % ALIGNMENT == 0 for stride in strides):
            return tensor
    return copied(tensor)  # contiguous() would keep an odd address


class ReadyGradient(torch.autograd.Function):
    """The identity, whose gradient the kernels can read: a loss may send one with strides of 0."""

    @staticmethod
    def forward(ctx: Any, o: Tensor) -> Tensor:
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return aligned(grad)


def window_of(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """The band without causal's part of it; a bound that reaches past every key is none."""
    left, right = spec.window or (None, None)
    if left is not None and left >= spec.kv_len - 1:
        left = None
    if spec.causal or (right is not None and right >= spec.kv_len - 1):
        right = None
    return left, right
