"""Workload: one problem to time, as a value: sizes, dtype, direction and how it is run. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attnzoo.cost import Cost
    from attnzoo.layout import BlockLayout
    from attnzoo.spec import Align, AttentionSpec

__all__ = ["CACHES", "CHOICES", "DIRECTIONS", "DTYPES", "LAUNCHES", "LAYOUTS", "Workload"]

DTYPES = ("float16", "bfloat16", "float32", "float64")
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
DIRECTIONS = ("forward", "backward", "both")
CACHES = ("warm", "cold")
LAUNCHES = ("eager", "graph")
LAYOUTS = ("random", "sliding_window", "butterfly", "causal")
CHOICES = {"dtype": DTYPES, "direction": DIRECTIONS, "cache": CACHES, "launch": LAUNCHES}
DEFAULT_BLOCK = 128
NUMERALS = frozenset("0123456789.e-+")
LARGEST = 2**59
"""Elements of a tensor; the bytes of one of them are counted in 64 bits."""


@dataclass(frozen=True)
class Workload:
    """What is timed.

    Attributes:
        batch, heads, kv_heads, length, kv_length, head_dim: sizes of q `(B, Hq, Sq, D)` and of k and v; stored as
            `(B, S, H, D)`, as models have them.
        dtype: of q, k and v.
        causal: bottom-right where the lengths differ.
        direction: "forward" (no gradient asked), "backward" (alone, its forward done) or "both".
        layout: empty, or a preset and its number: "random:0.25", "sliding_window:512", "butterfly", "causal".
        block: tokens a block of the layout.
        device: such as "cpu" or "cuda".
        cache: "warm" repeats the call at once; "cold" overwrites the last-level cache before each call.
        launch: "eager", or "graph": replays of a CUDA graph.
    """

    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    length: int = 1024
    kv_length: int = 1024
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = False
    direction: str = "forward"
    layout: str = ""
    block: int = DEFAULT_BLOCK
    device: str = "cpu"
    cache: str = "warm"
    launch: str = "eager"

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "length", "kv_length", "head_dim", "block"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; it takes a positive int")
        if type(self.causal) is not bool:
            raise ValueError(f"causal is {self.causal!r}; it takes a bool")
        for name in (*CHOICES, "layout", "device"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it takes a str")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it takes {', '.join(allowed)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}, not a divisor of the {self.heads} query heads")
        if self.batch * self.heads * max(self.length, self.kv_length) * self.head_dim > LARGEST:
            sizes = ", ".join(f"{name} {getattr(self, name)}" for name in ("batch", "heads", "length", "kv_length", "head_dim"))
            raise ValueError(f"a workload's sizes are {sizes}: more than a tensor can hold")
        if self.device.partition(":")[0] == "meta":
            raise ValueError(f"device is {self.device!r}, which computes nothing: there is no time to take")
        if self.launch == "graph" and not self.device.startswith("cuda"):
            raise ValueError(f"launch is 'graph', which is CUDA's, and the device is {self.device!r}")
        self._layout_parts()

    @property
    def id(self) -> str:
        """One word that says all, the same for equal workloads."""
        heads = f"h{self.heads}" + (f"kv{self.kv_heads}" if self.kv_heads != self.heads else "")
        length = f"s{self.length}" + (f"kv{self.kv_length}" if self.kv_length != self.length else "")
        extras = ["causal"] * self.causal
        if self.layout:
            extras.append(f"{self.layout}b{self.block}")
        sizes = (f"b{self.batch}", heads, length, f"d{self.head_dim}")
        return "-".join([self.direction, SHORT[self.dtype], *sizes, *extras, self.device, self.cache, self.launch])

    @property
    def family(self) -> str:
        """The workload without its lengths, batch and density: what one table or curve holds."""
        layout = self.layout.partition(":")[0]
        parts = [self.direction, SHORT[self.dtype], f"head dim {self.head_dim}", "causal" if self.causal else "all pairs"]
        parts += [f"{layout} layout of {self.block} x {self.block} blocks"] * bool(layout)
        parts += [f"{self.heads} heads over {self.kv_heads}"] * (self.kv_heads != self.heads)
        return ", ".join([*parts, self.device, f"{self.cache} cache", self.launch])

    @property
    def title(self) -> str:
        """Its lengths, batch and density: the row within its family."""
        length = str(self.length) if self.kv_length == self.length else f"{self.length} x {self.kv_length}"
        return " ".join([f"S {length}", f"B {self.batch}", f"H {self.heads}", *([self.layout] if self.layout else [])])

    def options(self) -> list[str]:
        """As `attnzoo bench` takes them."""
        names = {f.name: getattr(self, f.name) for f in fields(self)}
        del names["causal"], names["block"]
        given = [part for name, value in names.items() if value != "" for part in (f"--{name.replace('_', '-')}", str(value))]
        return [*given, "--causal" if self.causal else "--no-causal", *(["--block", str(self.block)] if self.layout else [])]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _layout_parts(self) -> tuple[str, float]:
        name, _, number = self.layout.partition(":")
        if self.layout and name not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}; it takes {', '.join(LAYOUTS)}, some with a number: random:0.25")
        if name == "random":
            density = _number_in(number)
            if not 0 <= density <= 1:  # nan too
                raise ValueError(f"layout is {self.layout!r}; random takes a share from 0 to 1, such as random:0.25")
            return name, density
        if name == "sliding_window":
            if not (number.isascii() and number.isdecimal()):
                raise ValueError(f"layout is {self.layout!r}; sliding_window takes a whole number of tokens, such as sliding_window:512")
            return name, float(number)
        if number:
            raise ValueError(f"layout is {self.layout!r}; {name} takes no number")
        return name, 0.0

    # With torch

    def tensors(self, device: str | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and a gradient of o, standard normal, seeded; gradients asked for unless only the forward is timed."""
        import torch

        place = torch.device(device or self.device)
        generator = None if place.type == "meta" else torch.Generator(place).manual_seed(0)

        def drawn(length: int, heads: int) -> Tensor:
            shape = (self.batch, length, heads, self.head_dim)
            wide = torch.float64 if self.dtype == "float64" else torch.float32
            made = torch.empty(shape, dtype=wide, device=place)
            if generator is not None:  # on meta there is nothing to draw, and the first normal_ there takes torch a second
                made.normal_(generator=generator)
            return made.to(getattr(torch, self.dtype)).transpose(1, 2)

        q, k, v = drawn(self.length, self.heads), drawn(self.kv_length, self.kv_heads), drawn(self.kv_length, self.kv_heads)
        grad_o = drawn(self.length, self.heads)
        for tensor in (q, k, v):
            tensor.requires_grad_(self.direction != "forward")
        return q, k, v, grad_o

    def block_layout(self, device: str | torch.device) -> BlockLayout | None:
        """The layout's tensors, the same on every device."""
        from attnzoo import layouts

        name, number = self._layout_parts()
        sizes = (self.length, self.kv_length)
        align: Align | None = "bottom_right" if self.length != self.kv_length else None
        makers: dict[str, Callable[[], BlockLayout]] = {
            "random": lambda: layouts.random(*sizes, density=number, block=self.block, device=device),
            "sliding_window": lambda: layouts.sliding_window(*sizes, window=int(number), block=self.block, align=align, device=device),
            "butterfly": lambda: layouts.butterfly(*sizes, block=self.block, device=device),
            "causal": lambda: layouts.causal(*sizes, block=self.block, align=align, device=device),
        }
        return makers[name]() if name else None

    def call_options(self) -> dict[str, Any]:
        """Of `attnzoo.attention`, less the layout."""
        align = {"align": "bottom_right"} if self.causal and self.length != self.kv_length else {}
        return {"causal": self.causal, **align}

    def spec(self) -> AttentionSpec:
        """The spec of the call; its tensors are not allocated."""
        import dataclasses

        import torch

        from attnzoo.spec import AttentionSpec

        q, k, v, _ = self.tensors("meta")
        layout = self.block_layout("cpu")
        spec = AttentionSpec.of(q, k, v, **self.call_options())
        return dataclasses.replace(spec, device=torch.device(self.device), layout=None if layout is None else layout.summary)

    def cost(self) -> Cost:
        """Useful FLOPs, compulsory bytes and extra memory of FlashAttention for what is timed."""
        import dataclasses

        from attnzoo.cost import Cost, predict

        spec = self.spec()
        whole = predict(spec, materializes_scores=False)
        if self.direction != "backward":
            return whole
        forward = predict(dataclasses.replace(spec, grads=()), materializes_scores=False)
        return Cost(whole.flops - forward.flops, whole.hbm_bytes - forward.hbm_bytes, whole.extra_bytes)


def _number_in(text: str) -> float:
    """Not a number where there is none, or one that a command line could not hold."""
    try:
        return float(text) if set(text) <= NUMERALS else float("nan")
    except ValueError:
        return float("nan")
