"""Explanation: the value that `explain` returns, printable as a table."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attnzoo import cost
from attnzoo.errors import UnknownBackendError
from attnzoo.registry import Registry, reasons_against
from attnzoo.spec import AttentionSpec
from attnzoo.tables import rich_table

__all__ = ["Explanation"]

UNITS = ("", "K", "M", "G", "T", "P", "E")


@dataclass(frozen=True)
class Explanation:
    """Which backend would run and why.

    Attributes:
        spec: the call.
        order: the names asked, in order of preference.
        chosen: the backend that would run; None if none of `order` can.
        able: every known backend without a reason against the call.
        rejected: name -> reasons of every other known backend; a plugin that failed to load gives its error.
        cost: predicted for the chosen backend; None without one.
        notes: how the chosen backend would serve the call.
    """

    spec: AttentionSpec
    order: tuple[str, ...]
    chosen: str | None
    able: tuple[str, ...]
    rejected: Mapping[str, tuple[str, ...]]
    cost: cost.Cost | None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, registry: Registry, spec: AttentionSpec, choice: str | tuple[str, ...]) -> Explanation:
        """Ask every backend that the registry knows.

        Raises:
            UnknownBackendError: a name in `choice` is not known.
        """
        order = registry.order(choice)
        registry.require_known(order)
        able, rejected = [], {}
        for name in dict.fromkeys([*order, *registry.names()]):
            try:
                reasons = reasons_against(registry.get(name), spec)
            except UnknownBackendError as error:
                reasons = (str(error),)
            if reasons:
                rejected[name] = reasons
            else:
                able.append(name)
        chosen = next((name for name in order if name in able), None)
        if chosen is None:
            return cls(spec, order, chosen, tuple(able), rejected, None)
        backend = registry.get(chosen)
        predicted = cost.predict(spec, materializes_scores=backend.capabilities.materializes_scores)
        return cls(spec, order, chosen, tuple(able), rejected, predicted, tuple(backend.notes(spec)))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, fit for JSON."""
        spec = {name: getattr(self.spec, name) for name in AttentionSpec.__dataclass_fields__}
        spec |= {name: str(spec[name]) for name in ("dtype", "device")}
        spec |= {name: spec[name] and str(spec[name]) for name in ("bias_dtype", "sinks_dtype")}
        spec["layout"] = asdict(self.spec.layout) if self.spec.layout else None
        return {
            "chosen": self.chosen,
            "order": list(self.order),
            "able": list(self.able),
            "rejected": {name: list(reasons) for name, reasons in self.rejected.items()},
            "cost": asdict(self.cost) if self.cost else None,
            "notes": list(self.notes),
            "spec": spec,
        }

    def rows(self) -> list[tuple[str, str, str]]:
        """Backend, verdict, reasons (a line each): the able ones first, each group in the order asked."""
        able = [(name, "chosen" if name == self.chosen else "could serve", "") for name in self.able]
        return able + [(name, "rejected", "\n".join(reasons)) for name, reasons in self.rejected.items()]

    def summary(self) -> str:
        """The call, the answer and the backend's notes, a line each."""
        if self.chosen is None or self.cost is None:
            return f"{described(self.spec)}\nno backend of {', '.join(self.order)} can serve this call"
        cost = self.cost
        amounts = f"{scaled(cost.flops)}FLOP, {scaled(cost.hbm_bytes)}B moved, {scaled(cost.extra_bytes)}B extra memory"
        return "\n".join([described(self.spec), f"{self.chosen} would run; predicted: {amounts}", *self.notes])

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=120).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(Text(self.summary()), rich_table(("backend", "verdict", "reasons"), self.rows()))


def described(spec: AttentionSpec) -> str:
    """A call in one line: sizes, dtype, device, then every option that is not the default."""
    parts = [
        f"q ({spec.batch}, {spec.q_heads}, {spec.q_len}, {spec.head_dim})",
        f"k ({spec.batch}, {spec.kv_heads}, {spec.kv_len}, {spec.head_dim})",
        f"v ({spec.batch}, {spec.kv_heads}, {spec.kv_len}, {spec.value_dim})",
        f"{_short(spec.dtype)} on {spec.device}",
    ]
    options = {
        "causal": spec.causal,
        f"align {spec.align}": spec.align,
        f"window {spec.window}": spec.window,
        f"mask {spec.mask}": spec.mask,
        f"bias {spec.bias} {_short(spec.bias_dtype)}": spec.bias,
        "segments": spec.segments,
        f"softcap {spec.softcap}": spec.softcap,
        f"sinks {_short(spec.sinks_dtype)}": spec.sinks_dtype,
        f"dropout {spec.dropout_p}": spec.dropout_p,
        "lse": spec.return_lse,
        "deterministic": spec.deterministic,
        f"gradient of {' '.join(spec.grads)}": spec.grads,
    }
    parts += [text for text, is_given in options.items() if is_given]
    if spec.layout is not None:
        blocks = spec.layout.full_blocks + spec.layout.partial_blocks
        parts.append(f"layout of {blocks} blocks {spec.layout.block_q} x {spec.layout.block_kv}")
    return ", ".join(parts)


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def scaled(amount: float) -> str:
    """`12300000` as `12.3 M`."""
    for unit in UNITS[:-1]:
        if abs(float(f"{amount:.3g}")) < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} {UNITS[-1]}"
