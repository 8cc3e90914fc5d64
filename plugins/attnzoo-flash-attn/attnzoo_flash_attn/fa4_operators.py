"""FlashAttention 4 as opaque operators: under torch.compile its own autograd function, which compiles CuTe kernels, can't be traced.

`attnzoo_flash_attn::fa4_forward` and `fa4_backward` call what that function calls, with tensors `(B, S, H, D)`; their fakes give the
true strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo_flash_attn.tensors import aligned

__all__ = ["attend_compiled"]

RESULTS = "Tensor grad_o, Tensor? grad_lse, Tensor o, Tensor lse"
OPTIONS = "float scale, bool causal, int? left, int? right, float softcap"

_library = torch.library.Library("attnzoo_flash_attn", "DEF")
_library.define(f"fa4_forward(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor, Tensor)")
_library.define(f"fa4_backward({RESULTS}, Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor, Tensor, Tensor)")


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int | None, right: int | None, softcap: float
) -> tuple[Tensor, Tensor]:
    """o `(B, Sq, Hq, Dv)` and lse `(B, Hq, Sq)`; traceable, differentiable in q, k and v."""
    return torch.ops.attnzoo_flash_attn.fa4_forward(q, k, v, scale, causal, left, right, softcap)  # type: ignore[no-any-return]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int | None, right: int | None, softcap: float
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    o, lse, *_ = _flash_attn_fwd(
        aligned(q),
        aligned(k),
        aligned(v),
        softmax_scale=scale,
        causal=causal,
        window_size_left=left,
        window_size_right=right,
        softcap=softcap,
        return_lse=True,
    )
    return o.contiguous(), lse.contiguous()


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    batch, q_len, heads, _ = q.shape
    return q.new_empty(batch, q_len, heads, v.shape[-1]), q.new_empty(batch, heads, q_len, dtype=torch.float32)


def _backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    left: int | None,
    right: int | None,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv = _flash_attn_bwd(
        aligned(q),
        aligned(k),
        aligned(v),
        o,
        aligned(grad_o),
        lse,
        scale,
        causal,
        softcap,
        window_size_left=left,
        window_size_right=right,
        dlse=grad_lse,
    )
    return _in_the_order_of(q, dq), _in_the_order_of(k, dk), _in_the_order_of(v, dv)


def _backward_fake(
    grad_o: Tensor, grad_lse: Tensor | None, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _in_the_order_of(like: Tensor, grad: Tensor) -> Tensor:
    """The gradient, with the strides that the fake promises."""
    made = torch.empty_like(like)
    return grad if grad.stride() == made.stride() else made.copy_(grad)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:3])
    ctx.options = inputs[3:]


def _differentiate(ctx: Any, grad_o: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    o, lse, q, k, v = ctx.saved_tensors
    grad_o = torch.zeros_like(o) if grad_o is None else grad_o
    grads = torch.ops.attnzoo_flash_attn.fa4_backward(grad_o, grad_lse, o, lse, q, k, v, *ctx.options)
    return (*grads, *[None] * len(ctx.options))


def _refuse_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError("fa4 has no second derivative: name another backend, such as 'naive'")


_library.impl("fa4_forward", _forward, "CompositeExplicitAutograd")
_library.impl("fa4_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("attnzoo_flash_attn::fa4_forward", _forward_fake, lib=_library)
torch.library.register_fake("attnzoo_flash_attn::fa4_backward", _backward_fake, lib=_library)
torch.library.register_autograd("attnzoo_flash_attn::fa4_forward", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("attnzoo_flash_attn::fa4_backward", _refuse_second_derivative, lib=_library)
