"""Explanation: the value that `explain` returns, printable as a table."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from attnzoo import cost
from attnzoo.errors import UnknownBackendError
from attnzoo.registry import Registry, reasons_against
from attnzoo.spec import AttentionSpec

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
    """

    spec: AttentionSpec
    order: tuple[str, ...]
    chosen: str | None
    able: tuple[str, ...]
    rejected: Mapping[str, tuple[str, ...]]
    cost: cost.Cost | None

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
        predicted = None
        if chosen is not None:
            materializes = registry.get(chosen).capabilities.materializes_scores
            predicted = cost.predict(spec, materializes_scores=materializes)
        return cls(spec, order, chosen, tuple(able), rejected, predicted)

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
            "spec": spec,
        }

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=100).print(self)
        return out.getvalue().rstrip()

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table("backend", "verdict", "why", title=self._title(), title_justify="left")
        for name in self.able:
            table.add_row(name, "chosen" if name == self.chosen else "could serve", "")
        for name, reasons in self.rejected.items():
            table.add_row(name, "rejected", "\n".join(reasons))
        return table

    def _title(self) -> str:
        spec = self.spec
        sizes = f"q ({spec.batch}, {spec.q_heads}, {spec.q_len}, {spec.head_dim}), kv heads {spec.kv_heads}, kv length {spec.kv_len}"
        call = f"{sizes}, {str(spec.dtype).removeprefix('torch.')} on {spec.device}"
        if self.cost is None:
            return f"{call}\nno backend of {', '.join(self.order)} can serve this call"
        amounts = f"{scaled(self.cost.flops)}FLOP, {scaled(self.cost.hbm_bytes)}B moved, {scaled(self.cost.extra_bytes)}B extra memory"
        return f"{call}\n{self.chosen} would run; predicted: {amounts}"


def scaled(amount: float) -> str:
    """`12300000` as `12.3 M`."""
    for unit in UNITS[:-1]:
        if abs(amount) < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} {UNITS[-1]}"
