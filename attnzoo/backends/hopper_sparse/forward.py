"""Block-sparse attention forward for Hopper: the dense kernel's schedule over the blocks of each row.

Producer, consumers, ring of stages and the persistent walk are those of `hopper.forward`. A row's blocks are one list:
those whose pairs must be tested come first, then the others in a loop without a test, and the pipeline runs across the seam.
A row without a block loads one and tests all of it away, so that no tile is empty.
"""

from attnzoo.backends.hopper.barriers import EMPTY_FIRST, EMPTY_SECOND, TURN, barrier_arrive
from attnzoo.backends.hopper.facts import allocate_facts, fact_at, put_facts
from attnzoo.backends.hopper.names import gl, gluon, mbarrier, tma_store_wait, warpgroup_mma, warpgroup_mma_wait
from attnzoo.backends.hopper.products import issue_scores
from attnzoo.backends.hopper.softmax import LN2, LOG2E, by_row, partial_sums, pivot_of
from attnzoo.backends.hopper.stages import allocate, barriers, drain, load_block, load_queries, release, store_output, wait_for

# What the producer tells of a tile: first row (-1: no more tiles), batch, head, key tiles to be tested and in all, where its list
# begins, how many of it are partial blocks (-1: the row has no block), and where their bits begin.
FACTS: gl.constexpr = gl.constexpr(8)


