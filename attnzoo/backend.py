"""Backend: what a plugin implements. Capabilities: what it claims, and what the conformance kit tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo.inputs import AttentionInputs
from attnzoo.spec import AttentionSpec

__all__ = ["API_VERSION", "FEATURES", "Backend", "Capabilities", "features_of"]

API_VERSION = 1

FEATURES: dict[str, str] = {
    "causal": "causal=True, where q and k have one length",
    "top_left": "causal or window with align='top_left', where the lengths differ",
    "bottom_right": "causal or window with align='bottom_right', where the lengths differ",
    "window": "a bounded window",
    "mask": "a bool mask",
    "bias": "a bias that needs no gradient",
    "bias_grad": "the gradient of a bias",
    "segments": "segment_ids",
    "layout": "a block layout",
    "softcap": "softcap",
    "sinks": "sinks, and their gradient if backward",
    "dropout": "dropout by counter",
    "lse": "return_lse, and its gradient if backward",
    "deterministic": "deterministic=True",
    "grouped_heads": "fewer heads in k and v than in q",
    "value_dim": "a head dim of v that differs from that of q and k",
    "empty": "sizes of zero, head_dim 0 included",
    "double_backward": "second derivatives (backward only)",
}
"""Feature name -> what a call that needs it looks like."""


def features_of(spec: AttentionSpec) -> list[str]:
    """The features that a call needs, in the order of `FEATURES`."""
    needed = []
    if spec.causal and spec.align is None:
        needed.append("causal")
    if spec.align is not None:
        needed.append(spec.align)
    if spec.window is not None:
        needed.append("window")
    if spec.mask is not None:
        needed.append("mask")
    if spec.bias is not None:
        needed.append("bias")
        if "bias" in spec.grads:
            needed.append("bias_grad")
    if spec.segments:
        needed.append("segments")
    if spec.layout is not None:
        needed.append("layout")
    if spec.softcap is not None:
        needed.append("softcap")
    if spec.sinks_dtype is not None:
        needed.append("sinks")
    if spec.dropout_p:
        needed.append("dropout")
    if spec.return_lse:
        needed.append("lse")
    if spec.deterministic:
        needed.append("deterministic")
    if spec.q_heads != spec.kv_heads:
        needed.append("grouped_heads")
    if spec.value_dim != spec.head_dim:
        needed.append("value_dim")
    if spec.is_empty or not spec.head_dim:
        needed.append("empty")
    return needed


@dataclass(frozen=True)
class Capabilities:
    """What a backend claims: each claim must pass the conformance kit, everything else must be refused.

    Attributes:
        devices: device types, such as "cpu" and "cuda"; empty means any.
        dtypes: dtypes of q, k and v.
        head_dims: smallest and largest D and Dv.
        head_dim_multiple: D and Dv are multiples of it, as both of `head_dims` are.
        block_multiple: the sides of a layout's blocks are multiples of it, in tokens.
        forward, backward: features (keys of `FEATURES`) served without and with a gradient.
        materializes_scores: keeps `Sq x Skv` matrices in memory (the cost model's question).
        gradients: whether any call with a gradient is served; False refuses them all, and `backward` stays empty.
    """

    devices: Set[str] = frozenset()
    dtypes: Set[torch.dtype] = frozenset()
    head_dims: tuple[int, int] = (1, 256)
    forward: Set[str] = frozenset()
    backward: Set[str] = frozenset()
    materializes_scores: bool = False
    gradients: bool = True
    head_dim_multiple: int = 1
    block_multiple: int = 1

    def __post_init__(self) -> None:
        for name, kind in (("devices", str), ("dtypes", torch.dtype), ("forward", str), ("backward", str)):
            object.__setattr__(self, name, _frozen(name, getattr(self, name), kind))
        if not _is_pair_of_ints(self.head_dims):
            raise TypeError(f"head_dims is {self.head_dims!r}; it takes (smallest, largest), two ints")
        for name in ("head_dim_multiple", "block_multiple"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise TypeError(f"{name} is {getattr(self, name)!r}; it takes an int, 1 or more")
        if any(dim % self.head_dim_multiple for dim in self.head_dims):
            raise ValueError(f"head_dims is {self.head_dims}; with head_dim_multiple {self.head_dim_multiple} both are multiples of it")
        if self.backward and not self.gradients:
            raise ValueError(f"backward claims {sorted(self.backward)}, but gradients is False: no call with one is served")
        unknown = sorted((self.forward | self.backward) - FEATURES.keys())
        if unknown:
            raise ValueError(f"unknown features {unknown}; attnzoo.backend.FEATURES lists them all: {sorted(FEATURES)}")

    def reasons_against(self, spec: AttentionSpec) -> list[str]:
        """Every claim that the call goes beyond, each with what was found and what is allowed."""
        reasons = []
        if self.devices and spec.device.type not in self.devices:
            reasons.append(f"device is {spec.device}, it takes {_listed(self.devices)}")
        if spec.dtype not in self.dtypes:
            reasons.append(f"dtype is {_short(spec.dtype)}, it takes {_listed(map(_short, self.dtypes))}")
        smallest, largest = self.head_dims
        for name, dim in (("head_dim", spec.head_dim), ("value_dim", spec.value_dim)):
            if dim and not smallest <= dim <= largest:
                reasons.append(f"{name} is {dim}, it takes {smallest} to {largest}")
            elif dim % self.head_dim_multiple:
                reasons.append(f"{name} is {dim}, it takes multiples of {self.head_dim_multiple}")
        if spec.layout is not None and (spec.layout.block_q % self.block_multiple or spec.layout.block_kv % self.block_multiple):
            found = f"{spec.layout.block_q} x {spec.layout.block_kv}"
            reasons.append(f"the layout's blocks are {found}, it takes multiples of {self.block_multiple}")
        has_backward = bool(spec.grads) and self.gradients
        if spec.grads and not self.gradients:
            reasons.append(f"a gradient of {', '.join(spec.grads)} is asked for, it has no backward")
        served = self.backward if has_backward else self.forward
        for feature in features_of(spec):
            if feature not in served:
                only_forward = " with a gradient, only without" if feature in self.forward else ""
                reasons.append(f"{feature} ({FEATURES[feature]}) is not supported{only_forward}")
        return reasons

    def nearest_head_dim(self, dim: int) -> int:
        """The claimed head dim that is nearest to this one; the next larger one where there is a choice."""
        smallest, largest = self.head_dims
        return min(max(-(-dim // self.head_dim_multiple) * self.head_dim_multiple, smallest), largest)


def _frozen(name: str, claims: object, kind: type) -> frozenset[object]:
    if isinstance(claims, str) or not isinstance(claims, Iterable):
        raise TypeError(f"{name} is {claims!r}; it takes a set, each a {kind.__name__}")
    for claim in claims:
        if not isinstance(claim, kind):
            raise TypeError(f"{name} holds {claim!r}, a {type(claim).__name__}; each takes a {kind.__name__}")
    return frozenset(claims)


def _is_pair_of_ints(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(number) is int for number in value)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: object) -> str:
    return ", ".join(sorted(names))  # type: ignore[call-overload]


class Backend(ABC):
    """One way to compute attention. Subclass it, set `name` and `capabilities`, write `attend`.

    Attributes:
        name: as its entry point declares it.
        api_version: of this interface; attnzoo refuses any other.
        capabilities: what it claims.
    """

    name: str
    api_version: int = API_VERSION
    capabilities: Capabilities

    def capabilities_on(self, device: str) -> Capabilities:
        """What it claims on one type of device, such as "cuda": part of `capabilities`, or all of it, which is the default."""
        return self.capabilities

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        """Why this backend can't serve the call: all reasons, each with what was found and what is allowed.

        Decides from metadata alone. Empty means that `attend` gives the right answer. A subclass with rules
        beyond its capabilities extends this list.
        """
        return self.capabilities_on(spec.device.type).reasons_against(spec)

    def notes(self, spec: AttentionSpec) -> list[str]:
        """How this backend would serve a call that it has no reasons against, such as by which kernel; for `explain`."""
        return []

    @abstractmethod
    def attend(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        """Compute a call that has no reasons against it; owns its autograd.

        Returns:
            `o`, `(B, Hq, Sq, Dv)` in the spec's dtype, and the lse, `(B, Hq, Sq)` in fp32 (fp64 for fp64),
            where the spec asks for it, else None.
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"
