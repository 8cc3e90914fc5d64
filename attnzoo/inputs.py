"""AttentionInputs: the tensors of a call, normalised, as a backend receives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo.frozen import quick_constructor
from attnzoo.layout import BlockLayout
from attnzoo.spec import SCORES, AttentionSpec, is_negated

__all__ = ["AttentionInputs"]


@dataclass(frozen=True, eq=False, slots=True)
class AttentionInputs:
    """What belongs to an `AttentionSpec`; whatever the call did not give is None.

    Attributes:
        q, k, v: in the spec's dtype, last stride 1, any other strides and any storage offset.
        mask: bool, 4 dims, each 1 or full.
        bias: float, 4 dims, each 1 or full.
        q_segment_ids, kv_segment_ids: integers, `(B, Sq)` and `(B, Skv)`.
        sinks: `(Hq,)` float, contiguous.
        dropout_seed: `(1,)` int64 on the device; given if and only if dropout_p > 0.
        layout: the block layout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    q_segment_ids: Tensor | None = None
    kv_segment_ids: Tensor | None = None
    sinks: Tensor | None = None
    dropout_seed: Tensor | None = None
    layout: BlockLayout | None = None

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
        layout: BlockLayout | None = None,
        sinks: Tensor | None = None,
        dropout_seed: int | Tensor | None = None,
    ) -> AttentionInputs:
        """Normalise arguments that `AttentionSpec.of` has accepted."""
        if k.shape[1] != spec.kv_heads:  # no query head: no kv head is read
            k, v = k[:, : spec.kv_heads], v[:, : spec.kv_heads]
        q_ids, kv_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        make = cls if torch.compiler.is_compiling() else _construct
        return make(
            _kernel_ready(q, spec.dtype),
            _kernel_ready(k, spec.dtype),
            _kernel_ready(v, spec.dtype),
            mask if mask is None or mask.ndim == 4 else mask[None, None],
            None if bias is None else _kernel_bias(bias, spec),
            q_ids,
            kv_ids,
            None if sinks is None else _within_scores(_plain(sinks), spec).contiguous(),
            _seed_tensor(dropout_seed, spec.device) if spec.dropout_p else None,
            layout,
        )

    @classmethod
    def ready(cls, q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
        """Of a call without further tensors, whose q, k and v `of` would leave as they are."""
        return _construct(q, k, v, None, None, None, None, None, None, None)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All but the layout's, in order."""
        ids = self.q_segment_ids, self.kv_segment_ids
        return (self.q, self.k, self.v, self.mask, self.bias, *ids, self.sinks, self.dropout_seed)


_construct = quick_constructor(AttentionInputs)


def _kernel_ready(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype:
        return tensor.to(dtype, memory_format=torch.contiguous_format)
    if is_negated(tensor):
        return tensor.resolve_neg().contiguous()
    return tensor if tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _plain(tensor: Tensor) -> Tensor:
    return tensor.resolve_neg() if is_negated(tensor) else tensor


def _kernel_bias(bias: Tensor, spec: AttentionSpec) -> Tensor:
    """4 dims, within the range of the scores."""
    bias = _plain(bias)
    return _within_scores(bias if bias.ndim == 4 else bias[None, None], spec)


def _within_scores(tensor: Tensor, spec: AttentionSpec) -> Tensor:
    """An fp64 bias or sink within the range of fp32 scores, where a finite value would become infinite."""
    if tensor.dtype != torch.float64 or spec.dtype == torch.float64:
        return tensor
    limit = SCORES.max
    is_beyond = (tensor.abs() > limit) & tensor.isfinite()
    no_change = tensor - tensor.detach()  # 0, and the way of the gradient
    return torch.where(is_beyond, tensor.detach().clamp(-limit, limit) + no_change, tensor)


def _seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """A `(1,)` int64 tensor; drawn from the device's default generator if no seed is given."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed.reshape(1)
    signed = (seed + 2**63) % 2**64 - 2**63
    return torch.full((1,), signed, dtype=torch.int64, device=device)  # a fill: nothing to copy, nothing to wait for
