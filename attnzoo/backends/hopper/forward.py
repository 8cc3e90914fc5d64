"""Attention forward for Hopper: O = softmax(scale Q K^T) V, and the log-sum-exp of each row.

One producer warp feeds CONSUMERS warpgroups of 64 query rows each by bulk tensor copies (TMA); docs/hopper.md draws
the schedule. A consumer computes the softmax of key block i while its P V of block i - 1 is still in flight.
Persistent: one to three CTAs an SM, tiles handed out by an atomic counter that the last claim resets; with two Q buffers the
first Q K^T of the next tile is issued with the last P V of this one, so that the epilogue runs under tensor work.
Rows and head-dim columns past a tensor's end are zero-filled by TMA on load and dropped on store. A head dim between
powers of two may come in two pieces (96 = 64 + 32, 192 = 128 + 64): shapes are powers of two here.
"""

from attnzoo.backends.hopper.barriers import (
    EMPTY_FIRST,
    EMPTY_SECOND,
    TURN,
    barrier_arrive,
    dependency_wait,
    draw,
    launch_dependents,
    uniform,
)
from attnzoo.backends.hopper.facts import allocate_facts, fact_at, put_facts
from attnzoo.backends.hopper.names import gl, gluon, mbarrier, tma_store_wait, warpgroup_mma_wait
from attnzoo.backends.hopper.products import issue_pieces, issue_values, wait_values
from attnzoo.backends.hopper.schedule import key_blocks, tile_at
from attnzoo.backends.hopper.softmax import LN2, LOG2E, by_row, mask_scores, partial_sums, pivot_of
from attnzoo.backends.hopper.stages import (
    allocate,
    barriers,
    drain,
    load_pieces,
    load_queries,
    pass_over,
    release,
    store_output,
    wait_for,
)

FACTS: gl.constexpr = gl.constexpr(3)  # what the producer tells of a tile: its first row (-1: no more tiles), batch, head


