"""Block-sparse attention backward for Hopper: the dense kernel's schedule over the blocks of each column.

Roles, products and how dQ is summed are those of `hopper.backward`: a CTA owns BN keys of one key head and walks the query
tiles of the blocks in their column, for all query heads of the group, those whose pairs must be tested first.
"""

from attnzoo.backends.hopper.backward_block import (
    LOG2E,
    WRITERS,
    add_products,
    allocate,
    await_stage,
    begin,
    issue_scores,
    load_keys,
    load_query_block,
    place,
    positions,
    put_sums,
    send_dq,
    store_sums,
)
from attnzoo.backends.hopper.barriers import DQ_FULL, EMPTY_FIRST, EMPTY_SECOND, barrier_sync, dependency_wait, launch_dependents, uniform
from attnzoo.backends.hopper.facts import allocate_facts, fact_at, put_facts
from attnzoo.backends.hopper.names import gl, gluon, mbarrier
from attnzoo.backends.hopper.stages import drain

# What the producer tells of a query tile: its first row, or -1 if nothing of it must be tested; the place of its block's bits, or -1 if
# only the end of the keys cuts it; and how far a query may be beyond a key, both counted within the tile, by the band's two bounds.
FACTS: gl.constexpr = gl.constexpr(4)


@gluon.jit
def column_of(lists, line, head_stride, member, TILES: gl.constexpr):
    """First entry of a member's column, its number of query tiles, and its first block."""
    offsets_ptr, _, blocks_ptr, _ = lists
    at = line + member * head_stride
    entry = gl.load(offsets_ptr + at)
    count = gl.load(offsets_ptr + at + 1) - entry
    return entry, count * TILES, gl.load(blocks_ptr + entry, mask=count > 0, other=0)