@gluon.jit
def producer(desc_q, desc_k, desc_v, counter_ptr, lists, buffers, sizes, grid, variant: gl.constexpr):
    CONSUMERS: gl.constexpr = variant[0]
    BLOCK_Q: gl.constexpr = variant[2]
    BLOCK_KV: gl.constexpr = variant[3]
    CUT: gl.constexpr = variant[4]
    q_sm, k_sm, v_sm, tile, q_full, q_empty, k_full, v_full = buffers
    offsets_ptr, partial_offsets_ptr, blocks_ptr, order_ptr = lists
    q_heads, _, kv_len = sizes
    tiles, lines, batch_stride, head_stride, group, heads_in_group = grid
    BM: gl.constexpr = 64 * CONSUMERS
    BN: gl.constexpr = k_sm.shape[1]
    STAGES: gl.constexpr = k_sm.shape[0]
    ROW_TILES: gl.constexpr = BLOCK_Q // BM
    KEY_TILES: gl.constexpr = BLOCK_KV // BN
    per_head = lines * ROW_TILES
    heads = tiles // per_head
    count = 0
    visit = 0
    t = gl.program_id(0)
    while t < tiles:
        first_head = t // (per_head * heads_in_group) * heads_in_group
        within = t % (per_head * heads_in_group)
        width = gl.minimum(heads_in_group, heads - first_head)
        batch = (first_head + within % width) // q_heads
        head = (first_head + within % width) % q_heads
        turn = within // width
        line = batch * batch_stride + head * head_stride
        block_row = gl.load(order_ptr + line + turn // ROW_TILES)
        line += block_row
        row = block_row * BLOCK_Q + turn % ROW_TILES * BM
        entry = gl.load(offsets_ptr + line)
        total = gl.load(offsets_ptr + line + 1) - entry
        place = gl.load(partial_offsets_ptr + line)
        partials = gl.load(partial_offsets_ptr + line + 1) - place
        tested = partials
        if CUT:  # of the full blocks the last column comes first
            found = gl.load(blocks_ptr + entry + partials, mask=partials < total, other=0)
            tested += gl.where((partials < total) & ((found + 1) * BLOCK_KV > kv_len), 1, 0)
        block = gl.load(blocks_ptr + entry, mask=total > 0, other=0)
        partials = gl.where(total > 0, partials, -1)
        tested = gl.where(total > 0, tested * KEY_TILES, 1)
        total = gl.where(total > 0, total * KEY_TILES, 1)
        slot = visit & 1
        mbarrier.wait(q_empty.index(slot), ((visit >> 1) & 1) ^ 1)
        put_facts(tile, slot, (row, batch, head, tested, total, entry, partials, place))
        load_queries((desc_q, desc_q), (q_sm, q_sm), q_full, slot, batch, head, row, CONSUMERS, 0)
        t = tiles
        for i in range(total):
            key = block * BLOCK_KV + i % KEY_TILES * BN
            # the next block's number is on its way while this block waits for its stage
            block = gl.load(blocks_ptr + entry + (i + 1) // KEY_TILES, mask=i + 1 < total, other=0)
            load_block(desc_k, k_sm, k_full, count, batch, head // group, key, EMPTY_FIRST, CONSUMERS)
            if i == total - 1:
                claimed = gl.atomic_add(counter_ptr, 1)
                if claimed == tiles - 1:  # the last claim of the launch: leave the counter as it was found
                    gl.store(counter_ptr, 0)
                t = gl.num_programs(0) + claimed
            load_block(desc_v, v_sm, v_full, count, batch, head // group, key, EMPTY_SECOND, CONSUMERS)
            count += 1
        visit += 1
    slot = visit & 1
    mbarrier.wait(q_empty.index(slot), ((visit >> 1) & 1) ^ 1)
    put_facts(tile, slot, (-1, 0, 0, 0, 0, 0, 0, 0))
    mbarrier.arrive(q_full.index(slot), count=1)
    drain(count, EMPTY_FIRST, STAGES, CONSUMERS)
    drain(count, EMPTY_SECOND, STAGES, CONSUMERS)


@gluon.jit
def kept_bits(bits_ptr, place, row, column, columns, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr):
    """Whether bit (row, column + columns) of a partial block is set; row within the block, a word at a time."""
    WORDS: gl.constexpr = (BLOCK_KV + 31) // 32
    BN: gl.constexpr = columns.shape[0]
    pointer = bits_ptr + place.to(gl.int64) * (BLOCK_Q * WORDS) + row * WORDS + column // 32
    word = gl.load(pointer)[:, None]
    for n in gl.static_range(1, BN // 32):
        word = gl.where((columns >= n * 32)[None, :], gl.load(pointer + n)[:, None], word)
    return ((word >> (columns & 31)[None, :]) & 1) != 0


@gluon.jit
def load_ids(pointer, count, LENGTH: gl.constexpr):
    """Segment ids of LENGTH columns side by side, 0 beyond the count, each loaded by one thread of the warpgroup.

    In the layout of the scores' columns each thread would load a quarter of them.
    """
    at = gl.arange(0, LENGTH, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(pointer + at, mask=at < count, other=0)


@gluon.jit
def test_scores(s, step, facts, rows, columns, blocks_ptr, rule, sizes, variant: gl.constexpr):
    """-inf where a pair of the step-th tile of a row may not attend."""
    BLOCK_Q: gl.constexpr = variant[2]
    BLOCK_KV: gl.constexpr = variant[3]
    row, batch, entry, partials, first_place = facts
    bits_ptr, low, high, q_ids, q_batch, kv_ids, kv_batch = rule
    _, q_len, kv_len = sizes
    BN: gl.constexpr = columns.shape[0]
    KEY_TILES: gl.constexpr = BLOCK_KV // BN
    block = gl.load(blocks_ptr + entry + step // KEY_TILES, mask=partials >= 0, other=0)
    column = step % KEY_TILES * BN
    key = block * BLOCK_KV + column
    end = gl.where(partials < 0, 0, kv_len - key)  # a row without a block attends to nothing of the one that was loaded
    if end < BN:
        s = gl.where((columns < end)[None, :], s, -float("inf"))
    if step // KEY_TILES < partials:
        # a branch a bound: most blocks that a band cuts are cut by one of them
        if variant[5]:
            if row + (64 * variant[0] - 1) + low > key:
                s = gl.where((rows + (low - key))[:, None] <= columns[None, :], s, -float("inf"))
        if variant[6]:
            if row + high < key + (BN - 1):
                s = gl.where((rows + (high - key))[:, None] >= columns[None, :], s, -float("inf"))
        if variant[7]:
            q_id = gl.load(q_ids + batch.to(gl.int64) * q_batch + rows, mask=rows < q_len, other=0)
            kv_id = gl.convert_layout(load_ids(kv_ids + batch.to(gl.int64) * kv_batch + key, end, BN), columns.type.layout)
            if q_id.dtype != kv_id.dtype:  # int8 and uint8 would be compared bit by bit
                q_id = q_id.to(gl.int64)
                kv_id = kv_id.to(gl.int64)
            s = gl.where(q_id[:, None] == kv_id[None, :], s, -float("inf"))
        if variant[8]:
            kept = kept_bits(bits_ptr, first_place + step // KEY_TILES, rows % BLOCK_Q, column, columns, BLOCK_Q, BLOCK_KV)
            s = gl.where(kept, s, -float("inf"))
    return s


@gluon.jit
def step(
    acc, p, m_i, l_i, q, k_sm, v_sm, k_full, v_full, count, scale, zero, number, facts, rows, columns, blocks_ptr, rule, sizes,
    WG: gl.constexpr, variant: gl.constexpr, TESTED: gl.constexpr,
):  # fmt: skip
    """Block count: S = Q K^T; behind it P V of the block before; the softmax of S while that runs."""
    CONSUMERS: gl.constexpr = variant[0]
    STAGES: gl.constexpr = k_sm.shape[0]
    stage = count % STAGES
    s = issue_scores(q, k_sm, k_full, count, zero, WG, CONSUMERS, variant[1])
    before = wait_for(v_full, count - 1)
    acc = warpgroup_mma(p, v_sm.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    release(EMPTY_FIRST + stage, CONSUMERS)
    if TESTED:
        s = test_scores(s, number, facts, rows, columns, blocks_ptr, rule, sizes, variant)
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale)
    pivot = pivot_of(m_new, TESTED)
    p_new = gl.exp2(s * scale - pivot[:, None])
    alpha = gl.exp2(m_i - pivot)
    l_i = l_i * by_row(alpha, l_i) + partial_sums(p_new)
    p = gl.convert_layout(p_new.to(k_sm.dtype), p.type.layout)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(EMPTY_SECOND + before, CONSUMERS)
    acc = acc * by_row(alpha, acc)
    return acc, p, m_new, l_i


@gluon.jit
def consumer(WG: gl.constexpr, desc_o, lse_ptr, blocks_ptr, rule, buffers, sizes, scale, variant: gl.constexpr):
    CONSUMERS: gl.constexpr = variant[0]
    PING_PONG: gl.constexpr = variant[1]
    q_sm, k_sm, v_sm, tile, q_full, q_empty, k_full, v_full = buffers
    q_heads, q_len, _ = sizes
    STAGES: gl.constexpr = k_sm.shape[0]
    BN: gl.constexpr = k_sm.shape[1]
    D: gl.constexpr = k_sm.shape[2]
    dtype: gl.constexpr = k_sm.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([64, BN], gl.float32, s_layout)
    offsets = WG * 64 + gl.arange(0, 64, layout=row_layout)
    columns = gl.arange(0, BN, layout=gl.SliceLayout(0, s_layout))
    if PING_PONG and WG == 1:
        barrier_arrive(TURN, CONSUMERS * 128)
    count = 0
    visit = 0
    mbarrier.wait(q_full.index(0), 0)
    row = fact_at(tile, 0)
    s = issue_scores(q_sm.index(WG), k_sm, k_full, count, zero, WG, CONSUMERS, PING_PONG)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(EMPTY_FIRST, CONSUMERS)
    while row >= 0:
        # here s holds the raw scores of the tile's first block
        slot = visit & 1
        q = q_sm.index(slot * CONSUMERS + WG)
        batch = fact_at(tile, slot * FACTS + 1)
        head = fact_at(tile, slot * FACTS + 2)
        tested = fact_at(tile, slot * FACTS + 3)
        total = fact_at(tile, slot * FACTS + 4)
        facts = (row, batch, fact_at(tile, slot * FACTS + 5), fact_at(tile, slot * FACTS + 6), fact_at(tile, slot * FACTS + 7))
        rows = row + offsets
        acc = gl.zeros([64, D], gl.float32, o_layout)
        if tested > 0:
            s = test_scores(s, 0, facts, rows, columns, blocks_ptr, rule, sizes, variant)
        m_i = gl.max(s, 1) * scale
        p_new = gl.exp2(s * scale - pivot_of(m_i, True)[:, None])
        l_i = partial_sums(p_new)
        p = gl.convert_layout(p_new.to(dtype), p_layout)
        count += 1
        # the tile before has left shared memory by now: give its Q buffer, where its O was staged, back
        tma_store_wait(0)
        mbarrier.arrive(q_empty.index(slot ^ 1), pred=visit > 0)
        for number in range(1, tested):
            acc, p, m_i, l_i = step(
                acc, p, m_i, l_i, q, k_sm, v_sm, k_full, v_full, count, scale, zero, number, facts, rows, columns, blocks_ptr, rule, sizes,
                WG, variant, True,
            )  # fmt: skip
            count += 1
        for _ in range(gl.maximum(tested, 1), total):
            acc, p, m_i, l_i = step(
                acc, p, m_i, l_i, q, k_sm, v_sm, k_full, v_full, count, scale, zero, 0, facts, rows, columns, blocks_ptr, rule, sizes,
                WG, variant, False,
            )  # fmt: skip
            count += 1
        # the tile's last P V, with the next tile's first Q K^T behind it
        visit += 1
        last = wait_for(v_full, count - 1)
        acc = warpgroup_mma(p, v_sm.index(last), acc, is_async=True)
        next_slot = visit & 1
        mbarrier.wait(q_full.index(next_slot), (visit >> 1) & 1)
        next_row = fact_at(tile, next_slot * FACTS)
        s = issue_scores(q_sm.index(next_slot * CONSUMERS + WG), k_sm, k_full, count, zero, WG, CONSUMERS, PING_PONG, pred=next_row >= 0)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        release(EMPTY_SECOND + last, CONSUMERS)
        l_i = gl.convert_layout(gl.sum(l_i, 1), row_layout)
        lse_row = (batch * q_heads + head).to(gl.int64) * q_len + row
        gl.store(lse_ptr + lse_row + offsets, (m_i + gl.log2(l_i)) * LN2, mask=rows < q_len)
        inverse = gl.where(l_i == 0.0, 0.0, 1.0 / l_i)  # a row with no key gives 0, whatever the block holds that stands in for one
        store_output(desc_o, acc, inverse, q, batch, head, row + WG * 64, 0, True)
        s = warpgroup_mma_wait(0, deps=(s,))
        release(EMPTY_FIRST + count % STAGES, CONSUMERS, next_row >= 0)
        row = next_row
    tma_store_wait(0)


SIZES = ["tiles", "lines", "batch_stride", "head_stride", "group", "heads_in_group", "q_heads", "q_len", "kv_len"]
RULE = ["low", "high", "q_batch", "kv_batch"]
LISTS = ["offsets_ptr", "partial_offsets_ptr", "blocks_ptr", "order_ptr", "bits_ptr", "q_ids", "kv_ids"]


@gluon.jit(do_not_specialize=[*SIZES, *RULE, *LISTS])  # one binary for all sizes and alignments
def sparse_attention_forward(
    desc_q, desc_k, desc_v, desc_o, lse_ptr, counter_ptr, offsets_ptr, partial_offsets_ptr, blocks_ptr, order_ptr,
    bits_ptr, q_ids, kv_ids, low, high, q_batch, kv_batch, scale,
    tiles, lines, batch_stride, head_stride, group, heads_in_group, q_heads, q_len, kv_len,
    STAGES: gl.constexpr, PING_PONG: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, CUT: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, IDS: gl.constexpr, BITS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q (B, Hq, Sq, D), k and v (B, Hkv, Skv, D) -> o like q, lse (B, Hq, Sq) fp32, natural log.

    scale > 0. counter_ptr: one int32, 0 before and after. offsets, blocks: each line's block columns, partial ones ascending and
    then full ones descending; partial_offsets: likewise of the partial ones alone; order: each head's lines, the longest first.
    LOW, HIGH, IDS, BITS: what the rule of partial blocks consists of. CUT: BLOCK_KV does not divide kv_len.
    """
    CONSUMERS: gl.constexpr = 2
    BN: gl.constexpr = desc_k.block_type.shape[2]
    D: gl.constexpr = desc_k.block_type.shape[3]
    dtype: gl.constexpr = desc_k.dtype
    q_sm, _ = allocate(dtype, 2 * CONSUMERS, 64, D, 0)
    k_sm, _ = allocate(dtype, STAGES, BN, D, 0)
    v_sm, _ = allocate(dtype, STAGES, BN, D, 0)
    tile = allocate_facts(2 * FACTS)
    buffers = (q_sm, k_sm, v_sm, tile, barriers(2, 1), barriers(2, CONSUMERS), barriers(STAGES, 1), barriers(STAGES, 1))
    sizes = (q_heads, q_len, kv_len)
    lists = (offsets_ptr, partial_offsets_ptr, blocks_ptr, order_ptr)
    rule = (bits_ptr, low, high, q_ids, q_batch, kv_ids, kv_batch)
    grid = (tiles, lines, batch_stride, head_stride, group, heads_in_group)
    variant: gl.constexpr = (CONSUMERS, PING_PONG, BLOCK_Q, BLOCK_KV, CUT, LOW, HIGH, IDS, BITS)
    gl.warp_specialize(
        [
            (consumer, (gl.constexpr(0), desc_o, lse_ptr, blocks_ptr, rule, buffers, sizes, scale * LOG2E, variant)),
            (consumer, (gl.constexpr(1), desc_o, lse_ptr, blocks_ptr, rule, buffers, sizes, scale * LOG2E, variant)),
            (producer, (desc_q, desc_k, desc_v, counter_ptr, lists, buffers, sizes, grid, variant)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
