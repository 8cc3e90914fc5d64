"""What the Hopper kernels over a layout take, from metadata alone. Imports no triton."""

from __future__ import annotations

from dataclasses import replace

from attnzoo.backends.hopper import support
from attnzoo.spec import AttentionSpec

BLOCK_Q = 128
BLOCK_KV = {"forward": 64, "backward": 128}
HEAD_DIM = 128


def reasons_against(spec: AttentionSpec, name: str) -> list[str]:
    """Why a kernel can't serve the call; empty if it can. name: "forward" or "backward"."""
    layout, block_kv = spec.layout, BLOCK_KV[name]
    if layout is None:
        return ["the call has no layout"]
    reasons = support.reasons_against(replace(spec, layout=None, grads=spec.grads if name == "backward" else ()))
    if layout.block_q % BLOCK_Q or layout.block_kv % block_kv:
        reasons.append(f"blocks are {layout.block_q} x {layout.block_kv}, the Hopper kernel takes multiples of {BLOCK_Q} x {block_kv}")
    if spec.head_dim > HEAD_DIM:
        reasons.append(f"head_dim is {spec.head_dim}, the Hopper kernel over a layout takes at most {HEAD_DIM}")
    if spec.band != (None, None):
        reasons.append("causal or window beside a layout, which the Hopper kernel doesn't take")
    return reasons
