"""fa3: FlashAttention 3, the forward of the `fa3-fwd` wheel, which has no backward, no windows and no float16."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo import AttentionInputs, AttentionSpec, Backend, Capabilities
from attnzoo_flash_attn.machine import ROW, band_reasons, hopper_reasons, is_installed
from attnzoo_flash_attn.tensors import ready

__all__ = ["Fa3"]

MODULE = "fa3_fwd_interface"


class Fa3(Backend):
    """FlashAttention 3 (Shah et al., arXiv 2407.08608), forward only, on Hopper."""

    name = "fa3"
    capabilities = Capabilities(  # what has run on a card; more is claimed when the conformance kit has judged it there
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16}),
        head_dims=(64, 128),
        head_dim_multiple=ROW,
        forward=frozenset({"causal"}),
        gradients=False,
    )

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        reasons = super().unsupported_reasons(spec) + hopper_reasons(spec.device) + band_reasons(spec)
        if not is_installed(MODULE):
            reasons.append("fa3-fwd is not installed: pip install 'attnzoo-flash-attn[fa3]'")
        return reasons

    def attend(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        from fa3_fwd_interface import flash_attn_func

        q, k, v, scale = ready(spec, inputs)
        o, lse = flash_attn_func(
            q,
            k,
            v,
            softmax_scale=scale,
            causal=spec.causal,
            softcap=spec.softcap or 0.0,
            return_attn_probs=True,
        )
        return o.transpose(1, 2), lse if spec.return_lse else None