@gluon.jit
def producer(descs, counter_ptr, buffers, sizes, tiles, q_tiles, group, heads_in_group, variant: gl.constexpr):
    CONSUMERS: gl.constexpr = variant[0]
    LEFT: gl.constexpr = variant[2]
    RIGHT: gl.constexpr = variant[3]
    ONE_MASKED: gl.constexpr = variant[4]
    SECOND: gl.constexpr = variant[6]
    V_SECOND: gl.constexpr = variant[7]
    q_desc, k_desc, v_desc = descs[0], descs[1], descs[2]
    q_sm, k_sm, v_sm, tile, q_full, q_empty, k_full, v_full = buffers
    q_heads, q_len, kv_len, left, right = sizes
    BM: gl.constexpr = 64 * CONSUMERS
    BN: gl.constexpr = k_sm[0].shape[1]
    SLOTS: gl.constexpr = q_full.shape[0]
    count = 0
    visit = 0
    t = gl.program_id(0)
    dependency_wait()  # all that this launch reads comes through here, and all that it writes comes after
    while t < tiles:
        batch_head, q_tile = tile_at(t, q_tiles, tiles // q_tiles, heads_in_group)
        batch = batch_head // q_heads
        head = batch_head % q_heads
        row = q_tile * BM
        first, _, _, end = key_blocks(row, q_len, kv_len, left, right, BM, BN, LEFT, RIGHT, ONE_MASKED)
        slot = visit % SLOTS
        if SLOTS == 2:
            mbarrier.wait(q_empty.index(slot), ((visit // SLOTS) & 1) ^ 1)
            put_facts(tile, slot, (row, batch, head))
            load_queries(q_desc, q_sm, q_full, slot, batch, head, row, CONSUMERS, SECOND)
        ticket = 0
        for i in range(end - first):
            key = (end - 1 - i) * BN
            load_pieces(k_desc, k_sm, k_full, count, batch, head // group, key, EMPTY_FIRST, CONSUMERS, SECOND)
            if SLOTS == 1:
                if i == 0:  # the one Q buffer is free only when the tile before has left it: K comes first
                    mbarrier.wait(q_empty.index(0), (visit & 1) ^ 1)
                    put_facts(tile, 0, (row, batch, head))
                    load_queries(q_desc, q_sm, q_full, 0, batch, head, row, CONSUMERS, SECOND)
            if i == end - first - 1:
                # early enough to hide the atomic behind the wait for V's stage (+5% at head dim 128 against claiming after it),
                # and as late as that allows: claiming at the tile's start unbalances causal calls by 3-6%
                ticket = draw(counter_ptr)
            load_pieces(v_desc, v_sm, v_full, count, batch, head // group, key, EMPTY_SECOND, CONSUMERS, V_SECOND)
            count += 1
        visit += 1
        claimed = uniform(ticket)
        if claimed == tiles - 1:  # the last claim of the launch: leave the counter as it was found
            gl.store(counter_ptr, 0)
        t = gl.num_programs(0) + claimed
    launch_dependents()  # not before the last tile: until this grid ends they would only hold places that other streams could use
    slot = visit % SLOTS
    mbarrier.wait(q_empty.index(slot), ((visit // SLOTS) & 1) ^ 1)
    put_facts(tile, slot, (-1, 0, 0))
    mbarrier.arrive(q_full.index(slot), count=1)
    drain(count, EMPTY_FIRST, k_full.shape[0], CONSUMERS)
    drain(count, EMPTY_SECOND, v_full.shape[0], CONSUMERS)


@gluon.jit
def step(
    acc, acc_2, p, m_i, l_i, q, k_sm, v_sm, k_full, v_full, count, scale, key, first_key, end_key, columns, zero,
    WG: gl.constexpr, CONSUMERS: gl.constexpr, PING_PONG: gl.constexpr, CUT_RIGHT: gl.constexpr, CUT_LEFT: gl.constexpr,
    SECOND: gl.constexpr, V_SECOND: gl.constexpr,
):  # fmt: skip
    """Block count: S = Q K^T; behind it P V of the block before; the softmax of S while that runs."""
    MASKED: gl.constexpr = CUT_RIGHT or CUT_LEFT
    s = issue_pieces(q, k_sm, k_full, count, zero, WG, CONSUMERS, PING_PONG, SECOND)
    before = wait_for(v_full, count - 1)
    acc, acc_2 = issue_values(p, v_sm, before, acc, acc_2, V_SECOND)
    s = warpgroup_mma_wait(2 if V_SECOND else 1, deps=(s,))
    release(EMPTY_FIRST + count % k_full.shape[0], CONSUMERS)
    s = mask_scores(s, key, first_key, end_key, columns, CUT_RIGHT, CUT_LEFT)
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale)
    pivot = pivot_of(m_new, MASKED)
    p_new = gl.exp2(s * scale - pivot[:, None])
    alpha = gl.exp2(m_i - pivot)
    l_i = l_i * by_row(alpha, l_i) + partial_sums(p_new)
    p = gl.convert_layout(p_new.to(k_sm[0].dtype), p.type.layout)
    acc, acc_2 = wait_values(acc, acc_2, 0, V_SECOND)
    release(EMPTY_SECOND + before, CONSUMERS)
    acc = acc * by_row(alpha, acc)
    if V_SECOND:
        acc_2 = acc_2 * by_row(alpha, acc_2)
    return acc, acc_2, p, m_new, l_i


@gluon.jit
def rows_of(q_sm, part):
    """The pieces of one warpgroup's Q."""
    return q_sm[0].index(part), q_sm[1].index(part)


@gluon.jit
def blocks_of(
    row, sizes, BN: gl.constexpr, WG: gl.constexpr, CONSUMERS: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, ONE_MASKED: gl.constexpr, OWN_BLOCKS: gl.constexpr,
):  # fmt: skip
    """key_blocks of this warpgroup, and how many of the tile's blocks it passes over before and after its own."""
    _, q_len, kv_len, left, right = sizes
    first, full_first, full_end, end = key_blocks(row, q_len, kv_len, left, right, 64 * CONSUMERS, BN, LEFT, RIGHT, ONE_MASKED)
    before = 0
    after = 0
    if OWN_BLOCKS:
        tile_first = first
        tile_end = end
        first, full_first, full_end, end = key_blocks(row + WG * 64, q_len, kv_len, left, right, 64, BN, LEFT, RIGHT, ONE_MASKED)
        before = tile_end - end
        after = first - tile_first
    return first, full_first, full_end, end, before, after


@gluon.jit
def begin_tile(visit, count, buffers, sizes, zero, WG: gl.constexpr, variant: gl.constexpr):
    """(first row, count, S): waits for the next tile's Q and issues its first Q K^T; a row of -1: there is no tile."""
    CONSUMERS: gl.constexpr = variant[0]
    PING_PONG: gl.constexpr = variant[1]
    LEFT: gl.constexpr = variant[2]
    RIGHT: gl.constexpr = variant[3]
    ONE_MASKED: gl.constexpr = variant[4]
    OWN_BLOCKS: gl.constexpr = variant[5]
    SECOND: gl.constexpr = variant[6]
    q_sm, k_sm, _v_sm, tile, q_full, _q_empty, k_full, v_full = buffers
    SLOTS: gl.constexpr = q_full.shape[0]
    slot = visit % SLOTS
    mbarrier.wait(q_full.index(slot), (visit // SLOTS) & 1)
    row = fact_at(tile, slot * FACTS)
    if OWN_BLOCKS and RIGHT:
        if row >= 0:
            before = blocks_of(row, sizes, k_sm[0].shape[1], WG, CONSUMERS, LEFT, RIGHT, ONE_MASKED, OWN_BLOCKS)[4]
            count = pass_over(k_full, v_full, count, before, CONSUMERS)
    q = rows_of(q_sm, slot * CONSUMERS + WG)
    s = issue_pieces(q, k_sm, k_full, count, zero, WG, CONSUMERS, PING_PONG, SECOND, pred=row >= 0)
    return row, count, s


@gluon.jit
def consumer(WG: gl.constexpr, descs, lse_ptr, buffers, sizes, scale, variant: gl.constexpr):
    CONSUMERS: gl.constexpr = variant[0]
    PING_PONG: gl.constexpr = variant[1]
    LEFT: gl.constexpr = variant[2]
    RIGHT: gl.constexpr = variant[3]
    ONE_MASKED: gl.constexpr = variant[4]
    OWN_BLOCKS: gl.constexpr = variant[5]
    SECOND: gl.constexpr = variant[6]
    V_SECOND: gl.constexpr = variant[7]
    Q_REGISTERS: gl.constexpr = variant[8]
    q_sm, k_sm, v_sm, tile, q_full, q_empty, k_full, v_full = buffers
    q_heads, q_len, kv_len, left, right = sizes
    SLOTS: gl.constexpr = q_full.shape[0]
    EARLY: gl.constexpr = SLOTS == 2  # the next tile begins before this one's epilogue
    BN: gl.constexpr = k_sm[0].shape[1]
    D: gl.constexpr = v_sm[0].shape[2]
    dtype: gl.constexpr = k_sm[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    D2: gl.constexpr = V_SECOND if V_SECOND else 16  # then it is never used
    o2_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D2, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([64, BN], gl.float32, s_layout)
    offsets = WG * 64 + gl.arange(0, 64, layout=row_layout)
    columns = gl.arange(0, BN, layout=gl.SliceLayout(0, s_layout))
    if PING_PONG and WG == 1:
        barrier_arrive(TURN, CONSUMERS * 128)
    visit = 0
    count = 0
    row, count, s = begin_tile(visit, count, buffers, sizes, zero, WG, variant)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(EMPTY_FIRST + count % k_full.shape[0], CONSUMERS)
    while row >= 0:
        # here s holds the raw scores of the tile's first block
        slot = visit % SLOTS
        q = rows_of(q_sm, slot * CONSUMERS + WG)
        q_first, q_second = q
        if Q_REGISTERS:  # here no product is in flight, under which ptxas would not let an operand be written
            q_first = q_first.load(q_layout)
            if SECOND:
                q_second = q_second.load(q_layout)
        operands = (q_first, q_second)
        batch = fact_at(tile, slot * FACTS + 1)
        head = fact_at(tile, slot * FACTS + 2)
        first, full_first, full_end, end, _, after = blocks_of(
            row, sizes, BN, WG, CONSUMERS, LEFT, RIGHT, ONE_MASKED, OWN_BLOCKS
        )  # fmt: skip
        rows = row + offsets
        end_key = gl.minimum(rows + right + 1, kv_len)
        first_key = rows + left
        acc = gl.zeros([64, D], gl.float32, o_layout)
        acc_2 = gl.zeros([64, D2], gl.float32, o2_layout)
        if RIGHT:
            # an origin known at compile time lets LLVM fold half of P to 0, and ptxas then serialises every wgmma (C7511)
            s = mask_scores(s, (end - 1) * BN, first_key, end_key, columns, True, False)
        if LEFT:
            last_row = row + (WG * 64 + 63 if OWN_BLOCKS else 64 * CONSUMERS - 1)
            if (end - 1) * BN < last_row + left:  # a window so narrow that both its bounds cut one block
                s = mask_scores(s, (end - 1) * BN, first_key, end_key, columns, False, True)
        m_i = gl.max(s, 1) * scale
        p_new = gl.exp2(s * scale - pivot_of(m_i, RIGHT)[:, None])
        l_i = partial_sums(p_new)
        p = gl.convert_layout(p_new.to(dtype), p_layout)
        count += 1
        if EARLY:
            # the tile before has left shared memory by now: give its Q buffer, where its O was staged, back
            tma_store_wait(0)
            mbarrier.arrive(q_empty.index(slot ^ 1), pred=visit > 0)
        if RIGHT and not ONE_MASKED:
            for i in range(end - 1 - full_end):
                acc, acc_2, p, m_i, l_i = step(
                    acc, acc_2, p, m_i, l_i, operands, k_sm, v_sm, k_full, v_full, count, scale, (end - 2 - i) * BN,
                    first_key, end_key, columns, zero, WG, CONSUMERS, PING_PONG, True, LEFT, SECOND, V_SECOND,
                )  # fmt: skip
                count += 1
        for _ in range(full_end - full_first):
            acc, acc_2, p, m_i, l_i = step(
                acc, acc_2, p, m_i, l_i, operands, k_sm, v_sm, k_full, v_full, count, scale, 0, first_key, end_key,
                columns, zero, WG, CONSUMERS, PING_PONG, False, False, SECOND, V_SECOND,
            )  # fmt: skip
            count += 1
        if LEFT:
            for i in range(full_first - first):
                acc, acc_2, p, m_i, l_i = step(
                    acc, acc_2, p, m_i, l_i, operands, k_sm, v_sm, k_full, v_full, count, scale, (full_first - 1 - i) * BN,
                    first_key, end_key, columns, zero, WG, CONSUMERS, PING_PONG, False, True, SECOND, V_SECOND,
                )  # fmt: skip
                count += 1
        # the tile's last P V, with the next tile's first Q K^T behind it
        visit += 1
        last = wait_for(v_full, count - 1)
        acc, acc_2 = issue_values(p, v_sm, last, acc, acc_2, V_SECOND)
        if OWN_BLOCKS and LEFT:
            count = pass_over(k_full, v_full, count, after, CONSUMERS)
        if EARLY:
            next_row, count, s = begin_tile(visit, count, buffers, sizes, zero, WG, variant)
            acc, acc_2 = wait_values(acc, acc_2, 2 if SECOND else 1, V_SECOND)
        else:
            acc, acc_2 = wait_values(acc, acc_2, 0, V_SECOND)
        release(EMPTY_SECOND + last, CONSUMERS)
        l_i = gl.convert_layout(gl.sum(l_i, 1), row_layout)
        lse_row = (batch * q_heads + head).to(gl.int64) * q_len + row
        gl.store(lse_ptr + lse_row + offsets, (m_i + gl.log2(l_i)) * LN2, mask=rows < q_len)
        inverse = gl.where(l_i == 0.0, 0.0, 1.0 / l_i)  # a row with no key gives 0
        store_output(descs[3][0], acc, inverse, q[0], batch, head, row + WG * 64, 0, RIGHT)
        if V_SECOND:
            store_output(descs[3][1], acc_2, inverse, q[1], batch, head, row + WG * 64, D, RIGHT)
        if not EARLY:
            tma_store_wait(0)
            mbarrier.arrive(q_empty.index(slot))
            next_row, count, s = begin_tile(visit, count, buffers, sizes, zero, WG, variant)
        s = warpgroup_mma_wait(0, deps=(s,))
        release(EMPTY_FIRST + count % k_full.shape[0], CONSUMERS, next_row >= 0)
        row = next_row
    tma_store_wait(0)


SIZES = ["tiles", "q_tiles", "q_heads", "group", "heads_in_group", "q_len", "kv_len", "left", "right"]


@gluon.jit(do_not_specialize=SIZES)  # one binary for all sizes
def attention_forward(
    desc_q, desc_k, desc_v, desc_o, desc_q2, desc_k2, desc_v2, desc_o2, lse_ptr, counter_ptr, scale,
    tiles, q_tiles, q_heads, group, heads_in_group, q_len, kv_len, left, right,
    CONSUMERS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, PING_PONG: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, ONE_MASKED: gl.constexpr, Q_SLOTS: gl.constexpr,
    OWN_BLOCKS: gl.constexpr, SECOND: gl.constexpr, V_SECOND: gl.constexpr, Q_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv) -> o (B, Hq, Sq, Dv), lse (B, Hq, Sq) fp32, natural log.

    scale > 0. counter_ptr: one int32, 0 before and after. RIGHT: any bound on the last key (causal, window, a length
    that BN does not divide); LEFT: a bound on the first, needs RIGHT; ONE_MASKED: no tile (with OWN_BLOCKS: no
    warpgroup) has a second block that the right bound cuts. OWN_BLOCKS: a warpgroup computes only the blocks that its
    own rows see. SECOND, V_SECOND: columns of the second piece of the head dim and of the values' dim, or 0; the
    descriptors with a 2 are theirs, else None. V's first piece has as many columns as Q's, where O is staged. Q_REGISTERS:
    but for a tile's first block, Q is an operand in registers.
    """
    BN: gl.constexpr = desc_k.block_type.shape[2]
    D: gl.constexpr = desc_k.block_type.shape[3]
    dtype: gl.constexpr = desc_k.dtype
    q_sm = allocate(dtype, Q_SLOTS * CONSUMERS, 64, D, SECOND)
    k_sm = allocate(dtype, K_STAGES, BN, D, SECOND)
    v_sm = allocate(dtype, V_STAGES, BN, desc_v.block_type.shape[3], V_SECOND)
    tile = allocate_facts(Q_SLOTS * FACTS)
    buffers = (q_sm, k_sm, v_sm, tile, barriers(Q_SLOTS, 1), barriers(Q_SLOTS, CONSUMERS), barriers(K_STAGES, 1), barriers(V_STAGES, 1))
    sizes = (q_heads, q_len, kv_len, left, right)
    if not SECOND:
        desc_q2, desc_k2 = desc_q, desc_k
    if not V_SECOND:
        desc_v2, desc_o2 = desc_v, desc_o
    descs = ((desc_q, desc_q2), (desc_k, desc_k2), (desc_v, desc_v2), (desc_o, desc_o2))
    variant: gl.constexpr = (CONSUMERS, PING_PONG, LEFT, RIGHT, ONE_MASKED, OWN_BLOCKS, SECOND, V_SECOND, Q_REGISTERS)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consumer, (gl.constexpr(0), descs, lse_ptr, buffers, sizes, scale * LOG2E, variant)),
                (producer, (descs, counter_ptr, buffers, sizes, tiles, q_tiles, group, heads_in_group, variant)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (gl.constexpr(0), descs, lse_ptr, buffers, sizes, scale * LOG2E, variant)),
                (consumer, (gl.constexpr(1), descs, lse_ptr, buffers, sizes, scale * LOG2E, variant)),
                (producer, (descs, counter_ptr, buffers, sizes, tiles, q_tiles, group, heads_in_group, variant)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (gl.constexpr(0), descs, lse_ptr, buffers, sizes, scale * LOG2E, variant)),
                (consumer, (gl.constexpr(1), descs, lse_ptr, buffers, sizes, scale * LOG2E, variant)),
                (consumer, (gl.constexpr(2), descs, lse_ptr, buffers, sizes, scale * LOG2E, variant)),
                (producer, (descs, counter_ptr, buffers, sizes, tiles, q_tiles, group, heads_in_group, variant)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
