"""What the kernels over a layout share: which blocks a tile walks, and which pairs of a partial block attend.

`lists` is `(full offsets, full indices, partial offsets, partial indices, order, places)` of the rows of blocks or, in a
walk over queries, of the columns of blocks: `order` gives each head's lines, the longest first, and `places` where each
partial block stands in the packed bits (None where that is its own place). `shape` is
`(lines a head, stride of a batch, stride of a head)` of the lists' lines.

A tile is walked in two parts. The first takes the blocks whose pairs must be tested: the partial ones, and the full ones on
the edges of the call's band and at the tail. The second takes the other full blocks and tests nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.backends.triton.tiles import ROW_PADDING


@triton.jit
def own_tile(program, lists, shape, heads, total_heads, wave, length, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Of a program: batch, head, its line's place in the lists, and its tile: first position, end, and place in the block.

    `wave` heads at a time, so that what they walk stays in L2; within them the lines with most blocks go first.
    """
    TILES: tl.constexpr = (BLOCK + TILE - 1) // TILE
    lines, batch_stride, head_stride = shape
    per_wave = lines * TILES * wave
    first_head = program // per_wave * wave
    width = tl.minimum(total_heads - first_head, wave)
    within = program % per_wave
    flat = first_head + within % width
    batch, head = flat // heads, flat % heads
    first_line = batch * batch_stride + head * head_stride
    turn = within // width
    block = tl.load(lists[4] + first_line + turn // TILES)
    batch, head, tile, line = batch.to(tl.int64), head.to(tl.int64), turn % TILES, first_line + block
    return batch, head, line, block * BLOCK + tile * TILE, tl.minimum(length, (block + 1) * BLOCK), tile * TILE


@triton.jit
def first_from(indices_ptr, low, high, block):
    """Where in low..high the blocks from `block` on begin; they ascend."""
    while low < high:
        middle = (low + high) // 2
        is_less = tl.load(indices_ptr + middle) < block
        low = tl.where(is_less, middle + 1, low)
        high = tl.where(is_less, high, middle)
    return low


@triton.jit
def walk_of(lists, line, bounds, STEP: tl.constexpr, EDGES: tl.constexpr, FREE: tl.constexpr):
    """The walk of a line: `(partial, partials, left, lefts, right, tested, free, frees)`.

    Blocks to be tested: `partials` partial ones from entry `partial` on, `lefts` full ones from `left` on, and from
    `right` on as many as make `tested` of them all. Then `frees` full ones from entry `free` on, untested. `bounds`
    (start, free_start, free_stop, stop) in positions, multiples of STEP but for the last, count where EDGES.
    """
    partial = tl.load(lists[2] + line)
    partial_end = tl.load(lists[2] + line + 1)
    full = tl.load(lists[0] + line)
    full_end = tl.load(lists[0] + line + 1)
    free = full
    free_end = full_end
    if EDGES:
        last = tl.cdiv(bounds[3], STEP)
        partial = first_from(lists[3], partial, partial_end, bounds[0] // STEP)
        partial_end = first_from(lists[3], partial, partial_end, last)
        full = first_from(lists[1], full, full_end, bounds[0] // STEP)
        full_end = first_from(lists[1], full, full_end, last)
        free = full
        free_end = full_end
        if FREE:
            free = first_from(lists[1], full, full_end, bounds[1] // STEP)
            free_end = first_from(lists[1], free, full_end, bounds[2] // STEP)
    if not FREE:
        free = full_end
        free_end = full_end
    partials = partial_end - partial
    lefts = free - full
    return partial, partials, full, lefts, free_end, partials + lefts + full_end - free_end, free, free_end - free


@triton.jit
def tested_block(lists, walk, entry):
    """Block number of an entry of the part that is tested, whether it is partial, and its place in the packed bits."""
    partial, partials, left, lefts, right, _, _, _ = walk
    is_partial = entry < partials
    after = entry - partials
    full = tl.where(after < lefts, left + after, right + after - lefts)
    block = tl.load(lists[3] + partial + entry, mask=is_partial, other=0) + tl.load(lists[1] + full, mask=is_partial == 0, other=0)
    place = partial + entry
    if lists[5] is not None:
        place = tl.load(lists[5] + place, mask=is_partial, other=0)
    return block, is_partial, place


@triton.jit
def streamed_tile(lists, walk, step, length, TESTED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The tile of a step of a walk, in blocks that are tested or in the free ones: first position, end, and place in the block.

    Then, of a tested block, whether it is partial, and its place in the packed bits.
    """
    TILES: tl.constexpr = (BLOCK + TILE - 1) // TILE
    if TESTED:
        block, is_partial, place = tested_block(lists, walk, step // TILES)
    else:
        block, is_partial, place = tl.load(lists[1] + walk[6] + step // TILES), False, 0
    within = step % TILES * TILE
    return block * BLOCK + within, tl.minimum(length, (block + 1) * BLOCK), within, is_partial, place


@triton.jit
def find_block(lists, line, block):
    """Whether the line holds the block, whether as a partial one, and its place among those."""
    full_end = tl.load(lists[0] + line + 1)
    full = first_from(lists[1], tl.load(lists[0] + line), full_end, block)
    is_full = tl.load(lists[1] + full, mask=full < full_end, other=-1) == block
    partial_end = tl.load(lists[2] + line + 1)
    partial = first_from(lists[3], tl.load(lists[2] + line), partial_end, block)
    is_partial = tl.load(lists[3] + partial, mask=partial < partial_end, other=-1) == block
    return is_full | is_partial, is_partial, partial


@triton.jit
def bits_tile(
    bits_ptr, place, is_partial, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):
    """The packed bits `(BLOCK_M, BLOCK_N)` of a partial block from its element (row, column) on; False beyond the block."""
    WORDS: tl.constexpr = (BLOCK_KV + 31) // 32
    rows = (row + tl.arange(0, BLOCK_M))[:, None]
    pointer = bits_ptr + place.to(tl.int64) * (BLOCK_Q * WORDS)
    if BLOCK_N % 32 == 0:
        columns = (column // 32 + tl.arange(0, BLOCK_N // 32))[None, :]
        words = tl.load(pointer + rows * WORDS + columns, mask=(rows < BLOCK_Q) & (columns < WORDS) & is_partial, other=0)
        spread = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        return tl.reshape(spread, [BLOCK_M, BLOCK_N]) != 0
    columns = (column + tl.arange(0, BLOCK_N))[None, :]
    words = tl.load(pointer + rows * WORDS + columns // 32, mask=(rows < BLOCK_Q) & (columns < BLOCK_KV) & is_partial, other=0)
    return ((words >> (columns % 32)) & 1) != 0


@triton.jit
def rule_scores(
    s,
    i,
    j,
    batch,
    lengths,
    rule,
    place,
    is_partial,
    row,
    column,
    end,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """Scores of a tile of a block, full ones included, -inf where the layout leaves a pair out and from key `end` on.

    (row, column) is where in the block the tile begins; `end` is None where no key needs that test. `rule` is
    `(bits, low, high, q ids, stride of their batches, kv ids, stride)`, absent parts None; the band keeps
    `low <= j - i <= high`. i and j are index tiles that broadcast to the tile's shape, `(keys, queries)` if KEYS_FIRST.
    """
    ROWS: tl.constexpr = s.shape[1 if KEYS_FIRST else 0]
    COLUMNS: tl.constexpr = s.shape[0 if KEYS_FIRST else 1]
    bits_ptr, low, high, q_ids, q_batch, kv_ids, kv_batch = rule
    kept = j < lengths[1]
    if low is not None:
        kept = kept & (j - i >= low)
    if high is not None:
        kept = kept & (j - i <= high)
    if q_ids is not None:
        q_id = tl.load(q_ids + batch * q_batch + i, mask=i < lengths[0], other=0)
        kv_id = tl.load(kv_ids + batch * kv_batch + j, mask=j < lengths[1], other=0)
        if q_id.dtype != kv_id.dtype:  # int8 and uint8 would be compared bit by bit
            q_id = q_id.to(tl.int64)
            kv_id = kv_id.to(tl.int64)
        kept = kept & (q_id == kv_id)
    if bits_ptr is not None:
        bits = bits_tile(bits_ptr, place, is_partial, row, column, ROWS, COLUMNS, BLOCK_Q, BLOCK_KV)
        kept = kept & (tl.trans(bits) if KEYS_FIRST else bits)
    kept = kept | (is_partial == 0)
    if end is not None:
        kept = kept & (j < end)
    return tl.where(kept, s, -float("inf"))


@triton.constexpr_function
def leaves_block(BLOCK_M, BLOCK_Q):
    """Whether a tile's rows, or those of its statistics' padding, may lie in the next block."""
    return ROW_PADDING % BLOCK_Q != 0 or BLOCK_Q % BLOCK_M != 0
