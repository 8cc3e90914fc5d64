"""Who takes part in `block_sparse_gpu.py compare`: each is `contender(pattern) -> attend(q, k, v)`, which gives o.

Tensors are `(1, heads, length, dim)`. Whatever a peer builds of a layout is built once, outside of what is timed. A contender
that can't take a pattern raises; what is raised becomes its reason in the results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch._functorch.config
from block_sparse_inputs import BLOCK, DEVICE, Pattern
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attnzoo
from attnzoo.layout import BlockLists
from attnzoo.layouts.convert import padded_lists

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Contender = Callable[[Pattern], Attend]


def ours(pattern: Pattern) -> Attend:
    return partial(attnzoo.get("block_sparse" if DEVICE == "cuda" else "tiled"), layout=pattern.layout)


# FlexAttention


@cache
def compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 1000  # beyond it flex falls back to its unfused path, and is no peer
    torch._functorch.config.donated_buffer = False  # else a backward can't run twice, and its forward would be timed with it
    return torch.compile(flex_attention, dynamic=False)


def flex(pattern: Pattern) -> Attend:
    from torch.nn.attention.flex_attention import BlockMask

    lists = padded_lists(pattern.layout)
    blocks = BlockMask.from_kv_blocks(
        lists.partial_counts,
        lists.partial_indices,
        lists.full_counts,
        lists.full_indices,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=pattern.mask_mod,
        seq_lengths=(pattern.layout.q_len, pattern.layout.kv_len),
    )
    return partial(compiled_flex(), block_mask=blocks)


# FlashAttention 4


def fa4(pattern: Pattern) -> Attend:
    """Its block-sparse kernels, the rule of partial blocks in its kernel language."""
    from flash_attn.cute import flash_attn_func

    forward, backward = fa4_lists(pattern)
    options: dict[str, Any] = {"block_sparse_tensors": forward, "block_sparse_tensors_bwd": backward}
    if pattern.mask_mod is not None:
        from fa4_masks import same_document, window_mask

        options["mask_mod"] = same_document if pattern.left is None else window_mask(pattern.left)
    if pattern.ids is not None:
        options["aux_tensors"] = [pattern.ids]
    return partial(in_rows, flash_attn_func, **options)


def fa4_native(pattern: Pattern) -> Attend:
    """Without lists of blocks: what its users would call for a window or for documents."""
    if pattern.mask_mod is None:
        raise NotImplementedError("no option of its own stands for this pattern")
    if pattern.left is not None:
        from flash_attn.cute import flash_attn_func

        return partial(in_rows, flash_attn_func, window_size=(pattern.left, 0))
    from flash_attn.cute import flash_attn_varlen_func

    assert pattern.ids is not None
    lengths = torch.bincount(pattern.ids)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return partial(in_rows, flash_attn_varlen_func, is_packed=True, **options)


def in_rows(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *, is_packed: bool = False, **options: Any) -> Tensor:
    """A function of `(1, length, heads, dim)`, or `(length, heads, dim)` if packed, that may give more than o."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if is_packed:
        q, k, v = q[0], k[0], v[0]
    found = function(q, k, v, **options)
    o: Tensor = found[0] if isinstance(found, tuple) else found
    return (o[None] if is_packed else o).transpose(1, 2)


def fa4_lists(pattern: Pattern) -> tuple[Any, Any]:
    """Its lists of the forward, over rows of blocks, and of the backward, over columns."""
    layout = pattern.layout
    rows = padded_lists(layout)
    full, partial_, _ = layout.transposed
    columns = [padded(lists, layout.rows) for lists in (partial_, full)]
    return (
        fa4_tensors((rows.partial_counts, rows.partial_indices), (rows.full_counts, rows.full_indices)),
        fa4_tensors(columns[0], columns[1]),
    )


def padded(lists: BlockLists, width: int) -> tuple[Tensor, Tensor]:
    """Counts `(1, 1, lines)` and indices `(1, 1, lines, width)` of lists of one batch and head."""
    line = lists.row_of_each()
    counts = lists.offsets.diff()
    table = lists.indices.new_zeros(len(counts), width)
    table[line, torch.arange(len(line), device=line.device) - lists.offsets.long()[line]] = lists.indices
    return counts[None, None], table[None, None]


def fa4_tensors(partial_blocks: tuple[Tensor, Tensor], full_blocks: tuple[Tensor, Tensor]) -> Any:
    from block_sparse_inputs import HEADS
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    wide = [t.expand(1, HEADS, *t.shape[2:]).contiguous() for t in (*partial_blocks, *full_blocks)]
    return BlockSparseTensorsTorch(*wide, block_size=(BLOCK, BLOCK))


SPARSE: dict[str, Contender] = {"block_sparse": ours, "fa4": fa4, "flex": flex, "fa4 native": fa4_native}


# Dense forwards, for what a share of blocks would ideally cost


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v)


def fa3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fa3_fwd_interface import flash_attn_func

    return in_rows(flash_attn_func, q, k, v)


def fa4_dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flash_attn.cute import flash_attn_func

    return in_rows(flash_attn_func, q, k, v)


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attnzoo.get("flash" if DEVICE == "cuda" else "tiled")(q, k, v)


DENSE: dict[str, Attend] = {"dense flash": flash, "dense cudnn": cudnn, "dense fa3": fa3, "dense fa4": fa4_dense}
