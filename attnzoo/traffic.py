"""Where the bytes go: what each kernel of a call moves between the multiprocessors and L2, from its real tiles.

A kernel keeps one tile on chip while the other operand's rows stream past it. Each row of the kept tile is moved once;
each streamed row once for every kept tile that meets it: `N^2 / block` rows a head, which is the paper's Theta(N^2 d^2 / M)
with M the tile (Dao et al., "FlashAttention", arXiv 2205.14135). What of it comes from device memory depends on
the cache: at least the compulsory bytes of `cost.predict`, at most all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnzoo.cost import predict
from attnzoo.spec import AttentionSpec
from attnzoo.streamed import keys_streamed, queries_streamed

__all__ = ["HOPPER", "Step", "Traffic", "of_kernels", "of_paper", "of_standard", "reasons_against_kernels"]

CPU = torch.device("cpu")
HOPPER = (9, 0)
FP32 = 4
WIDEST = 256  # head dims of our kernels
MASK_AND_DROPOUT = 10
"""Further passes over the scores where the mask and dropout are steps of their own, a byte of dropout's mask counted half."""


@dataclass(frozen=True)
class Step:
    """One kernel, or one step of standard attention.

    Attributes:
        name: of the step.
        tile: `(queries, keys)` on chip at a time; None for a step over whole matrices.
        read, written: bytes from and to L2.
    """

    name: str
    tile: tuple[int, int] | None
    read: int
    written: int

    @property
    def moved(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class Traffic:
    """A call, its backward included where gradients are asked for.

    Attributes:
        name: of the algorithm.
        flops: of its matrix products, recomputation included.
        steps: in the order in which they run.
        compulsory: bytes that must come from or go to device memory, however large the cache.
        extra: memory beyond inputs, output and gradients.
    """

    name: str
    flops: int
    steps: tuple[Step, ...]
    compulsory: int
    extra: int

    @property
    def moved(self) -> int:
        """Bytes between the multiprocessors and L2: what device memory moves where nothing stays in the cache."""
        return sum(step.moved for step in self.steps)


def of_standard(spec: AttentionSpec, *, has_mask_and_dropout: bool = False) -> Traffic:
    """The three steps, their matrices in device memory in the dtype of q.

    Args:
        has_mask_and_dropout: as passes of their own over the scores, as the paper's baseline has them.
    """
    item = spec.dtype.itemsize
    rows = spec.batch * spec.q_heads
    scores = rows * spec.q_len * spec.kv_len * item
    q, o = (rows * spec.q_len * dim * item for dim in (spec.head_dim, spec.value_dim))
    k, v = (rows * spec.kv_len * dim * item for dim in (spec.head_dim, spec.value_dim))  # read once a query head
    steps = [Step("S = Q K^T", None, q + k, scores), Step("P = softmax(S)", None, scores, scores), Step("O = P V", None, scores + v, o)]
    if spec.grads:
        steps += [
            Step("dV = P^T dO", None, scores + o, v),
            Step("dP = dO V^T", None, o + v, scores),
            Step("dS of P and dP", None, 2 * scores, scores),
            Step("dQ = dS K", None, scores + k, q),
            Step("dK = dS^T Q", None, scores + q, k),
        ]
    if has_mask_and_dropout:
        passes = MASK_AND_DROPOUT if spec.grads else MASK_AND_DROPOUT // 2
        steps.append(Step("mask and dropout", None, passes * scores // 2, passes * scores // 2))
    products = 6 if spec.grads else 2
    pairs = rows * spec.q_len * spec.kv_len
    flops = pairs * (spec.head_dim + spec.value_dim) * products
    cost, flash = (predict(spec, materializes_scores=materializes) for materializes in (True, False))
    return Traffic("standard", flops, tuple(steps), flash.hbm_bytes, cost.extra_bytes * item // spec.accumulator_dtype.itemsize)


def of_paper(spec: AttentionSpec, block_kv: int) -> Traffic:
    """FlashAttention as the paper states it: key blocks outside, so that q, o and their statistics pass once a key block."""
    item = spec.dtype.itemsize
    rows = spec.batch * spec.q_heads
    blocks = -(-spec.kv_len // block_kv)
    q, o = (rows * spec.q_len * dim * item for dim in (spec.head_dim, spec.value_dim))
    k, v = (rows * spec.kv_len * dim * item for dim in (spec.head_dim, spec.value_dim))
    statistics = 2 * rows * spec.q_len * FP32  # m and l
    tile = (block_kv, block_kv)
    steps = [Step("algorithm 1", tile, k + v + blocks * (q + o + statistics), blocks * (o + statistics))]
    if spec.grads:
        read = k + v + blocks * (q + 2 * o + q + statistics)  # q, o, dO, dQ
        steps.append(Step("algorithm 4", tile, read, k + v + blocks * q))
    cost = predict(spec, materializes_scores=False)
    return Traffic("the paper's", _flash_flops(spec), tuple(steps), cost.hbm_bytes, cost.extra_bytes)


def of_kernels(spec: AttentionSpec, capability: tuple[int, int] = HOPPER, *, portable: bool = False) -> Traffic:
    """Our kernels: those that `flash`, and with a layout `block_sparse`, run on a card of that capability.

    A backward is counted as that of q, k and v, whatever of them needs a gradient.

    Args:
        portable: the Triton kernels also where those of Hopper could serve; on the card a forward that keeps too little of it
            busy runs them too (`flash.is_small`), which depends on its processors and is not asked here.

    Raises:
        ValueError: no kernel of ours takes such a call: `reasons_against_kernels`.
    """
    reasons = reasons_against_kernels(spec)
    if reasons:
        raise ValueError("; ".join(reasons))
    has_hopper = capability == HOPPER and not portable
    steps = [_hopper_forward(spec) if has_hopper and _takes(spec, "forward") else _triton_forward(spec, capability)]
    if spec.grads:
        steps += _hopper_backward(spec) if has_hopper and _takes(spec, "backward") else _triton_backward(spec, capability)
    cost = predict(spec, materializes_scores=False)
    extra = cost.extra_bytes if spec.grads else _rows(spec) * FP32
    name = "flash" if spec.layout is None else "block_sparse"
    return Traffic(name, _flash_flops(spec), tuple(steps), cost.hbm_bytes, extra)


def reasons_against_kernels(spec: AttentionSpec) -> list[str]:
    """Why there is no tile to count by; empty where there is one."""
    dims = {name: dim for name, dim in (("head_dim", spec.head_dim), ("value_dim", spec.value_dim)) if dim > WIDEST}
    reasons = [f"{name} is {dim}, our kernels take at most {WIDEST}" for name, dim in dims.items()]
    if spec.dtype.itemsize > FP32:
        reasons.append(f"dtype is {str(spec.dtype).removeprefix('torch.')}, our kernels take float16, bfloat16 and float32")
    return reasons


def _flash_flops(spec: AttentionSpec) -> int:
    return predict(spec, materializes_scores=False).flops


def _takes(spec: AttentionSpec, name: str) -> bool:
    """Whether the Hopper kernel takes the call, wherever that is asked: this machine's own reasons don't count. name: "forward" or
    "backward"."""
    from attnzoo.backends.flash import reasons_against_hopper
    from attnzoo.backends.hopper.support import machine_reasons
    from attnzoo.backends.hopper_sparse.support import reasons_against

    here = replace(spec, device=CPU)
    reasons = reasons_against_hopper(here, name, "hopper") if spec.layout is None else reasons_against(here, name)
    return set(reasons) <= set(machine_reasons(CPU))


def _rows(spec: AttentionSpec) -> int:
    return spec.batch * spec.q_heads * spec.q_len


def _hopper_forward(spec: AttentionSpec) -> Step:
    from attnzoo.backends.hopper.tiles import forward_tile_of

    if spec.layout is not None:
        tile = (128, 128 if spec.layout.block_kv % 128 == 0 else 64)
        return _forward(spec, "block_sparse forward (Hopper)", tile)
    chosen = forward_tile_of(spec)
    return _forward(spec, "flash forward (Hopper)", (chosen.block_q, chosen.block_kv))


def _triton_forward(spec: AttentionSpec, capability: tuple[int, int]) -> Step:
    return _forward(spec, "forward (Triton)", _triton_tile(spec, "forward", capability))


def _forward(spec: AttentionSpec, name: str, tile: tuple[int, int]) -> Step:
    item = spec.dtype.itemsize
    streamed = keys_streamed(spec, *tile) * (spec.head_dim + spec.value_dim) * item
    return Step(name, tile, _rows(spec) * spec.head_dim * item + streamed, _rows(spec) * (spec.value_dim * item + FP32))


def _statistics(spec: AttentionSpec) -> Step:
    """delta = rowsum(dO * O), beside the lse."""
    item = spec.dtype.itemsize
    return Step("delta", None, _rows(spec) * (2 * spec.value_dim * item + FP32), _rows(spec) * 2 * FP32)


def _hopper_backward(spec: AttentionSpec) -> list[Step]:
    """One pass over the keys; dQ leaves as fp32, added up in L2, and is rounded by a kernel of its own."""
    from attnzoo.backends.hopper.tiles import backward_tile, padded_head_dim

    chosen = backward_tile(padded_head_dim(spec.head_dim))
    tile = (chosen.block_q, chosen.block_kv)
    keys = _backward_keys(spec, "backward (Hopper)", tile)
    added = queries_streamed(spec, *tile) * padded_head_dim(spec.head_dim) * FP32
    rounded = Step("dQ rounded", None, _rows(spec) * spec.head_dim * FP32, _rows(spec) * spec.head_dim * spec.dtype.itemsize)
    return [_statistics(spec), replace(keys, written=keys.written + added), rounded]


def _triton_backward(spec: AttentionSpec, capability: tuple[int, int]) -> list[Step]:
    """A kernel over the keys for dK and dV, and one over the queries for dQ: no atomics."""
    item = spec.dtype.itemsize
    keys = _backward_keys(spec, "dK and dV (Triton)", _triton_tile(spec, "backward_keys", capability))
    tile = _triton_tile(spec, "backward_queries", capability)
    kept = _rows(spec) * ((spec.head_dim + spec.value_dim) * item + 2 * FP32)
    read = kept + keys_streamed(spec, *tile) * (spec.head_dim + spec.value_dim) * item
    return [_statistics(spec), keys, Step("dQ (Triton)", tile, read, _rows(spec) * spec.head_dim * item)]


def _backward_keys(spec: AttentionSpec, name: str, tile: tuple[int, int]) -> Step:
    item = spec.dtype.itemsize
    keys = spec.batch * spec.kv_heads * spec.kv_len * (spec.head_dim + spec.value_dim) * item
    streamed = queries_streamed(spec, *tile) * ((spec.head_dim + spec.value_dim) * item + 2 * FP32)
    return Step(name, tile, keys + streamed, keys)


def _triton_tile(spec: AttentionSpec, kernel: str, capability: tuple[int, int]) -> tuple[int, int]:
    from attnzoo.backends.triton.table import tile_for

    is_featured = spec.mask is not None or spec.bias is not None or spec.dropout_p > 0.0
    tile = tile_for(kernel, spec.head_dim, spec.value_dim, spec.dtype, capability, is_featured)
    if spec.layout is None:
        return tile.block_m, tile.block_n
    return min(tile.block_m, spec.layout.block_q), min(tile.block_n, spec.layout.block_kv)
