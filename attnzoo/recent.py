"""The specs of recent calls: a caller in a loop has its call validated once.

Equal calls share one spec, which every cache keyed by specs then finds by identity.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import Parameter

from attnzoo.spec import Align, AttentionSpec, Window

__all__ = ["described"]

MOST = 1024
PLAIN = frozenset({Tensor, Parameter})  # a subclass may say anything of itself
SIMPLE = frozenset({bool, int, float, str, type(None)})

_calls: dict[Hashable, tuple[AttentionSpec, bool]] = {}


def described(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    align: Align | None,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    return_lse: bool,
    deterministic: bool,
) -> tuple[AttentionSpec, bool]:
    """What `AttentionSpec.of` returns or raises for a call without further tensors and without dropout, and whether it is ready.

    A call is ready if q, k and v are what `AttentionInputs.of` would make of them and autocast is off; False where that isn't known.
    """
    key = None if torch.compiler.is_compiling() else _key(q, k, v, causal, return_lse, deterministic, align, window, scale, softcap)
    call = None if key is None else _calls.get(key)
    if call is None:
        spec = AttentionSpec.of(
            q,
            k,
            v,
            causal=causal,
            align=align,
            window=window,
            scale=scale,
            softcap=softcap,
            return_lse=return_lse,
            deterministic=deterministic,
        )
        call = (spec, key is not None and k.shape[1] == spec.kv_heads and spec.strides == (q.stride(), k.stride(), v.stride()))
        if key is not None:
            if len(_calls) >= MOST:
                _calls.clear()
            _calls[key] = call
    return call


def _key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    return_lse: bool,
    deterministic: bool,
    align: Align | None,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
) -> Hashable | None:
    """Everything that the spec depends on; None where that is more, or can't be asked.

    Types go with the values: 1 == True == 1.0, and not all of them are taken.
    """
    if type(causal) is not bool or type(return_lse) is not bool or type(deterministic) is not bool:
        return None
    if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN:
        return None
    strided, device = torch.strided, q.device
    if q.layout is not strided or k.layout is not strided or v.layout is not strided or q.is_nested or k.is_nested or v.is_nested:
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():  # their strides become others
        return None
    if device.type == "meta" or torch.is_autocast_enabled(device.type):
        return None
    options = types = None
    if not (align is None and window is None and scale is None and softcap is None):
        if window is not None and type(window) is not tuple:
            return None
        options = (align, scale, softcap, *(window or ()))  # for their types; the window itself tells () from None
        types = tuple([type(option) for option in options])
        if not SIMPLE.issuperset(types):
            return None
    return (
        q.shape, q.stride(), q.dtype, device, q.requires_grad,
        k.shape, k.stride(), k.dtype, k.device, k.requires_grad,
        v.shape, v.stride(), v.dtype, v.device, v.requires_grad,
        window, causal, return_lse, deterministic, options, types, torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
