"""Attention backward for Hopper: dQ, dK and dV in one pass of five products; docs/hopper.md draws the schedule.

A CTA owns BN keys of one key head: it walks the query blocks that see them, of all query heads of the group, so that
dK and dV stay in registers and need no atomics. With P = exp(S - lse), dP = dO V^T and dS = P (dP - delta):
dV += P^T dO, dK += dS^T Q, dQ += dS K. Keys are the rows of every tile (S^T = K Q^T, dP^T = V dO^T), so that P^T and
dS^T are register operands of dV and dK; only dS^T goes through shared memory, for dQ, which the two consumer
warpgroups split along the queries where each gets 64 of them, the rows of an instruction, else along the head dim. The
fp32 dQ tile leaves by TMA from a warp of its own: the first CTA to reach a query block stores it, the others add to it,
so that nobody has to zero it.
"""

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
from attnzoo.backends.hopper.schedule import query_blocks

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
READERS: gl.constexpr = gl.constexpr(2 * 128 + 32)  # threads at a stage's barrier: two consumer warpgroups and the producer warp
WRITERS: gl.constexpr = gl.constexpr(128 + 32)  # at the barrier of a half of dQ: the warpgroup that wrote it and the dq writer
FAR: gl.constexpr = gl.constexpr(2**30)  # beyond every position


@gluon.jit
def place(kv_heads, width):
    """(batch, key head) of this CTA.

    Grid: (width, key blocks, groups of width heads): a group is walked block by block across its heads, the first keys
    first, which under a causal mask meet the most queries.
    """
    batch_head = gl.program_id(2) * width + gl.program_id(0)
    return batch_head // kv_heads, batch_head % kv_heads


@gluon.jit
def next_block(head, row, first_row, start_row, end_row, BM: gl.constexpr):
    """The query block after (head, row): round the rows once from start_row, then the next head."""
    row += BM
    if row >= end_row:
        row = first_row
    if row == start_row:
        head += 1
    return head, row


@gluon.jit
def producer(
    desc_q, desc_k, desc_v, desc_do, desc_lse, desc_delta, kv, queries, walk, q_heads, kv_heads, group, width,
):  # fmt: skip
    k_sm, v_sm, kv_full = kv
    q_sm, do_sm, lse_sm, delta_sm, q_full, do_full = queries
    first_row, start_row, end_row, steps = walk
    batch, kv_head = place(kv_heads, width)
    STAGES: gl.constexpr = q_sm.shape[0]
    BM: gl.constexpr = q_sm.shape[1]
    key = gl.program_id(1) * k_sm.shape[0]
    mbarrier.expect(kv_full.index(0), desc_k.block_type.nbytes)
    tma_load(desc_k, [batch, kv_head, key, 0], kv_full.index(0), k_sm)
    dependency_wait()
    head = kv_head * group
    row = start_row
    for i in range(steps):
        stage = i % STAGES
        if i >= STAGES:
            barrier_sync(EMPTY_FIRST + stage, READERS)
        mbarrier.expect(q_full.index(stage), desc_q.block_type.nbytes + BM * 4)
        tma_load(desc_q, [batch, head, row, 0], q_full.index(stage), q_sm.index(stage))
        tma_load(desc_lse, [batch * q_heads + head, row], q_full.index(stage), lse_sm.index(stage))
        if i == 0:
            mbarrier.expect(kv_full.index(1), desc_v.block_type.nbytes)
            tma_load(desc_v, [batch, kv_head, key, 0], kv_full.index(1), v_sm)
        if i >= STAGES:
            barrier_sync(EMPTY_SECOND + stage, READERS)
        mbarrier.expect(do_full.index(stage), desc_do.block_type.nbytes + BM * 4)
        tma_load(desc_do, [batch, head, row, 0], do_full.index(stage), do_sm.index(stage))
        tma_load(desc_delta, [batch * q_heads + head, row], do_full.index(stage), delta_sm.index(stage))
        head, row = next_block(head, row, first_row, start_row, end_row, BM)
    if steps == 0:
        mbarrier.arrive(kv_full.index(1), count=1)  # nobody sees these keys: V is not needed
    for i in range(gl.maximum(steps - STAGES, 0), steps):  # leave no named barrier half full
        barrier_sync(EMPTY_FIRST + i % STAGES, READERS)
        barrier_sync(EMPTY_SECOND + i % STAGES, READERS)


@gluon.jit
def dq_writer(desc_dq, state_ptr, dqs, walk, q_heads, kv_heads, group, width, q_blocks, BM: gl.constexpr):
    dq_sm, dq_empty = dqs
    first_row, start_row, end_row, steps = walk
    batch, kv_head = place(kv_heads, width)
    ROWS: gl.constexpr = dq_sm.shape[1] % BM  # from one half to the other: BM is 0, since then the columns are halved
    COLUMNS: gl.constexpr = 0 if ROWS else dq_sm.shape[2]
    dependency_wait()
    head = kv_head * group
    row = start_row
    for _ in range(steps):
        block_state = state_ptr + (batch * q_heads + head) * q_blocks + row // BM
        is_first = claim(block_state)
        for wg in gl.static_range(2):
            barrier_sync(DQ_FULL + wg, WRITERS)
            if is_first:
                tma_store(desc_dq, [batch * q_heads + head, row + wg * ROWS, wg * COLUMNS], dq_sm.index(wg))
            else:
                tma_add(desc_dq, [batch * q_heads + head, row + wg * ROWS, wg * COLUMNS], dq_sm.index(wg))
        for wg in gl.static_range(2):
            tma_store_wait(1 - wg)
            mbarrier.arrive(dq_empty.index(wg), count=1)
        if is_first:
            publish(block_state)
        head, row = next_block(head, row, first_row, start_row, end_row, BM)


