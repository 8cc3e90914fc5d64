"""AttentionSpec: what is asked of a backend, without tensors; the only place that looks at raw arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attnzoo.frozen import quick_constructor
from attnzoo.layout import ID_DTYPES, BlockLayout, LayoutSummary

__all__ = ["AttentionSpec", "Align", "Window"]

Align = Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]
Shape4 = tuple[int, int, int, int]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ALIGNMENTS = ("top_left", "bottom_right")
SCORES = torch.finfo(torch.float32)  # of every dtype but float64
SOFTCAPS, SOFTCAPS_FP64 = (2.0**-100, 2.0**100), (2.0**-900, 2.0**900)
"""Below, capped scores are 0 to any precision; above, none is changed; so quotients and products neither overflow nor vanish."""
LARGEST_BOUND = 2**30  # of a window: no length reaches it, and sums with a position stay within 32 bits


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention problem: sizes, dtype, device and options, normalised. Hashable, holds no tensor.

    Attributes:
        batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim: sizes of `q (B, Hq, Sq, D)`,
            `k (B, Hkv, Skv, D)` and `v (B, Hkv, Skv, Dv)`. Without a query head there is no kv head either.
        dtype, device: of q, k and v, after autocast.
        scale: factor of the scores, always a number, which the scores' dtype can hold.
        causal: query i sees key j only if `j <= i + diagonal`.
        align: where the diagonal sits; None unless causal or window depends on it.
        window: `(left, right)`, each at most 2**30; None where unbounded on both sides.
        mask, bias: their shape as 4 dims, each 1 or full; None if not given.
        segments: whether segment ids are given.
        layout: the summary of the block layout, if one is given.
        softcap: positive, or None; None too where it is so large that it caps nothing.
        bias_dtype, sinks_dtype: dtypes of those inputs; None if not given.
        dropout_p: 0 to 1, 1 excluded.
        return_lse, deterministic: as in the call; deterministic also where torch asks for it.
        grads: the inputs that need a gradient, of q, k, v, bias, sinks in that order.
        strides: of q, k and v as a kernel sees them (last stride 1).
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    causal: bool = False
    align: Align | None = None
    window: Window | None = None
    mask: Shape4 | None = None
    bias: Shape4 | None = None
    bias_dtype: torch.dtype | None = None
    segments: bool = False
    layout: LayoutSummary | None = None
    softcap: float | None = None
    sinks_dtype: torch.dtype | None = None
    dropout_p: float = 0.0
    return_lse: bool = False
    deterministic: bool = False
    grads: tuple[str, ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.q_heads // self.kv_heads if self.kv_heads else 1

    @property
    def diagonal(self) -> int:
        """Query i stands at key position `i + diagonal`."""
        return self.kv_len - self.q_len if self.align == "bottom_right" else 0

    @property
    def band(self) -> Window:
        """`(left, right)` with causal folded in: key j is seen only if `-left <= j - i - diagonal <= right`."""
        left, right = self.window or (None, None)
        return left, (0 if self.causal else right)

    @property
    def binding_band(self) -> Window:
        """`band`, None for a bound that rules out no pair."""
        left, right = self.band
        if left is not None and left >= self.q_len - 1 + self.diagonal:
            left = None
        if right is not None and right >= self.kv_len - 1 - self.diagonal:
            right = None
        return left, right

    @property
    def is_empty(self) -> bool:
        """No output element, or no key: there is nothing to compute."""
        return not (self.batch and self.q_heads and self.q_len and self.kv_len and self.value_dim)

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """Of scores, softmax and sums: fp32, or fp64 for fp64 inputs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        align: Align | None = None,
        window: Window | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
        layout: BlockLayout | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int | Tensor | None = None,
        return_lse: bool = False,
        deterministic: bool = False,
    ) -> AttentionSpec:
        """The one validator. Arguments and their meaning are those of `attnzoo.attention`.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: a wrong shape, device or value. Both name the argument, what was found, what is allowed.
        """
        dtype = _check_tensors(q, k, v)
        batch, q_heads, q_len, head_dim = q.shape
        kv_heads, kv_len, value_dim = k.shape[1] if q_heads else 0, k.shape[2], v.shape[3]
        full = (batch, q_heads, q_len, kv_len)
        if type(causal) is not bool or type(return_lse) is not bool or type(deterministic) is not bool:
            _check_flags(causal=causal, return_lse=return_lse, deterministic=deterministic)
        if window is not None:
            window = check_window(window)
        align = check_align(align, causal or window is not None, q_len, kv_len)
        mask_shape = bias_shape = None
        if mask is not None:
            mask_shape = _check_mask(mask, full, q.device)
        if bias is not None:
            bias_shape = _check_bias(bias, full, q.device)
        if segment_ids is not None:
            _check_segment_ids(segment_ids, full, q.device)
        if layout is not None:
            _check_layout(layout, full, q.device)
        if sinks is not None:
            _check_sinks(sinks, q_heads, q.device)
        if dropout_seed is not None or type(dropout_p) is not float or dropout_p != 0.0:
            _check_dropout(dropout_p, dropout_seed, q.device)
        grads = _grads(q=q, k=k, v=v, bias=bias, sinks=sinks) if torch.is_grad_enabled() else ()
        make = cls if torch.compiler.is_compiling() else _construct
        return make(
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            dtype,
            q.device,
            _check_scale(scale, head_dim, dtype),
            causal,
            align,
            window,
            mask_shape,
            bias_shape,
            None if bias is None else bias.dtype,
            segment_ids is not None,
            None if layout is None else layout.summary,
            None if softcap is None else _check_softcap(softcap, dtype),
            None if sinks is None else sinks.dtype,
            float(dropout_p),
            return_lse,
            deterministic or torch.are_deterministic_algorithms_enabled(),
            grads,
            (_kernel_strides(q, dtype), _kernel_strides(k, dtype), _kernel_strides(v, dtype)),
        )


