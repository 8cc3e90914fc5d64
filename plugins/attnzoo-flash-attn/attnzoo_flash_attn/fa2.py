"""fa2: FlashAttention 2, the `flash-attn` distribution, forward and backward; an entry point of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo import AttentionInputs, AttentionSpec, Backend, Capabilities, hookimpl
from attnzoo_flash_attn.machine import ROW, ampere_reasons, band_reasons, is_installed
from attnzoo_flash_attn.tensors import ReadyGradient, ready, window_of

__all__ = ["Fa2"]

EXTENSION = "flash_attn_2_cuda"
"""Its compiled module: the package `flash_attn` may be FlashAttention 4's alone."""


class Fa2(Backend):
    """FlashAttention 2 (Dao, arXiv 2307.08691) from compute capability 8.0 on."""

    name = "fa2"
    capabilities = Capabilities(  # as little as a training step needs: no card has judged it through this plugin
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=(64, 128),
        head_dim_multiple=ROW,
        forward=frozenset({"causal"}),
        backward=frozenset({"causal"}),
    )

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        reasons = super().unsupported_reasons(spec) + ampere_reasons(spec.device) + band_reasons(spec)
        if not is_installed(EXTENSION):
            reasons.append("flash-attn 2 is not installed: pip install flash-attn")
        return reasons

    def attend(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        from flash_attn import flash_attn_func

        q, k, v, scale = ready(spec, inputs)
        left, right = window_of(spec)
        o, lse, _ = flash_attn_func(
            q,
            k,
            v,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=spec.causal,
            window_size=(-1 if left is None else left, -1 if right is None else right),  # -1 is no bound
            softcap=spec.softcap or 0.0,
            return_attn_probs=True,
        )
        if spec.grads:
            o = ReadyGradient.apply(o)  # type: ignore[no-untyped-call]
        return o.transpose(1, 2), lse if spec.return_lse else None


@hookimpl
def attnzoo_backends() -> list[Backend]:
    return [Fa2()]