@gluon.jit
def consumer(
    WG: gl.constexpr, desc_dk, desc_dv, scale, kv, queries, ds_sm, dqs, walk, kv_heads, width, bounds,
    variant: gl.constexpr,
):  # fmt: skip
    LEFT: gl.constexpr = variant[0]
    RIGHT: gl.constexpr = variant[1]
    LSE_EARLY: gl.constexpr = variant[2]
    k_sm, v_sm, kv_full = kv
    q_sm, do_sm, lse_sm, delta_sm, q_full, do_full = queries
    dq_sm, dq_empty = dqs
    first_row, start_row, end_row, steps = walk
    kv_len, left, right = bounds
    STAGES: gl.constexpr = q_sm.shape[0]
    BM: gl.constexpr = q_sm.shape[1]
    BN: gl.constexpr = k_sm.shape[0]
    D: gl.constexpr = k_sm.shape[1]
    key = gl.program_id(1) * BN
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
    keys = WG * HALF_N + gl.arange(0, HALF_N, layout=gl.SliceLayout(1, s_layout))  # within the block
    cut_below = gl.where(key + BN > kv_len, FAR, key + BN - 1 - right)  # query blocks that start before this need the right mask
    cut_above = key - left - BM + 1  # and those after this the left one
    k_half = k_sm.slice(WG * HALF_N, HALF_N, 0)
    v_half = v_sm.slice(WG * HALF_N, HALF_N, 0)
    k_dq = k_sm if DQ_ROWS < BM else k_sm.slice(WG * DQ_COLUMNS, DQ_COLUMNS, 1)
    row = start_row
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(kv_full.index(1), 0)
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
        if RIGHT:
            if row < cut_below:
                first_query = gl.where(keys < kv_len - key, keys + (key - right - row), FAR)  # a key past the end is seen by none
                s = gl.where(first_query[:, None] <= columns[None, :], s, -float("inf"))
        if LEFT:
            if row > cut_above:
                s = gl.where((keys + (key - left - row))[:, None] >= columns[None, :], s, -float("inf"))
        if not LSE_EARLY:
            lse = lse_sm.index(stage).load(column)
        p = gl.exp2(s * scale - lse[None, :])  # 0 for rows past the end and rows without keys, whose lse here is inf
        p16 = gl.convert_layout(p.to(dtype), operand)
        if LSE_EARLY:
            # it has come long ago: a branch, over which ptxas does not hoist the next wait; 3% of a full backward at head dim 128
            mbarrier.wait(do_full.index(stage), phase)
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
        row += BM
        if row >= end_row:
            row = first_row
    dk = dk * (scale / LOG2E)
    barrier_sync(EXCHANGE, 256)  # K is an operand of the other warpgroup's dQ: both must be done with it
    k_half.store(dk.to(dtype))
    v_half.store(dv.to(dtype))
    fence_async_shared()
    partition_barrier()
    batch, kv_head = place(kv_heads, width)  # worked out here: three registers fewer in the loop
    tma_store(desc_dk, [batch, kv_head, key + WG * HALF_N, 0], k_half)
    tma_store(desc_dv, [batch, kv_head, key + WG * HALF_N, 0], v_half)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["q_heads", "kv_heads", "group", "width", "q_len", "q_blocks", "kv_len", "left", "right"])
def attention_backward(
    desc_q, desc_k, desc_v, desc_do, desc_lse, desc_delta, desc_dq, desc_dk, desc_dv, state_ptr, scale,
    q_heads, kv_heads, group, width, q_len, q_blocks, kv_len, left, right,
    STAGES: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, LSE_EARLY: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes dQ / scale to desc_dq (B Hq, Sq, D) fp32, and dK and dV like k and v, zeros for keys that nobody sees.

    state_ptr: a zero a head and query block; where it is still zero at the end no key is seen and dQ is not written.

    desc_lse, desc_delta: (B Hq, Sq padded) fp32, as backward_pre makes them. RIGHT: any bound on the last key or a
    length that BN does not divide; LEFT: a bound on the first.
    Grid: see place.
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
    first_block, blocks = query_blocks(gl.program_id(1) * BN, q_len, left, right, BM, BN, LEFT, RIGHT)
    turn = 0
    if not RIGHT:
        # CTAs side by side start at different query blocks: each finds one to store, and none waits for another; a diagonal does as much
        turn = gl.program_id(1) * (BN // BM) % gl.maximum(blocks, 1)
    walk = (first_block * BM, (first_block + turn) * BM, (first_block + blocks) * BM, blocks * group)
    launch_dependents()
    kv = (k_sm, v_sm, kv_full)
    queries = (q_sm, do_sm, lse_sm, delta_sm, q_full, do_full)
    dqs = (dq_sm, dq_empty)
    bounds = (kv_len, left, right)
    variant: gl.constexpr = (LEFT, RIGHT, LSE_EARLY)
    gl.warp_specialize(
        [
            (consumer, (gl.constexpr(0), desc_dk, desc_dv, scale * LOG2E, kv, queries, ds_sm, dqs, walk, kv_heads, width, bounds, variant)),
            (consumer, (gl.constexpr(1), desc_dk, desc_dv, scale * LOG2E, kv, queries, ds_sm, dqs, walk, kv_heads, width, bounds, variant)),
            (producer, (desc_q, desc_k, desc_v, desc_do, desc_lse, desc_delta, kv, queries, walk, q_heads, kv_heads, group, width)),
            (dq_writer, (desc_dq, state_ptr, dqs, walk, q_heads, kv_heads, group, width, q_blocks, BM)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
