"""attnzoo inside Hugging Face transformers (>= 5): `model.set_attn_implementation(register()["naive"])`.

Each backend comes with its mask function: without one, transformers hands over no mask at all and padding is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo import registry
from attnzoo.api import attention
from attnzoo.errors import UnsupportedError
from attnzoo.registry import AUTO

__all__ = ["attention_function", "mask_function", "register", "registered_name"]

SPELLINGS = {"flash": "exact", "flex_attention": "flex", "sdpa": "torch", "block_sparse": "blocksparse"}
"""Words that transformers reads in a name: with "flash" it hands over 2-D masks, with "sdpa" and "flex_attention" it
refuses models that its own integration of those doesn't serve. "block_sparse" is one word to match its prose name."""

SAYS_NOTHING_OF_ATTENTION = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",  # in the rotary embedding and, where sequences are packed, in the mask already
        "return_dict",
        "use_cache",
    }
)
"""What models pass on to every attention function, and what changes nothing there."""


def registered_name(backend: str) -> str:
    """How transformers knows a backend: `attnzoo_<backend>`, where "flash" is spelt "exact" and "sdpa" "torch"."""
    for found, spelt in SPELLINGS.items():
        backend = backend.replace(found, spelt)
    return f"attnzoo_{backend}"


def register(backends: Iterable[str] | None = None) -> dict[str, str]:
    """Make attnzoo's backends known to transformers, attention and mask function both. Imports no plugin.

    Args:
        backends: names; None takes every known backend, and "auto", which is `attnzoo.use()`'s default or
            automatic choice, call by call.

    Returns:
        backend name -> the name to give to `attn_implementation=` or `model.set_attn_implementation`.

    Raises:
        ImportError: transformers is not installed, or older than 5.
        UnknownBackendError: no such backend.
        ValueError: two of the backends would get one name.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("this needs transformers >= 5: pip install 'attnzoo[hf]'") from error
    known = registry.default()
    chosen = [AUTO, *known.names()] if backends is None else list(backends)
    known.require_known(chosen)
    owners: dict[str, str] = {}
    for backend in chosen:
        owner = owners.setdefault(registered_name(backend), backend)
        if owner != backend:
            raise ValueError(
                f"backends {owner!r} and {backend!r} would both be {registered_name(backend)!r}; name one of them in backends="
            )
    for name, backend in owners.items():
        AttentionInterface.register(name, attention_function(backend))
        AttentionMaskInterface.register(name, mask_function)
    return {backend: name for name, backend in owners.items()}


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """The mask of one call as transformers asks for it: `(B, 1, Sq, Skv)` bool, True = may attend.

    None, where transformers allows it, stands for all pairs, or causal with the last query at the last key.
    Its own rule for SDPA also skips the mask of a prefill into a static cache, which is top-left: not here.
    """
    from transformers.masking_utils import sdpa_mask

    skip = allow_is_causal_skip and (q_length == 1 or q_length == kv_length)
    return sdpa_mask(batch_size, q_length, kv_length, allow_is_causal_skip=skip, **options)


def attention_function(backend: str) -> Callable[..., tuple[Tensor, None]]:
    """The function that transformers calls in place of eager attention, served by that backend."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        deterministic: bool | None = False,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attention of one layer.

        Args:
            module: the layer; its `training` switches dropout on, its `is_causal` stands where the argument is None.
            query, key, value: `(B, Hq, Sq, D)`, `(B, Hkv, Skv, D)`, `(B, Hkv, Skv, Dv)`.
            attention_mask: 4-D, bool (True = may attend) or float (added to the scores). It says all there is to
                say: is_causal and sliding_window count only without it, and then with the last query at the last key.
            scaling, softcap: `scale` and `softcap` of `attnzoo.attention`.
            sliding_window: keys that a query sees on its left, itself included (and on its right if not causal).
            s_aux: `(Hq,)`, the attention sinks.
            position_bias: added to the scores.

        Returns:
            `(B, Sq, Hq, Dv)`, contiguous, and None for the probabilities, which are never formed.

        Raises:
            UnsupportedError: an argument that this function does not know, or output_attentions=True.
        """
        _refuse(registered_name(backend), others)
        output = attention(
            query,
            key,
            value,
            scale=scaling,
            softcap=softcap,
            sinks=s_aux,
            dropout_p=dropout if module.training else 0.0,
            deterministic=bool(deterministic),
            backend=None if backend == AUTO else backend,
            **_masks(attention_mask, position_bias),
            **_band(module, query, key, attention_mask, is_causal, sliding_window),
        )
        assert isinstance(output, Tensor)
        return output.transpose(1, 2).contiguous(), None

    return attend


def _refuse(name: str, others: dict[str, Any]) -> None:
    """None and False ask for nothing; anything else that is not known may change the result."""
    reasons = []
    for argument, value in others.items():
        if argument in SAYS_NOTHING_OF_ATTENTION or value is None or value is False:
            continue
        if argument == "output_attentions":
            reasons.append("output_attentions is True, but the probabilities are never formed; attn_implementation='eager' gives them")
        else:
            reasons.append(f"it was given {argument} (a {type(value).__name__}), which it doesn't know and will not drop")
    if reasons:
        raise UnsupportedError({name: reasons})


def _masks(attention_mask: Tensor | None, position_bias: Tensor | None) -> dict[str, Any]:
    if attention_mask is None:
        return {"bias": position_bias}
    if attention_mask.ndim != 4:
        found = f"attention_mask has {attention_mask.ndim} dims, shape {tuple(attention_mask.shape)}"
        raise ValueError(f"{found}; it takes 4: (batch, heads, q_len, kv_len), each 1 or full")
    if attention_mask.dtype == torch.bool:
        return {"mask": attention_mask, "bias": position_bias}
    if position_bias is None:
        return {"bias": attention_mask}
    wide = torch.promote_types(attention_mask.dtype, torch.float32)  # in half, finfo.min plus a bias overflows
    return {"bias": attention_mask.to(wide) + position_bias.to(wide)}


def _band(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> dict[str, Any]:
    """causal, window and align; whatever could hide no key is left out, so that more backends can serve."""
    if attention_mask is not None:
        return {}
    q_len, kv_len = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None
    if sliding_window is not None and sliding_window < max(q_len, kv_len):
        window = (sliding_window - 1, None if causal else sliding_window - 1)
    return {"causal": bool(causal) and q_len > 1, "window": window, "align": "bottom_right"}
