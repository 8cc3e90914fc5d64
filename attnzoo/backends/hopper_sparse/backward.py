"""Block-sparse attention backward for Hopper: the dense kernel's schedule over the blocks of each column.

Roles, products and how dQ is summed are those of `hopper.backward`: a CTA owns BN keys of one key head and walks the query
tiles of the blocks in their column, for all query heads of the group, those whose pairs must be tested first.
"""

from attnzoo.backends.hopper.backward import LOG2E, READERS, WRITERS, place
from attnzoo.backends.hopper.barriers import (
    DQ_FULL,
    EMPTY_FIRST,
    EMPTY_SECOND,
    EXCHANGE,
    barrier_arrive,
    barrier_sync,
    claim,
    dependency_wait,
    launch_dependents,
    publish,
    uniform,
)
from attnzoo.backends.hopper.names import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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
def put_facts(facts, stage, row, where, below, above):
    """What to test of the query tile in a stage; guarded by the stage's barriers."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, layout)
    facts.index(stage * FACTS).store(zero + row)
    facts.index(stage * FACTS + 1).store(zero + where)
    facts.index(stage * FACTS + 2).store(zero + below)
    facts.index(stage * FACTS + 3).store(zero + above)
    partition_barrier()


@gluon.jit
def fact_at(facts, index):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return uniform(gl.max(facts.index(index).load(layout), 0))


@gluon.jit
def producer(desc_q, desc_k, desc_v, desc_do, desc_lse, desc_delta, kv, queries, facts, lists, walk, bounds, variant: gl.constexpr):
    BLOCK_Q: gl.constexpr = variant[0]
    TESTED: gl.constexpr = variant[2]
    BITS: gl.constexpr = variant[7]
    k_sm, v_sm, kv_full = kv
    q_sm, do_sm, lse_sm, delta_sm, q_full, do_full = queries
    _, partial_offsets_ptr, blocks_ptr, places_ptr = lists
    low, high, kv_len = bounds
    key, line, head_stride, q_heads, kv_heads, group, width, _ = walk
    batch, kv_head = place(kv_heads, width)
    STAGES: gl.constexpr = q_sm.shape[0]
    BM: gl.constexpr = q_sm.shape[1]
    TILES: gl.constexpr = BLOCK_Q // BM
    mbarrier.expect(kv_full.index(0), desc_k.block_type.nbytes)
    tma_load(desc_k, [batch, kv_head, key, 0], kv_full.index(0), k_sm)
    dependency_wait()
    count = 0
    for member in range(group):
        head = kv_head * group + member
        entry, steps, block = column_of(lists, line, head_stride, member, TILES)
        for i in range(steps):
            row = block * BLOCK_Q + i % TILES * BM
            block = gl.load(blocks_ptr + entry + (i + 1) // TILES, mask=i + 1 < steps, other=0)
            stage = count % STAGES
            if count >= STAGES:
                barrier_sync(EMPTY_FIRST + stage, READERS)
            if TESTED:
                first = gl.load(partial_offsets_ptr + line + member * head_stride)
                partials = gl.load(partial_offsets_ptr + line + member * head_stride + 1) - first
                is_partial = i // TILES < partials
                where = 0
                if BITS:
                    where = gl.load(places_ptr + first + i // TILES, mask=is_partial, other=0)
                is_cut = key + k_sm.shape[0] > kv_len
                where = gl.where(is_partial, where, -1)
                put_facts(facts, stage, gl.where(is_partial | is_cut, row, -1), where, key - row - low, key - row - high)
            mbarrier.expect(q_full.index(stage), desc_q.block_type.nbytes + BM * 4)
            tma_load(desc_q, [batch, head, row, 0], q_full.index(stage), q_sm.index(stage))
            tma_load(desc_lse, [batch * q_heads + head, row], q_full.index(stage), lse_sm.index(stage))
            if count == 0:
                mbarrier.expect(kv_full.index(1), desc_v.block_type.nbytes)
                tma_load(desc_v, [batch, kv_head, key, 0], kv_full.index(1), v_sm)
            if count >= STAGES:
                barrier_sync(EMPTY_SECOND + stage, READERS)
            mbarrier.expect(do_full.index(stage), desc_do.block_type.nbytes + BM * 4)
            tma_load(desc_do, [batch, head, row, 0], do_full.index(stage), do_sm.index(stage))
            tma_load(desc_delta, [batch * q_heads + head, row], do_full.index(stage), delta_sm.index(stage))
            count += 1
    if count == 0:
        mbarrier.arrive(kv_full.index(1), count=1)  # nobody sees these keys: V is not needed
    for i in range(gl.maximum(count - STAGES, 0), count):  # leave no named barrier half full
        barrier_sync(EMPTY_FIRST + i % STAGES, READERS)
        barrier_sync(EMPTY_SECOND + i % STAGES, READERS)


@gluon.jit
def dq_writer(desc_dq, state_ptr, dqs, lists, walk, q_len, BM: gl.constexpr, variant: gl.constexpr):
    BLOCK_Q: gl.constexpr = variant[0]
    dq_sm, dq_empty = dqs
    _, line, head_stride, q_heads, kv_heads, group, width, q_blocks = walk
    blocks_ptr = lists[2]
    batch, kv_head = place(kv_heads, width)
    ROWS: gl.constexpr = dq_sm.shape[1] % BM  # from one half to the other: BM is 0, since then the columns are halved
    COLUMNS: gl.constexpr = 0 if ROWS else dq_sm.shape[2]
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
                is_first = claim(block_state)
                for wg in gl.static_range(2):
                    barrier_sync(DQ_FULL + wg, WRITERS)
                    if is_first:
                        tma_store(desc_dq, [batch_head, row + wg * ROWS, wg * COLUMNS], dq_sm.index(wg))
                    else:
                        tma_add(desc_dq, [batch_head, row + wg * ROWS, wg * COLUMNS], dq_sm.index(wg))
                for wg in gl.static_range(2):
                    tma_store_wait(1 - wg)
                    mbarrier.arrive(dq_empty.index(wg), count=1)
                if is_first:
                    publish(block_state)
            else:  # a tile of a cut block that has no row
                for wg in gl.static_range(2):
                    barrier_sync(DQ_FULL + wg, WRITERS)
                    mbarrier.arrive(dq_empty.index(wg), count=1)


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
    k_sm, v_sm, kv_full = kv
    q_sm, do_sm, lse_sm, delta_sm, q_full, do_full = queries
    dq_sm, dq_empty = dqs
    kv_heads, width = tile
    STAGES: gl.constexpr = q_sm.shape[0]
    BM: gl.constexpr = q_sm.shape[1]
    BN: gl.constexpr = k_sm.shape[0]
    D: gl.constexpr = k_sm.shape[1]
    HALF_N: gl.constexpr = BN // 2
    DQ_ROWS: gl.constexpr = dq_sm.shape[1]
    DQ_COLUMNS: gl.constexpr = dq_sm.shape[2]
    dtype: gl.constexpr = k_sm.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    dkv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dkv_layout, 2)
    column: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero_s = gl.zeros([HALF_N, BM], gl.float32, s_layout)
    zero_dq = gl.zeros([DQ_ROWS, DQ_COLUMNS], gl.float32, dq_layout)
    dk = gl.zeros([HALF_N, D], gl.float32, dkv_layout)
    dv = gl.zeros([HALF_N, D], gl.float32, dkv_layout)
    columns = gl.arange(0, BM, layout=column)
    keys = WG * HALF_N + gl.arange(0, HALF_N, layout=gl.SliceLayout(1, s_layout))  # within the tile
    k_half = k_sm.slice(WG * HALF_N, HALF_N, 0)
    v_half = v_sm.slice(WG * HALF_N, HALF_N, 0)
    k_dq = k_sm if DQ_ROWS < BM else k_sm.slice(WG * DQ_COLUMNS, DQ_COLUMNS, 1)
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(kv_full.index(1), 0)
    steps = uniform(steps)
    for i in range(steps):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        ds_half = ds_sm.index(i % 2).slice(WG * HALF_N, HALF_N, 0)
        q = q_sm.index(stage)
        do = do_sm.index(stage)
        mbarrier.wait(q_full.index(stage), phase)
        s = warpgroup_mma(k_half, q.permute((1, 0)), zero_s, use_acc=False, is_async=True)  # (keys, queries)
        if LSE_EARLY:
            lse = lse_sm.index(stage).load(column)
        mbarrier.wait(do_full.index(stage), phase)
        dp = warpgroup_mma(v_half, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        if TESTED:
            row = fact_at(facts, stage * FACTS)
            if row >= 0:
                batch, _ = place(kv_heads, width)
                s = test_scores(s, facts, stage, row, batch, keys, columns, rule, lengths, variant)
        if not LSE_EARLY:
            lse = lse_sm.index(stage).load(column)
        p = gl.exp2(s * scale - lse[None, :])  # 0 for rows without keys, whose lse here is inf
        p16 = gl.convert_layout(p.to(dtype), operand)
        if LSE_EARLY:
            mbarrier.wait(do_full.index(stage), phase)  # it has come long ago: the branch of the dense kernel, for the same reason
        dp = warpgroup_mma_wait(0, deps=(dp,))
        delta = delta_sm.index(stage).load(column)
        ds = (p * (dp - delta[None, :])).to(dtype)
        ds_half.store(ds)
        dv = warpgroup_mma(p16, do, dv, is_async=True)
        fence_async_shared()
        barrier_sync(EXCHANGE, 256)  # both halves of dS are in shared memory
        ds_dq = ds_sm.index(i % 2).slice(WG * DQ_ROWS, DQ_ROWS, 1) if DQ_ROWS < BM else ds_sm.index(i % 2)
        dq = warpgroup_mma(ds_dq.permute((1, 0)), k_dq, zero_dq, use_acc=False, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, operand), q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
        barrier_arrive(EMPTY_SECOND + stage, READERS)
        mbarrier.wait(dq_empty.index(WG), (i & 1) ^ 1)
        dq_sm.index(WG).store(dq)
        fence_async_shared()
        barrier_arrive(DQ_FULL + WG, WRITERS)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        barrier_arrive(EMPTY_FIRST + stage, READERS)
    dk = dk * (scale / LOG2E)
    barrier_sync(EXCHANGE, 256)  # K is an operand of the other warpgroup's dQ: both must be done with it
    k_half.store(dk.to(dtype))
    v_half.store(dv.to(dtype))
    fence_async_shared()
    partition_barrier()
    batch, kv_head = place(kv_heads, width)  # worked out here: fewer registers in the loop
    key = fact_at(facts, facts.shape[0] - 1)
    tma_store(desc_dk, [batch, kv_head, key + WG * HALF_N, 0], k_half)
    tma_store(desc_dv, [batch, kv_head, key + WG * HALF_N, 0], v_half)
    tma_store_wait(0)


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
    D: gl.constexpr = desc_q.block_type.shape[3]
    dtype: gl.constexpr = desc_q.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, D], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], dtype)
    dq_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(desc_dq.block_type.shape[1:], gl.float32)
    vector: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
    k_sm = gl.allocate_shared_memory(dtype, [BN, D], kv_layout)
    v_sm = gl.allocate_shared_memory(dtype, [BN, D], kv_layout)
    q_sm = gl.allocate_shared_memory(dtype, [STAGES, BM, D], q_layout)
    do_sm = gl.allocate_shared_memory(dtype, [STAGES, BM, D], q_layout)
    ds_sm = gl.allocate_shared_memory(dtype, [2, BN, BM], ds_layout)
    dq_sm = gl.allocate_shared_memory(gl.float32, [2, desc_dq.block_type.shape[1], desc_dq.block_type.shape[2]], dq_layout)
    lse_sm = gl.allocate_shared_memory(gl.float32, [STAGES, BM], vector)
    delta_sm = gl.allocate_shared_memory(gl.float32, [STAGES, BM], vector)
    facts = gl.allocate_shared_memory(
        gl.int32, [FACTS * STAGES + 1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # the stages', then the first key
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(dq_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
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
    kv = (k_sm, v_sm, kv_full)
    queries = (q_sm, do_sm, lse_sm, delta_sm, q_full, do_full)
    dqs = (dq_sm, dq_empty)
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
            (
                producer,
                (desc_q, desc_k, desc_v, desc_do, desc_lse, desc_delta, kv, queries, facts, lists, walk, (low, high, kv_len), variant),
            ),
            (dq_writer, (desc_dq, state_ptr, dqs, lists, walk, q_len, BM, variant)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