_construct = quick_constructor(AttentionSpec)


def _grads(**inputs: Tensor | None) -> tuple[str, ...]:
    return tuple([name for name, tensor in inputs.items() if tensor is not None and tensor.requires_grad])


def _kernel_strides(tensor: Tensor, dtype: torch.dtype) -> tuple[int, ...]:
    """The strides after a cast, a negation or a non-unit last stride has made the tensor contiguous."""
    strides = tensor.stride()
    if tensor.dtype == dtype and (strides[-1] == 1 or tensor.shape[-1] == 1) and not is_negated(tensor):
        return strides
    _, heads, length, dim = tensor.shape
    return (heads * length * dim, length * dim, dim, 1)


def is_negated(tensor: Tensor) -> bool:
    """Whether it is a view that stands for the negative of what lies in memory; what is compiled gets no such tensor."""
    return not torch.compiler.is_compiling() and tensor.is_neg()


def _check_flags(**flags: object) -> None:
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise TypeError(f"{name} is {flag!r}, a {type(flag).__name__}; it takes a bool")


def _check_strided(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else "sparse"
        raise TypeError(f"{name} is a {kind} tensor of layout {tensor.layout}; it takes a dense (strided) one")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """Types, dtypes, devices and shapes of q, k and v; returns their dtype, after autocast."""
    if not _are_plain(q, k, v):
        _blame(q, k, v)
    dtype = autocast_dtype(q)
    if dtype is None:
        dtype = q.dtype
        for name, tensor in (("k", k), ("v", v)):
            if tensor.dtype != dtype:
                raise TypeError(f"{name} has dtype {tensor.dtype}, q has {dtype}; they need one dtype")
    elif k.dtype == torch.float64 or v.dtype == torch.float64:
        raise TypeError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; autocast leaves float64 alone, use one dtype")
    _check_shapes(q.shape, k.shape, v.shape)
    return dtype


def _are_plain(*tensors: Tensor) -> bool:
    """Dense tensors of 4 dims and a float dtype on one device: what nearly every call gives, seen at once."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES or tensor.ndim != 4:
            return False
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.device != tensors[0].device:
            return False
    return True


def _blame(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Say which of the tensors is not plain, and how."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}; it takes float16, bfloat16, float32 or float64")
        _check_strided(name, tensor)
        if tensor.ndim != 4:
            raise ValueError(f"{name} has {tensor.ndim} dims, shape {tuple(tensor.shape)}; it takes 4: (batch, heads, length, dim)")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}; they need one device")


def autocast_dtype(q: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives q, k and v; None where it is off or does not apply (fp64)."""
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or q.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def _check_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> None:
    if k[0] != q[0] or v[0] != q[0]:
        raise ValueError(f"q, k, v have batch sizes {q[0]}, {k[0]}, {v[0]}; they need one")
    if k[3] != q[3]:
        raise ValueError(f"k has head dim {k[3]}, q has {q[3]}; they need the same")
    if v[1] != k[1]:
        raise ValueError(f"v has {v[1]} heads, k has {k[1]}; they need the same")
    if v[2] != k[2]:
        raise ValueError(f"v has length {v[2]}, k has {k[2]}; they need the same")
    if (q[1] % k[1] if k[1] else q[1]) != 0:
        raise ValueError(f"k has {k[1]} heads, not a divisor of the {q[1]} heads of q")


def check_window(window: object) -> Window | None:
    if not isinstance(window, tuple) or len(window) != 2:
        raise TypeError(f"window is {window!r}; it takes (left, right), each a non-negative int or None")
    for side, bound in (("left", window[0]), ("right", window[1])):
        if bound is None:
            continue
        if isinstance(bound, bool) or not isinstance(bound, int):
            raise TypeError(f"window {side} is {bound!r}, a {type(bound).__name__}; it takes a non-negative int or None")
        if bound < 0:
            raise ValueError(f"window {side} is {bound}; it takes a non-negative int, or None for no bound")
    if window == (None, None):
        return None
    left, right = window
    return left and min(left, LARGEST_BOUND), right and min(right, LARGEST_BOUND)


def check_align(align: object, is_banded: bool, q_len: int, kv_len: int) -> Align | None:
    if align is not None and not isinstance(align, str):
        raise TypeError(f"align is {align!r}, a {type(align).__name__}; it takes 'top_left', 'bottom_right' or None")
    if align is not None and align not in ALIGNMENTS:
        raise ValueError(f"align is {align!r}; it takes 'top_left', 'bottom_right' or None")
    if not is_banded or q_len == kv_len:
        return None
    if align is None:
        raise ValueError(
            f"align is None, but q has length {q_len} and k {kv_len}: say where the diagonal of causal or window "
            "sits, align='top_left' (as torch's is_causal) or align='bottom_right' (as decoding with a cache)"
        )
    return align  # type: ignore[return-value]


def _broadcast_shape(name: str, tensor: Tensor, full: Shape4, device: torch.device) -> Shape4:
    """The tensor's shape with 4 dims, each 1 or full."""
    _check_strided(name, tensor)
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, q on {device}; they need one device")
    shape = tuple(tensor.shape)
    if len(shape) == 3:
        raise ValueError(f"{name} has 3 dims, shape {shape}, which is ambiguous: write out all 4, each 1 or full, of {tuple(full)}")
    if len(shape) not in (2, 4):
        raise ValueError(f"{name} has {len(shape)} dims, shape {shape}; it takes 2 or 4, broadcastable to {tuple(full)}")
    if len(shape) == 2:
        shape = (1, 1, *shape)
    for have, want in zip(shape, full):
        if have != want and have != 1:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not broadcastable to (batch, heads, q_len, kv_len) = {tuple(full)}")
    return shape  # type: ignore[return-value]


def _check_mask(mask: Tensor, full: Shape4, device: torch.device) -> Shape4:
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is a {type(mask).__name__}; it takes a bool tensor, True = may attend")
    if mask.dtype != torch.bool:
        hint = "; numbers to be added to the scores go into bias=" if mask.dtype.is_floating_point else ""
        raise TypeError(f"mask has dtype {mask.dtype}; it takes torch.bool, True = may attend{hint}")
    return _broadcast_shape("mask", mask, full, device)


def _check_bias(bias: Tensor, full: Shape4, device: torch.device) -> Shape4:
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias is a {type(bias).__name__}; it takes a float tensor")
    if bias.dtype not in DTYPES:
        hint = "; True = may attend goes into mask=" if bias.dtype == torch.bool else ""
        raise TypeError(f"bias has dtype {bias.dtype}; it takes float16, bfloat16, float32 or float64{hint}")
    return _broadcast_shape("bias", bias, full, device)


def _check_segment_ids(segment_ids: object, full: Shape4, device: torch.device) -> None:
    batch, _, q_len, kv_len = full
    if isinstance(segment_ids, tuple):
        if len(segment_ids) != 2:
            raise ValueError(f"segment_ids is a tuple of {len(segment_ids)}; it takes one tensor or a pair (q ids, kv ids)")
    elif q_len != kv_len:
        raise ValueError(f"segment_ids is one tensor, but q has length {q_len} and k {kv_len}; give a pair (q ids, kv ids)")
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    for name, ids, length in (("q", pair[0], q_len), ("kv", pair[1], kv_len)):
        if not isinstance(ids, Tensor):
            raise TypeError(f"segment_ids of {name} is a {type(ids).__name__}; it takes an integer tensor")
        if ids.dtype not in ID_DTYPES:
            raise TypeError(f"segment_ids of {name} has dtype {ids.dtype}; it takes int8, int16, int32, int64 or uint8")
        _check_strided(f"segment_ids of {name}", ids)
        if tuple(ids.shape) != (batch, length):
            raise ValueError(f"segment_ids of {name} has shape {tuple(ids.shape)}; it takes (batch, length) = {(batch, length)}")
        if ids.device != device:
            raise ValueError(f"segment_ids of {name} is on {ids.device}, q on {device}; they need one device")


def _check_layout(layout: BlockLayout, full: Shape4, device: torch.device) -> None:
    batch, heads, q_len, kv_len = full
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"layout is a {type(layout).__name__}; it takes a BlockLayout (BlockLayout.from_dense makes one of a mask)")
    if (layout.q_len, layout.kv_len) != (q_len, kv_len):
        raise ValueError(f"layout is for lengths ({layout.q_len}, {layout.kv_len}), the call has ({q_len}, {kv_len})")
    if layout.batch not in (1, batch):
        raise ValueError(f"layout has batch {layout.batch}; the call takes 1 or {batch}")
    if layout.heads not in (1, heads):
        raise ValueError(f"layout has {layout.heads} heads; the call takes 1 or {heads}")
    if layout.device != device:
        raise ValueError(f"layout is on {layout.device}, q on {device}; layout.to({str(device)!r}) moves it")
    layout.check_unmodified()


