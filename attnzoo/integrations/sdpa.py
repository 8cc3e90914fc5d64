"""A drop-in for torch.nn.functional.scaled_dot_product_attention: its arguments, its meaning, attnzoo's backends."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnzoo.api import Choice, attention

__all__ = ["scaled_dot_product_attention"]

Shape = tuple[int, ...]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: Choice | None = None,
) -> Tensor:
    """As torch's function, computed by attnzoo.

    Args:
        query: `(..., Hq, L, E)`, 2 dims or more. Leading dims and, without enable_gqa, heads broadcast as in torch.
        key: `(..., H, S, E)`.
        value: `(..., H, S, Ev)`.
        attn_mask: broadcastable to `(..., Hq, L, S)`: bool, True = may attend, or float, added to the scores
            (differentiable); or a `torch.nn.attention.bias.CausalBias`.
        dropout_p: 0 <= p < 1, applied whenever it is positive. Seeded by torch's default generator, but the elements
            that it drops are attnzoo's, not torch's.
        is_causal: query i sees key j only if `j <= i`: top-left, also where L differs from S. Not with attn_mask.
        scale: default `E ** -0.5`.
        enable_gqa: Hq may be a multiple of H.
        backend: as in `attnzoo.attention`; None is the default of `attnzoo.use()`, else automatic choice.

    Returns:
        `(..., Hq, L, Ev)`. A row that sees no key is 0.

    Raises:
        TypeError, ValueError: a malformed call, where torch raises RuntimeError.
        UnsupportedError: the backend can't serve this call.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check_tensor(name, tensor)
    is_headless = query.ndim == key.ndim == value.ndim == 2
    query, key, value = [tensor if tensor.ndim > 2 else tensor[None] for tensor in (query, key, value)]
    leading = _broadcast_shape("leading dims", query.shape[:-3], key.shape[:-3], value.shape[:-3])
    query, key, value = _with_common_heads(query, key, value, enable_gqa)
    output = attention(
        _four_dims(query, leading),
        _four_dims(key, leading),
        _four_dims(value, leading),
        dropout_p=dropout_p,
        scale=scale,
        backend=backend,
        **_masks(attn_mask, is_causal, leading, (query.shape[-2], key.shape[-2])),
    )
    assert isinstance(output, Tensor)
    if len(leading) == 1:
        return output
    return output[0, 0] if is_headless else output.reshape(*leading, *output.shape[1:])


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if tensor.ndim < 2:
        raise ValueError(f"{name} has {tensor.ndim} dims, shape {tuple(tensor.shape)}; it takes 2 or more: (..., heads, length, dim)")


def _broadcast_shape(what: str, *shapes: Shape) -> Shape:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        found = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"query, key and value have {what} {found}; they need to be equal or 1") from None


def _with_common_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Heads broadcast or, where grouped, as attnzoo takes them: one number for key and value, a divisor of query's."""
    counts = [tensor.shape[-3] for tensor in (query, key, value)]
    if not enable_gqa:
        heads = _broadcast_shape("heads", *[(count,) for count in counts])[0]
        return _with_heads(query, heads), _with_heads(key, heads), _with_heads(value, heads)
    if counts[1] == counts[2]:
        return query, key, value
    for name, count in (("key", counts[1]), ("value", counts[2])):
        if not count or counts[0] % count:
            raise ValueError(f"{name} has {count} heads, not a divisor of the {counts[0]} heads of query")
    return query, key.repeat_interleave(counts[0] // counts[1], -3), value.repeat_interleave(counts[0] // counts[2], -3)


def _with_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.shape[-3] == heads else tensor.expand(*tensor.shape[:-3], heads, *tensor.shape[-2:])


def _four_dims(tensor: Tensor, leading: Shape) -> Tensor:
    """`(B, H, length, dim)`, the leading dims flattened into one."""
    if tensor.ndim == 4 and tuple(tensor.shape[:1]) == leading:
        return tensor
    inner = tensor.shape[-3:]
    return tensor.expand(*leading, *inner).reshape(math.prod(leading), *inner)


def _masks(attn_mask: Tensor | None, is_causal: bool, leading: Shape, lengths: tuple[int, int]) -> dict[str, Any]:
    """attn_mask and is_causal in attnzoo's words."""
    if attn_mask is None:
        return {"causal": is_causal, "align": "top_left"}
    if is_causal:
        raise ValueError("attn_mask is given and is_causal is True; only one of them: write the causal part into attn_mask")
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask is a {type(attn_mask).__name__}; it takes a bool or float tensor")
    if type(attn_mask) is not Tensor:
        from torch.nn.attention.bias import CausalBias

        if isinstance(attn_mask, CausalBias):
            return _causal_bias(attn_mask, lengths)
    if attn_mask.ndim < 2:
        raise ValueError(f"attn_mask has {attn_mask.ndim} dims, shape {tuple(attn_mask.shape)}; it takes 2 or more: (..., heads, L, S)")
    if attn_mask.ndim > 2:
        attn_mask = _mask_of_four_dims(attn_mask, leading)
    return {"mask": attn_mask} if attn_mask.dtype == torch.bool else {"bias": attn_mask}


def _mask_of_four_dims(attn_mask: Tensor, leading: Shape) -> Tensor:
    inner = attn_mask.shape[-3:]
    if all(size == 1 for size in attn_mask.shape[:-3]):
        return attn_mask.reshape(1, *inner)
    try:
        return attn_mask.expand(*leading, *inner).reshape(math.prod(leading), *inner)
    except RuntimeError:
        found = tuple(attn_mask.shape)
        raise ValueError(f"attn_mask has shape {found}, its leading dims are not broadcastable to {leading} of the call") from None


def _causal_bias(bias: Any, lengths: tuple[int, int]) -> dict[str, Any]:
    if (bias.seq_len_q, bias.seq_len_kv) != lengths:
        raise ValueError(f"attn_mask is a causal bias for lengths {(bias.seq_len_q, bias.seq_len_kv)}, the call has {lengths}")
    return {"causal": True, "align": "top_left" if bias.variant.name == "UPPER_LEFT" else "bottom_right"}
