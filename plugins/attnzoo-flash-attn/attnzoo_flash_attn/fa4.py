"""fa4: FlashAttention 4, the CuTe DSL kernels of the `flash-attn-4` distribution, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo import AttentionInputs, AttentionSpec, Backend, Capabilities
from attnzoo_flash_attn.blocks import BLOCK, lists_of
from attnzoo_flash_attn.fa4_operators import attend_compiled
from attnzoo_flash_attn.machine import band_reasons, hopper_reasons, is_installed
from attnzoo_flash_attn.tensors import ReadyGradient, oriented, ready, window_of

__all__ = ["Fa4"]

MODULE = "flash_attn.cute"


class Fa4(Backend):
    """FlashAttention 4 on Hopper; layouts of full blocks of 128 x 128 tokens, whose other blocks are skipped."""

    name = "fa4"
    capabilities = Capabilities(  # what has run on a card; more is claimed when the conformance kit has judged it there
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16}),
        head_dims=(64, 128),
        forward=frozenset({"causal", "layout"}),
        backward=frozenset({"causal", "layout"}),
        head_dim_multiple=32,  # at 72 and 104 dq came out wrong, at 104 and 112 a short backward does not compile: README.md
        block_multiple=BLOCK,
    )

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        reasons = super().unsupported_reasons(spec) + hopper_reasons(spec.device) + band_reasons(spec) + layout_reasons(spec)
        if not is_installed(MODULE):
            reasons.append("flash-attn-4 is not installed: pip install 'attnzoo-flash-attn[fa4]'")
        return reasons

    def attend(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        causal, (left, right), softcap = spec.causal, window_of(spec), spec.softcap or 0.0
        if (left, right) != (None, None):
            causal, right = False, 0 if causal else right
        if torch.compiler.is_compiling():
            q, k, v, scale = oriented(spec, inputs)
            o, lse = attend_compiled(q, k, v, scale, causal, left, right, softcap)
            return o.transpose(1, 2), lse if spec.return_lse else None
        q, k, v, scale = ready(spec, inputs)
        from flash_attn.cute import flash_attn_func

        options: dict[str, Any] = {"softmax_scale": scale, "causal": causal, "window_size": (left, right), "softcap": softcap}
        if inputs.layout is not None:
            forward, backward = lists_of(inputs.layout, spec.batch, spec.q_heads)
            options |= {"block_sparse_tensors": forward, "block_sparse_tensors_bwd": backward}
        o, lse = flash_attn_func(q, k, v, return_lse=spec.return_lse, **options)
        if spec.grads:
            o = ReadyGradient.apply(o)  # type: ignore[no-untyped-call]
        return o.transpose(1, 2), lse if spec.return_lse else None


def layout_reasons(spec: AttentionSpec) -> list[str]:
    """Full blocks of its own size, whole ones: an element rule would have to be written in its kernel language."""
    layout = spec.layout
    if layout is None:
        return []
    reasons = []
    if (layout.block_q, layout.block_kv) != (BLOCK, BLOCK) and not (layout.block_q % BLOCK or layout.block_kv % BLOCK):
        reasons.append(f"the layout's blocks are {layout.block_q} x {layout.block_kv}, it takes {BLOCK} x {BLOCK}")
    if layout.partial_blocks:
        reasons.append(f"the layout has {layout.partial_blocks} partial blocks, it takes full ones")
    if spec.q_len % BLOCK or spec.kv_len % BLOCK:
        reasons.append(f"q has length {spec.q_len} and k {spec.kv_len}, with a layout it takes multiples of {BLOCK}")
    if torch.compiler.is_compiling():
        reasons.append("a layout under torch.compile, which can't trace how its lists are made: call it outside of what is compiled")
    if spec.band != (None, None):
        reasons.append("causal or window beside a layout, it takes one of them")
    return reasons