def _check_sinks(sinks: Tensor, heads: int, device: torch.device) -> None:
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks is a {type(sinks).__name__}; it takes a float tensor")
    if sinks.dtype not in DTYPES:
        raise TypeError(f"sinks has dtype {sinks.dtype}; it takes float16, bfloat16, float32 or float64")
    _check_strided("sinks", sinks)
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}; it takes one logit a query head, ({heads},)")
    if sinks.device != device:
        raise ValueError(f"sinks is on {sinks.device}, q on {device}; they need one device")


def _check_number(name: str, value: object, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; it takes {allowed}")
    try:
        return float(value)
    except OverflowError:  # an int beyond every float
        return math.inf


def _check_scale(scale: object, head_dim: int, dtype: torch.dtype) -> float:
    if scale is None:
        return head_dim**-0.5 if head_dim else 1.0
    number = _check_number("scale", scale, "a finite number, or None for head_dim ** -0.5")
    if not -math.inf < number < math.inf:  # math.isfinite can't be traced on a scale that changes
        raise ValueError(f"scale is {scale!r}; it takes a finite number, or None for head_dim ** -0.5")
    if dtype == torch.float64 or -SCORES.max <= number <= SCORES.max:
        return number
    return SCORES.max if number > 0 else -SCORES.max  # infinite, it would make a product of 0 not a number


def _check_softcap(softcap: object, dtype: torch.dtype) -> float | None:
    number = _check_number("softcap", softcap, "a positive number, or None for none")
    if not 0.0 < number < math.inf:
        raise ValueError(f"softcap is {softcap!r}; it takes a positive finite number, or None for none")
    smallest, largest = SOFTCAPS_FP64 if dtype == torch.float64 else SOFTCAPS
    if number > largest:
        return None
    return max(number, smallest)


def _check_dropout(dropout_p: object, seed: object, device: torch.device) -> None:
    number = _check_number("dropout_p", dropout_p, "a number p with 0 <= p < 1")
    if not 0.0 <= number < 1.0:
        raise ValueError(f"dropout_p is {dropout_p!r}; it takes 0 <= p < 1")
    if seed is None:
        return
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            raise TypeError(f"dropout_seed has dtype {seed.dtype}; a tensor seed takes int64")
        _check_strided("dropout_seed", seed)
        if seed.numel() != 1:
            raise ValueError(f"dropout_seed has {seed.numel()} elements, shape {tuple(seed.shape)}; it takes one")
        if seed.device != device:
            raise ValueError(f"dropout_seed is on {seed.device}, q on {device}; they need one device")
    elif isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"dropout_seed is {seed!r}, a {type(seed).__name__}; it takes an int, a one-element int64 tensor or None")
    elif not -(2**63) <= seed < 2**64:
        raise ValueError(f"dropout_seed is {seed}; it takes an integer of 64 bits")
