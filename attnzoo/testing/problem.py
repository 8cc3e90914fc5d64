"""Problem: one attention problem as a value: sizes, options, and how its inputs are made. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["BROADCASTS", "DTYPES", "Blocks", "Problem", "Segments", "Sinks", "Table", "short_dtype"]

DTYPES = ("float16", "bfloat16", "float32", "float64")
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def short_dtype(dtype: str) -> str:
    """`float16` as `fp16`, for test ids."""
    return SHORT[dtype]


class Printable:
    """A frozen dataclass whose repr leaves out what has its default value, so that it fits on a line."""

    def __repr__(self) -> str:
        given = [f for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"


BROADCASTS = (
    "bhqk",
    "1hqk",
    "b1qk",
    "11qk",
    "bh1k",
    "1h1k",
    "b11k",
    "111k",
    "bhq1",
    "1hq1",
    "b1q1",
    "11q1",
    "bh11",
    "1h11",
    "b111",
    "1111",
    "qk",
    "q1",
    "1k",
    "11",
)
"""Every way in which a mask or bias may broadcast, as `Table.dims` spells it."""


@dataclass(frozen=True, repr=False)
class Table(Printable):
    """A mask or a bias.

    Attributes:
        kind: a key of `tables.MASKS` or `tables.BIASES`.
        dims: which dims are full, in order, "1" where the table is broadcast: "bhqk", "1h1k", "qk" (2 dims).
        size: what the kind takes: a number of keys, a constant.
        storage: a key of `storage.STORAGES`.
        dtype: of a bias; None is the dtype of q.
    """

    kind: str = "random"
    dims: str = "bhqk"
    size: float = 0
    storage: str = "contiguous"
    dtype: str | None = None


@dataclass(frozen=True, repr=False)
class Segments(Printable):
    """Segment ids: `kind` is a key of `tables.SEGMENTS`, `dtype` an integer dtype, `storage` a key of `storage.STORAGES`."""

    kind: str = "documents"
    dtype: str = "int64"
    storage: str = "contiguous"


@dataclass(frozen=True, repr=False)
class Blocks(Printable):
    """A block layout: `kind` is a key of `blocks.LAYOUTS`; `dims` says whether it differs by batch ("b1"), head
    ("1h"), both ("bh") or not at all ("11")."""

    kind: str = "random"
    block: tuple[int, int] = (16, 16)
    dims: str = "11"


@dataclass(frozen=True, repr=False)
class Sinks(Printable):
    """Sink logits: `kind` is a key of `tables.SINKS`; dtype None is the dtype of q; `storage` is a key of `storage.STORAGES`."""

    kind: str = "random"
    dtype: str | None = None
    storage: str = "contiguous"


@dataclass(frozen=True, repr=False)
class Problem(Printable):
    """Everything that a call depends on. Equal problems give equal tensors, bit for bit, on any device.

    Attributes:
        batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim: sizes; kv_heads, kv_len and value_dim
            default to those of q.
        dtype: of q, k and v.
        causal, align, window, scale, softcap, dropout_p, return_lse, deterministic: as in the call.
        dropout_seed: as in the call; as_tensor_seed passes it as a tensor.
        mask, bias, segments, layout, sinks: how they are made; None if not given.
        values: how q, k and v are drawn, a key of `inputs.VALUES`; `shift` is added to every score through
            an extra channel.
        storage: of q, k and v, keys of `storage.STORAGES`; `offset` is their storage offset in elements.
        grads: which of q, k, v, bias, sinks need a gradient.
        loss: which outputs the loss reads: "o", "lse" or "o+lse".
        grad_storage, lse_grad_storage: of the gradients of o and lse, keys of `storage.STORAGES` or of `inputs.GRADIENTS`.
        seed: of every random number.
    """

    batch: int = 2
    q_heads: int = 2
    kv_heads: int | None = None
    q_len: int = 33
    kv_len: int | None = None
    head_dim: int = 32
    value_dim: int | None = None
    dtype: str = "float32"
    causal: bool = False
    align: str | None = None
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    as_tensor_seed: bool = False
    return_lse: bool = False
    deterministic: bool = False
    mask: Table | None = None
    bias: Table | None = None
    segments: Segments | None = None
    layout: Blocks | None = None
    sinks: Sinks | None = None
    values: str = "normal"
    shift: float = 0.0
    storage: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    offset: int = 0
    grads: tuple[str, ...] = ("q", "k", "v")
    loss: str = "o"
    grad_storage: str = "contiguous"
    lse_grad_storage: str = "contiguous"
    seed: int = 0

    @property
    def k_heads(self) -> int:
        return self.q_heads if self.kv_heads is None else self.kv_heads

    @property
    def k_len(self) -> int:
        return self.q_len if self.kv_len is None else self.kv_len

    @property
    def v_dim(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def sizes(self) -> dict[str, int]:
        """The full dims of the score matrix, by letter."""
        return {"b": self.batch, "h": self.q_heads, "q": self.q_len, "k": self.k_len}

    @property
    def features(self) -> tuple[str, ...]:
        """The features of `attnzoo.backend.FEATURES` that the problem needs, in that order."""
        banded = self.causal or self.window is not None
        is_skewed = self.q_len != self.k_len
        empty = not all((self.batch, self.q_heads, self.q_len, self.k_len, self.v_dim, self.head_dim))
        needed = {
            "causal": self.causal and not is_skewed,
            "top_left": banded and is_skewed and self.align == "top_left",
            "bottom_right": banded and is_skewed and self.align == "bottom_right",
            "window": self.window not in (None, (None, None)),
            "mask": self.mask is not None,
            "bias": self.bias is not None,
            "bias_grad": "bias" in self.grads,
            "segments": self.segments is not None,
            "layout": self.layout is not None,
            "softcap": self.softcap is not None,
            "sinks": self.sinks is not None,
            "dropout": self.dropout_p > 0,
            "lse": self.return_lse,
            "deterministic": self.deterministic,
            "grouped_heads": self.q_heads != self.k_heads,
            "value_dim": self.v_dim != self.head_dim,
            "empty": empty,
        }
        return tuple(name for name, is_needed in needed.items() if is_needed)

    def reproduction(self, backend: str, check: str = "accuracy", device: str = "cpu") -> str:
        """A command line that runs one check of this problem on one backend."""
        return f'python -m attnzoo.testing --backend {backend} --device {device} --check {check} "{self!r}"'
