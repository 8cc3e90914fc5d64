"""Attention forward for Hopper: O = softmax(scale Q K^T) V, and the log-sum-exp of each row.

One producer warp feeds CONSUMERS warpgroups of 64 query rows each by bulk tensor copies (TMA); docs/hopper.md draws
the schedule. A consumer computes the softmax of key block i while its P V of block i - 1 is still in flight.
Persistent: one CTA an SM, tiles handed out by an atomic counter that the last CTA resets; the first Q K^T of the
next tile is issued with the last P V of this one, so that the epilogue runs under tensor work.
Rows and head-dim columns past a tensor's end are zero-filled by TMA on load and dropped on store.
"""

from attnzoo.backends.hopper.barriers import EMPTY_FIRST, EMPTY_SECOND, TURN, barrier_arrive, barrier_sync, uniform
from attnzoo.backends.hopper.names import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnzoo.backends.hopper.schedule import key_blocks, tile_at

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
TILE_FACTS: gl.constexpr = gl.constexpr(3)  # what the producer tells of a tile: its first row (-1: no more tiles), batch, head


@gluon.jit
def put_tile(tile, slot, row, batch, head):
    """Publish a tile; guarded by q_empty and q_full."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, layout)
    tile.index(slot * TILE_FACTS).store(zero + row)
    tile.index(slot * TILE_FACTS + 1).store(zero + batch)
    tile.index(slot * TILE_FACTS + 2).store(zero + head)
    partition_barrier()


@gluon.jit
def tile_fact(tile, slot, fact: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return uniform(gl.max(tile.index(slot * TILE_FACTS + fact).load(layout), 0))


@gluon.jit
def load_block(desc, buffer, full, count, batch, head, row, EMPTY: gl.constexpr, CONSUMERS: gl.constexpr):
    """Copy the count-th key or value block of this CTA into its stage, once all consumers have left it."""
    STAGES: gl.constexpr = buffer.shape[0]
    stage = count % STAGES
    if count >= STAGES:
        barrier_sync(EMPTY + stage, CONSUMERS * 128 + 32)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    tma_load(desc, [batch, head, row, 0], full.index(stage), buffer.index(stage))


@gluon.jit
def release(barrier, CONSUMERS: gl.constexpr, pred=True):
    """This warpgroup has read the stage behind the barrier."""
    if pred:
        barrier_arrive(barrier, CONSUMERS * 128 + 32)


@gluon.jit
def producer(desc_q, desc_k, desc_v, counter_ptr, buffers, sizes, tiles, q_tiles, group, heads_in_group, variant: gl.constexpr):
    CONSUMERS: gl.constexpr = variant[0]
    LEFT: gl.constexpr = variant[2]
    RIGHT: gl.constexpr = variant[3]
    ONE_MASKED: gl.constexpr = variant[4]
    PERSISTENT: gl.constexpr = variant[5]
    q_sm, k_sm, v_sm, tile, q_full, q_empty, k_full, v_full = buffers
    q_heads, q_len, kv_len, left, right = sizes
    BM: gl.constexpr = 64 * CONSUMERS
    BN: gl.constexpr = k_sm.shape[1]
    STAGES: gl.constexpr = k_sm.shape[0]
    count = 0
    visit = 0
    t = gl.program_id(0)
    while t < tiles:
        batch_head, q_tile = tile_at(t, q_tiles, tiles // q_tiles, heads_in_group)
        batch = batch_head // q_heads
        head = batch_head % q_heads
        row = q_tile * BM
        first, _, _, end = key_blocks(row, q_len, kv_len, left, right, BM, BN, LEFT, RIGHT, ONE_MASKED)
        slot = visit & 1
        mbarrier.wait(q_empty.index(slot), ((visit >> 1) & 1) ^ 1)
        put_tile(tile, slot, row, batch, head)
        mbarrier.expect(q_full.index(slot), CONSUMERS * desc_q.block_type.nbytes)
        for wg in gl.static_range(CONSUMERS):
            tma_load(desc_q, [batch, head, row + wg * 64, 0], q_full.index(slot), q_sm.index(slot * CONSUMERS + wg))
        t = tiles
        for i in range(end - first):
            key = (end - 1 - i) * BN
            load_block(desc_k, k_sm, k_full, count, batch, head // group, key, EMPTY_FIRST, CONSUMERS)
            if PERSISTENT:
                if i == end - first - 1:
                    # early enough to hide the atomic behind the wait for V's stage (+5% at head dim 128 against claiming after it),
                    # and as late as that allows: claiming at the tile's start unbalances causal calls by 3-6%
                    claimed = gl.atomic_add(counter_ptr, 1)
                    if claimed == tiles - 1:  # the last claim of the launch: leave the counter as it was found
                        gl.store(counter_ptr, 0)
                    t = gl.num_programs(0) + claimed
            load_block(desc_v, v_sm, v_full, count, batch, head // group, key, EMPTY_SECOND, CONSUMERS)
            count += 1
        visit += 1
    if PERSISTENT:
        slot = visit & 1
        mbarrier.wait(q_empty.index(slot), ((visit >> 1) & 1) ^ 1)
        put_tile(tile, slot, -1, 0, 0)
        mbarrier.arrive(q_full.index(slot), count=1)
    for i in range(gl.maximum(count - STAGES, 0), count):  # leave no named barrier half full
        barrier_sync(EMPTY_FIRST + i % STAGES, CONSUMERS * 128 + 32)
        barrier_sync(EMPTY_SECOND + i % STAGES, CONSUMERS * 128 + 32)


@gluon.jit
def partial_sums(p):
    """Row sums as 8 parts a row, 2 a thread: no shuffle before the tile's end."""
    return gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def pivot_of(m, MASKED: gl.constexpr):
    """What to subtract: the running maximum, or 0 for a row that has met no key (-inf would give NaN)."""
    if MASKED:
        m = gl.where(m == -float("inf"), 0.0, m)
    return m


