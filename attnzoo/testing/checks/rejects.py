"""Malformed calls: each raises TypeError or ValueError that names the argument, before the backend runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnzoo.layout import BlockLayout
from attnzoo.testing.failure import ConformanceError, require
from attnzoo.testing.inputs import make_call
from attnzoo.testing.problem import Problem
from attnzoo.testing.subject import Subject

__all__ = ["MALFORMED", "reject"]

Arguments = dict[str, Any]


def _empty(*shape: int, like: Arguments, dtype: torch.dtype | None = None) -> Tensor:
    q: Tensor = like["q"]
    return torch.zeros(shape, dtype=dtype or q.dtype, device=q.device)


def _layout(arguments: Arguments, q_len: int, kv_len: int, batch: int = 1, heads: int = 1) -> BlockLayout:
    mask = torch.ones(batch, heads, q_len, kv_len, dtype=torch.bool, device=arguments["q"].device)
    return BlockLayout.from_dense(mask, block=16)


# The call is q (2, 4, 8, 16), k (2, 2, 12, 16), v (2, 2, 12, 16).
MALFORMED: dict[str, tuple[type[Exception], str, Callable[[Arguments], Arguments]]] = {
    "q-list": (TypeError, "q", lambda a: {"q": [[1.0]]}),
    "q-int": (TypeError, "q", lambda a: {"q": a["q"].int()}),
    "q-complex": (TypeError, "q", lambda a: {"q": a["q"].to(torch.complex64)}),
    "q-sparse": (TypeError, "q", lambda a: {"q": a["q"].to_sparse()}),
    "q-3-dims": (ValueError, "q", lambda a: {"q": a["q"][0]}),
    "k-5-dims": (ValueError, "k", lambda a: {"k": a["k"][None]}),
    "k-dtype": (TypeError, "k", lambda a: {"k": a["k"].double() if a["k"].dtype != torch.float64 else a["k"].float()}),
    "v-dtype": (TypeError, "v", lambda a: {"v": a["v"].double() if a["v"].dtype != torch.float64 else a["v"].float()}),
    "k-batch": (ValueError, "batch", lambda a: {"k": a["k"][:1]}),
    "k-head-dim": (ValueError, "k", lambda a: {"k": a["k"][..., :8]}),
    "v-length": (ValueError, "v", lambda a: {"v": a["v"][:, :, :5]}),
    "v-heads": (ValueError, "v", lambda a: {"v": a["v"][:, :1]}),
    "heads-33-2": (ValueError, "heads", lambda a: {"q": _empty(2, 33, 8, 16, like=a)}),
    "heads-3-2": (ValueError, "heads", lambda a: {"q": a["q"][:, :3]}),
    "heads-1-2": (ValueError, "heads", lambda a: {"q": a["q"][:, :1]}),
    "heads-4-0": (ValueError, "heads", lambda a: {"k": a["k"][:, :0], "v": a["v"][:, :0]}),
    "k-meta": (ValueError, "k", lambda a: {"k": a["k"].to("meta")}),
    "causal-int": (TypeError, "causal", lambda a: {"causal": 1, "align": "top_left"}),
    "causal-unaligned": (ValueError, "align", lambda a: {"causal": True}),
    "window-unaligned": (ValueError, "align", lambda a: {"window": (3, 3)}),
    "align-word": (ValueError, "align", lambda a: {"causal": True, "align": "left"}),
    "align-bool": (TypeError, "align", lambda a: {"causal": True, "align": True}),
    "window-int": (TypeError, "window", lambda a: {"window": 3, "align": "top_left"}),
    "window-minus-one": (ValueError, "window", lambda a: {"window": (-1, -1), "align": "top_left"}),
    "window-float": (TypeError, "window", lambda a: {"window": (1.5, 0), "align": "top_left"}),
    "window-triple": (TypeError, "window", lambda a: {"window": (1, 2, 3), "align": "top_left"}),
    "mask-float": (TypeError, "bias", lambda a: {"mask": _empty(8, 12, like=a)}),
    "mask-int": (TypeError, "mask", lambda a: {"mask": _empty(8, 12, like=a, dtype=torch.int64)}),
    "mask-3-dims": (ValueError, "mask", lambda a: {"mask": _empty(2, 8, 12, like=a, dtype=torch.bool)}),
    "mask-1-dim": (ValueError, "mask", lambda a: {"mask": _empty(12, like=a, dtype=torch.bool)}),
    "mask-5-dims": (ValueError, "mask", lambda a: {"mask": _empty(1, 1, 1, 8, 12, like=a, dtype=torch.bool)}),
    "mask-shape": (ValueError, "mask", lambda a: {"mask": _empty(8, 13, like=a, dtype=torch.bool)}),
    "mask-kv-heads": (ValueError, "mask", lambda a: {"mask": _empty(2, 2, 8, 12, like=a, dtype=torch.bool)}),
    "mask-list": (TypeError, "mask", lambda a: {"mask": [[True]]}),
    "bias-bool": (TypeError, "mask", lambda a: {"bias": _empty(8, 12, like=a, dtype=torch.bool)}),
    "bias-int": (TypeError, "bias", lambda a: {"bias": _empty(8, 12, like=a, dtype=torch.int32)}),
    "bias-3-dims": (ValueError, "bias", lambda a: {"bias": _empty(2, 8, 12, like=a)}),
    "bias-shape": (ValueError, "bias", lambda a: {"bias": _empty(1, 3, 8, 12, like=a)}),
    "segments-single": (ValueError, "segment_ids", lambda a: {"segment_ids": _empty(2, 8, like=a, dtype=torch.int64)}),
    "segments-float": (TypeError, "segment_ids", lambda a: {"segment_ids": (_empty(2, 8, like=a), _empty(2, 12, like=a))}),
    "segments-shape": (
        ValueError,
        "segment_ids",
        lambda a: {"segment_ids": (_empty(2, 8, like=a, dtype=torch.int32), _empty(2, 8, like=a, dtype=torch.int32))},
    ),
    "layout-mask": (TypeError, "layout", lambda a: {"layout": _empty(8, 12, like=a, dtype=torch.bool)}),
    "layout-length": (ValueError, "layout", lambda a: {"layout": _layout(a, 8, 16)}),
    "layout-heads": (ValueError, "layout", lambda a: {"layout": _layout(a, 8, 12, heads=2)}),
    "layout-batch": (ValueError, "layout", lambda a: {"layout": _layout(a, 8, 12, batch=3)}),
    "scale-word": (TypeError, "scale", lambda a: {"scale": "auto"}),
    "scale-nan": (ValueError, "scale", lambda a: {"scale": float("nan")}),
    "softcap-zero": (ValueError, "softcap", lambda a: {"softcap": 0.0}),
    "softcap-negative": (ValueError, "softcap", lambda a: {"softcap": -3.0}),
    "sinks-shape": (ValueError, "sinks", lambda a: {"sinks": _empty(2, like=a)}),
    "sinks-int": (TypeError, "sinks", lambda a: {"sinks": _empty(4, like=a, dtype=torch.int64)}),
    "dropout-one": (ValueError, "dropout_p", lambda a: {"dropout_p": 1.0}),
    "dropout-negative": (ValueError, "dropout_p", lambda a: {"dropout_p": -0.1}),
    "dropout-seed-float": (TypeError, "dropout_seed", lambda a: {"dropout_p": 0.1, "dropout_seed": 1.5}),
    "dropout-seed-int32": (TypeError, "dropout_seed", lambda a: {"dropout_p": 0.1, "dropout_seed": _empty(1, like=a, dtype=torch.int32)}),
    "return-lse-int": (TypeError, "return_lse", lambda a: {"return_lse": 1}),
    "unknown-option": (TypeError, "attn_mask", lambda a: {"attn_mask": None}),
}
"""Name -> (error, word that its message holds, what is changed in a good call)."""

GOOD = Problem(batch=2, q_heads=4, kv_heads=2, q_len=8, kv_len=12, head_dim=16, grads=())


def reject(name: str) -> Callable[[Subject, Problem, torch.device], None]:
    """The check of one malformed call."""
    expected, word, change = MALFORMED[name]

    def check(subject: Subject, problem: Problem, device: torch.device) -> None:
        call = make_call(problem, device)
        arguments: Arguments = {"q": call.q, "k": call.k, "v": call.v}
        arguments |= change(arguments)
        try:
            subject(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
        except (TypeError, ValueError) as error:
            require(isinstance(error, expected), f"raised {type(error).__name__}, not {expected.__name__}: {error}")
            require(word in str(error), f"the message does not name {word!r}: {error}")
            return
        except NotImplementedError as error:
            raise ConformanceError(f"a malformed call was refused as unsupported, not as malformed: {error}") from error
        raise ConformanceError(f"a malformed call ({name}) was served")

    return check