@gluon.jit
def producer(desc_k, descs, kv, queries, facts, lists, walk, bounds, variant: gl.constexpr):
    BLOCK_Q: gl.constexpr = variant[0]
    TESTED: gl.constexpr = variant[2]
    BITS: gl.constexpr = variant[7]
    _, partial_offsets_ptr, blocks_ptr, places_ptr = lists
    low, high, kv_len = bounds
    key, line, head_stride, q_heads, kv_heads, group, width, _ = walk
    batch, kv_head = place(kv_heads, width)
    STAGES: gl.constexpr = queries[0].shape[0]
    BM: gl.constexpr = queries[0].shape[1]
    TILES: gl.constexpr = BLOCK_Q // BM
    load_keys(desc_k, kv, batch, kv_head, key)
    dependency_wait()
    count = 0
    for member in range(group):
        head = kv_head * group + member
        entry, steps, block = column_of(lists, line, head_stride, member, TILES)
        for i in range(steps):
            row = block * BLOCK_Q + i % TILES * BM
            block = gl.load(blocks_ptr + entry + (i + 1) // TILES, mask=i + 1 < steps, other=0)
            stage = await_stage(EMPTY_FIRST, count, STAGES)
            if TESTED:
                first = gl.load(partial_offsets_ptr + line + member * head_stride)
                partials = gl.load(partial_offsets_ptr + line + member * head_stride + 1) - first
                is_partial = i // TILES < partials
                where = 0
                if BITS:
                    where = gl.load(places_ptr + first + i // TILES, mask=is_partial, other=0)
                is_cut = key + kv[0].shape[0] > kv_len
                where = gl.where(is_partial, where, -1)
                put_facts(facts, stage, (gl.where(is_partial | is_cut, row, -1), where, key - row - low, key - row - high))
            load_query_block(descs, kv, queries, count, batch, head, q_heads, row, kv_head, key)
            count += 1
    if count == 0:
        mbarrier.arrive(kv[2].index(1), count=1)  # nobody sees these keys: V is not needed
    drain(count, EMPTY_FIRST, STAGES, 2)
    drain(count, EMPTY_SECOND, STAGES, 2)


@gluon.jit
def dq_writer(desc_dq, state_ptr, dqs, lists, walk, q_len, BM: gl.constexpr, variant: gl.constexpr):
    BLOCK_Q: gl.constexpr = variant[0]
    _, line, head_stride, q_heads, kv_heads, group, width, q_blocks = walk
    blocks_ptr = lists[2]
    batch, kv_head = place(kv_heads, width)
    TILES: gl.constexpr = BLOCK_Q // BM
    dependency_wait()
    for member in range(group):
        batch_head = batch * q_heads + kv_head * group + member
        entry, steps, block = column_of(lists, line, head_stride, member, TILES)
        for i in range(steps):
            row = block * BLOCK_Q + i % TILES * BM
            block = gl.load(blocks_ptr + entry + (i + 1) // TILES, mask=i + 1 < steps, other=0)
            if row < q_len:
                block_state = state_ptr + batch_head * q_blocks + row // BM
                send_dq(desc_dq, block_state, dqs, batch_head, row, BM)
            else:  # a tile of a cut block that has no row
                for wg in gl.static_range(2):
                    barrier_sync(DQ_FULL + wg, WRITERS)
                    mbarrier.arrive(dqs[1].index(wg), count=1)


@gluon.jit
def test_scores(s, facts, stage, row, batch, keys, columns, rule, lengths, variant: gl.constexpr):
    """-inf where a pair `(keys, queries)` of the query tile in a stage may not attend."""
    BLOCK_Q: gl.constexpr = variant[0]
    BLOCK_KV: gl.constexpr = variant[1]
    WORDS: gl.constexpr = BLOCK_KV // 32
    bits_ptr, q_ids, q_batch, kv_ids, kv_batch = rule
    q_len, kv_len = lengths
    where = fact_at(facts, stage * FACTS + 1)
    key = fact_at(facts, facts.shape[0] - 1)
    s = gl.where((keys < kv_len - key)[:, None], s, -float("inf"))
    if where >= 0:
        if variant[4]:
            s = gl.where((keys + fact_at(facts, stage * FACTS + 2))[:, None] >= columns[None, :], s, -float("inf"))
        if variant[5]:
            s = gl.where((keys + fact_at(facts, stage * FACTS + 3))[:, None] <= columns[None, :], s, -float("inf"))
        if variant[6]:
            q_id = gl.load(q_ids + batch.to(gl.int64) * q_batch + row + columns, mask=columns < q_len - row, other=0)
            kv_id = gl.load(kv_ids + batch.to(gl.int64) * kv_batch + key + keys, mask=keys < kv_len - key, other=0)
            if q_id.dtype != kv_id.dtype:  # int8 and uint8 would be compared bit by bit
                q_id = q_id.to(gl.int64)
                kv_id = kv_id.to(gl.int64)
            s = gl.where(q_id[None, :] == kv_id[:, None], s, -float("inf"))
        if variant[7]:
            pointer = bits_ptr + where.to(gl.int64) * (BLOCK_Q * WORDS) + row % BLOCK_Q * WORDS + (key % BLOCK_KV) // 32
            word = gl.load(pointer + (columns * WORDS)[None, :] + (keys // 32)[:, None])
            s = gl.where(((word >> (keys & 31)[:, None]) & 1) != 0, s, -float("inf"))
    return s


@gluon.jit
def consumer(WG: gl.constexpr, desc_dk, desc_dv, scale, kv, queries, ds_sm, dqs, facts, steps, rule, tile, lengths, variant: gl.constexpr):
    TESTED: gl.constexpr = variant[2]
    LSE_EARLY: gl.constexpr = variant[3]
    kv_heads, width = tile
    STAGES: gl.constexpr = queries[0].shape[0]
    operands, zeros, dk, dv = begin(WG, kv, queries, dqs)
    keys, columns = positions(WG, zeros[0])
    mbarrier.wait(kv[2].index(0), 0)
    mbarrier.wait(kv[2].index(1), 0)
    steps = uniform(steps)
    for i in range(steps):
        s, dp, lse = issue_scores(operands, queries, zeros, i, (), LSE_EARLY)
        if TESTED:
            stage = i % STAGES
            row = fact_at(facts, stage * FACTS)
            if row >= 0:
                batch, _ = place(kv_heads, width)
                s = test_scores(s, facts, stage, row, batch, keys, columns, rule, lengths, variant)
        dk, dv = add_products(WG, s, dp, lse, dk, dv, scale, operands, queries, zeros, ds_sm, dqs, i, (), LSE_EARLY)
    put_sums(dk, dv, scale, operands)
    batch, kv_head = place(kv_heads, width)  # worked out here: fewer registers in the loop
    key = fact_at(facts, facts.shape[0] - 1)
    store_sums(desc_dk, desc_dv, operands, batch, kv_head, key + WG * (kv[0].shape[0] // 2))


SIZES = ["q_heads", "kv_heads", "group", "width", "q_len", "q_blocks", "kv_len", "batch_stride", "head_stride"]
RULE = ["low", "high", "q_batch", "kv_batch"]
LISTS = ["offsets_ptr", "partial_offsets_ptr", "blocks_ptr", "order_ptr", "places_ptr", "bits_ptr", "q_ids", "kv_ids"]


@gluon.jit(do_not_specialize=[*SIZES, *RULE, *LISTS])
def sparse_attention_backward(
    desc_q, desc_k, desc_v, desc_do, desc_lse, desc_delta, desc_dq, desc_dk, desc_dv, state_ptr,
    offsets_ptr, partial_offsets_ptr, blocks_ptr, order_ptr, places_ptr, bits_ptr, q_ids, kv_ids, low, high, q_batch, kv_batch, scale,
    q_heads, kv_heads, group, width, q_len, q_blocks, kv_len, batch_stride, head_stride,
    STAGES: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, TESTED: gl.constexpr, LSE_EARLY: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, IDS: gl.constexpr, BITS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes dQ / scale to desc_dq (B Hq, Sq, D) fp32, and dK and dV like k and v, zeros for keys that nobody sees.

    state_ptr: a zero a head and query tile; where it is still zero at the end no key is seen and dQ is not written.
    Lists as in the forward, of the columns; places: where each partial block's bits are. TESTED: there are partial blocks, or
    a block is cut by the end of the keys. Grid: (width, key tiles, groups of width heads), the longest columns of each head first.
    """
    BM: gl.constexpr = desc_q.block_type.shape[2]
    BN: gl.constexpr = desc_k.block_type.shape[2]
    kv, queries, dqs, ds_sm = allocate(desc_q, desc_k, desc_dq, STAGES)
    facts = allocate_facts(FACTS * STAGES + 1)  # the stages', then the first key
    KEY_TILES: gl.constexpr = BLOCK_KV // BN
    batch, kv_head = place(kv_heads, width)
    turn = gl.program_id(1)
    line = batch * batch_stride + kv_head * group * head_stride
    block = gl.load(order_ptr + line + turn // KEY_TILES)
    key = block * BLOCK_KV + turn % KEY_TILES * BN
    steps = 0
    for member in range(group):
        at = line + block + member * head_stride
        steps += (gl.load(offsets_ptr + at + 1) - gl.load(offsets_ptr + at)) * (BLOCK_Q // BM)
    facts.index(FACTS * STAGES).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0])) + key)
    launch_dependents()
    descs = (desc_q, desc_v, desc_do, desc_lse, desc_delta)
    lists = (offsets_ptr, partial_offsets_ptr, blocks_ptr, places_ptr)
    rule = (bits_ptr, q_ids, q_batch, kv_ids, kv_batch)
    walk = (key, line + block, head_stride, q_heads, kv_heads, group, width, q_blocks)
    tile = (kv_heads, width)
    lengths = (q_len, kv_len)
    variant: gl.constexpr = (BLOCK_Q, BLOCK_KV, TESTED, LSE_EARLY, LOW, HIGH, IDS, BITS)
    gl.warp_specialize(
        [
            (
                consumer,
                (gl.constexpr(0), desc_dk, desc_dv, scale * LOG2E, kv, queries, ds_sm, dqs, facts, steps, rule, tile, lengths, variant),
            ),
            (
                consumer,
                (gl.constexpr(1), desc_dk, desc_dv, scale * LOG2E, kv, queries, ds_sm, dqs, facts, steps, rule, tile, lengths, variant),
            ),
            (producer, (desc_k, descs, kv, queries, facts, lists, walk, (low, high, kv_len), variant)),
            (dq_writer, (desc_dq, state_ptr, dqs, lists, walk, q_len, BM, variant)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