@gluon.jit
def mask_scores(s, key, first_key, end_key, columns, LEFT: gl.constexpr):
    """-inf where a row may not see a key of the block that starts at key."""
    s = gl.where((end_key - key)[:, None] > columns[None, :], s, -float("inf"))
    if LEFT:
        s = gl.where((first_key - key)[:, None] <= columns[None, :], s, -float("inf"))
    return s


@gluon.jit
def issue_scores(q, k_sm, k_full, count, zero, WG: gl.constexpr, CONSUMERS: gl.constexpr, PING_PONG: gl.constexpr, pred=True):
    """S = Q K^T of block count, in flight.

    With PING_PONG the two warpgroups take turns, so that one's softmax meets the other's products.
    """
    STAGES: gl.constexpr = k_sm.shape[0]
    stage = count % STAGES
    mbarrier.wait(k_full.index(stage), (count // STAGES) & 1, pred=pred)
    if PING_PONG:
        barrier_sync(TURN + WG, CONSUMERS * 128)
    s = warpgroup_mma(q, k_sm.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    if PING_PONG:
        barrier_arrive(TURN + 1 - WG, CONSUMERS * 128)
    return s


@gluon.jit
def step(
    acc, p, m_i, l_i, q, k_sm, v_sm, k_full, v_full, count, scale, key, first_key, end_key, columns, zero,
    WG: gl.constexpr, CONSUMERS: gl.constexpr, PING_PONG: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Block count: S = Q K^T; behind it P V of the block before; the softmax of S while that runs."""
    STAGES: gl.constexpr = k_sm.shape[0]
    stage = count % STAGES
    before = (count - 1) % STAGES
    s = issue_scores(q, k_sm, k_full, count, zero, WG, CONSUMERS, PING_PONG)
    mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v_sm.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    release(EMPTY_FIRST + stage, CONSUMERS)
    if MASKED:
        s = mask_scores(s, key, first_key, end_key, columns, LEFT)
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale)
    pivot = pivot_of(m_new, MASKED)
    p_new = gl.exp2(s * scale - pivot[:, None])
    alpha = gl.exp2(m_i - pivot)
    l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None] + partial_sums(p_new)
    p = gl.convert_layout(p_new.to(k_sm.dtype), p.type.layout)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(EMPTY_SECOND + before, CONSUMERS)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, p, m_new, l_i


@gluon.jit
def consumer(WG: gl.constexpr, desc_o, lse_ptr, buffers, sizes, scale, variant: gl.constexpr):
    CONSUMERS: gl.constexpr = variant[0]
    PING_PONG: gl.constexpr = variant[1]
    LEFT: gl.constexpr = variant[2]
    RIGHT: gl.constexpr = variant[3]
    ONE_MASKED: gl.constexpr = variant[4]
    PERSISTENT: gl.constexpr = variant[5]
    q_sm, k_sm, v_sm, tile, q_full, q_empty, k_full, v_full = buffers
    q_heads, q_len, kv_len, left, right = sizes
    BM: gl.constexpr = 64 * CONSUMERS
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
    row = tile_fact(tile, 0, 0)
    s = issue_scores(q_sm.index(WG), k_sm, k_full, count, zero, WG, CONSUMERS, PING_PONG)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(EMPTY_FIRST, CONSUMERS)
    while row >= 0:
        # here s holds the raw scores of the tile's first block
        slot = visit & 1
        q = q_sm.index(slot * CONSUMERS + WG)
        batch = tile_fact(tile, slot, 1)
        head = tile_fact(tile, slot, 2)
        first, full_first, full_end, end = key_blocks(row, q_len, kv_len, left, right, BM, BN, LEFT, RIGHT, ONE_MASKED)
        rows = row + offsets
        end_key = gl.minimum(rows + right + 1, kv_len)
        first_key = rows + left
        acc = gl.zeros([64, D], gl.float32, o_layout)
        if RIGHT:
            # an origin known at compile time lets LLVM fold half of P to 0, and ptxas then serialises every wgmma (C7511)
            s = mask_scores(s, (end - 1) * BN, first_key, end_key, columns, LEFT)
        m_i = gl.max(s, 1) * scale
        p_new = gl.exp2(s * scale - pivot_of(m_i, RIGHT)[:, None])
        l_i = partial_sums(p_new)
        p = gl.convert_layout(p_new.to(dtype), p_layout)
        count += 1
        if PERSISTENT:
            # the tile before has left shared memory by now: give its Q buffer, where its O was staged, back
            tma_store_wait(0)
            mbarrier.arrive(q_empty.index(slot ^ 1), pred=visit > 0)
        if RIGHT and not ONE_MASKED:
            for i in range(end - 1 - full_end):
                acc, p, m_i, l_i = step(
                    acc, p, m_i, l_i, q, k_sm, v_sm, k_full, v_full, count, scale, (end - 2 - i) * BN, first_key, end_key, columns,
                    zero, WG, CONSUMERS, PING_PONG, True, LEFT,
                )  # fmt: skip
                count += 1
        for _ in range(full_end - full_first):
            acc, p, m_i, l_i = step(
                acc, p, m_i, l_i, q, k_sm, v_sm, k_full, v_full, count, scale, 0, first_key, end_key, columns,
                zero, WG, CONSUMERS, PING_PONG, False, LEFT,
            )  # fmt: skip
            count += 1
        if LEFT:
            for i in range(full_first - first):
                acc, p, m_i, l_i = step(
                    acc, p, m_i, l_i, q, k_sm, v_sm, k_full, v_full, count, scale, (full_first - 1 - i) * BN, first_key, end_key, columns,
                    zero, WG, CONSUMERS, PING_PONG, True, LEFT,
                )  # fmt: skip
                count += 1
        # the tile's last P V, with the next tile's first Q K^T behind it
        visit += 1
        last = (count + STAGES - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((count + STAGES - 1) // STAGES - 1) & 1)
        acc = warpgroup_mma(p, v_sm.index(last), acc, is_async=True)
        next_row = -1
        if PERSISTENT:
            next_slot = visit & 1
            mbarrier.wait(q_full.index(next_slot), (visit >> 1) & 1)
            next_row = tile_fact(tile, next_slot, 0)
            s = issue_scores(
                q_sm.index(next_slot * CONSUMERS + WG), k_sm, k_full, count, zero, WG, CONSUMERS, PING_PONG, pred=next_row >= 0
            )
            acc = warpgroup_mma_wait(1, deps=(acc,))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        release(EMPTY_SECOND + last, CONSUMERS)
        l_i = gl.convert_layout(gl.sum(l_i, 1), row_layout)
        lse_row = (batch * q_heads + head).to(gl.int64) * q_len + row
        gl.store(lse_ptr + lse_row + offsets, (m_i + gl.log2(l_i)) * LN2, mask=rows < q_len)
        inverse = gl.where(l_i == 0.0, 0.0, 1.0 / l_i)  # a row with no key gives 0
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]
        if RIGHT:
            acc = gl.where(inverse == 0.0, 0.0, acc * inverse)  # also where a value that no key of the row stands for is not finite
        else:
            acc = acc * inverse
        q.store(acc.to(dtype))
        fence_async_shared()
        partition_barrier()
        tma_store(desc_o, [batch, head, row + WG * 64, 0], q)
        if PERSISTENT:
            s = warpgroup_mma_wait(0, deps=(s,))
            release(EMPTY_FIRST + count % STAGES, CONSUMERS, next_row >= 0)
        row = next_row
    tma_store_wait(0)


SIZES = ["tiles", "q_tiles", "q_heads", "group", "heads_in_group", "q_len", "kv_len", "left", "right"]


@gluon.jit(do_not_specialize=SIZES)  # one binary for all sizes
def attention_forward(
    desc_q, desc_k, desc_v, desc_o, lse_ptr, counter_ptr, scale, tiles, q_tiles, q_heads, group, heads_in_group, q_len, kv_len, left, right,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PING_PONG: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, ONE_MASKED: gl.constexpr, PERSISTENT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q (B, Hq, Sq, D), k and v (B, Hkv, Skv, D) -> o like q, lse (B, Hq, Sq) fp32, natural log.

    scale > 0. counter_ptr: one int32, 0 before and after. RIGHT: any bound on the last key (causal, window, a length
    that BN does not divide); LEFT: a bound on the first, needs RIGHT; ONE_MASKED: no tile has a second block that the
    right bound cuts.
    """
    BN: gl.constexpr = desc_k.block_type.shape[2]
    D: gl.constexpr = desc_k.block_type.shape[3]
    dtype: gl.constexpr = desc_k.dtype
    Q_BUFFERS: gl.constexpr = 2 if PERSISTENT else 1
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], dtype)
    q_sm = gl.allocate_shared_memory(dtype, [Q_BUFFERS * CONSUMERS, 64, D], q_layout)
    k_sm = gl.allocate_shared_memory(dtype, [STAGES, BN, D], kv_layout)
    v_sm = gl.allocate_shared_memory(dtype, [STAGES, BN, D], kv_layout)
    tile = gl.allocate_shared_memory(gl.int32, [2 * TILE_FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    buffers = (q_sm, k_sm, v_sm, tile, q_full, q_empty, k_full, v_full)
    sizes = (q_heads, q_len, kv_len, left, right)
    variant: gl.constexpr = (CONSUMERS, PING_PONG, LEFT, RIGHT, ONE_MASKED, PERSISTENT)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (gl.constexpr(0), desc_o, lse_ptr, buffers, sizes, scale * LOG2E, variant)),
                (consumer, (gl.constexpr(1), desc_o, lse_ptr, buffers, sizes, scale * LOG2E, variant)),
                (producer, (desc_q, desc_k, desc_v, counter_ptr, buffers, sizes, tiles, q_tiles, group, heads_in_group, variant)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (gl.constexpr(0), desc_o, lse_ptr, buffers, sizes, scale * LOG2E, variant)),
                (consumer, (gl.constexpr(1), desc_o, lse_ptr, buffers, sizes, scale * LOG2E, variant)),
                (consumer, (gl.constexpr(2), desc_o, lse_ptr, buffers, sizes, scale * LOG2E, variant)),
                (producer, (desc_q, desc_k, desc_v, counter_ptr, buffers, sizes, tiles, q_tiles, group, heads_in_group, variant)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
