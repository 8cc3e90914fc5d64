"""Attention backward for Hopper: dQ, dK and dV in one pass of five products; docs/hopper.md draws the schedule.

A CTA owns BN keys of one key head: it walks the query blocks that see them, of all query heads of the group, so that
dK and dV stay in registers and need no atomics. With P = exp(S - lse), dP = dO V^T and dS = P (dP - delta):
dV += P^T dO, dK += dS^T Q, dQ += dS K. Keys are the rows of every tile (S^T = K Q^T, dP^T = V dO^T), so that P^T and
dS^T are register operands of dV and dK; only dS^T goes through shared memory, for dQ, which the two consumer
warpgroups split along the queries where each gets 64 of them, the rows of an instruction, else along the head dim. The
fp32 dQ tile leaves by TMA from a warp of its own: the first CTA to reach a query block stores it, the others add to it,
so that nobody has to zero it.
"""

from attnzoo.backends.hopper.backward_block import (
    LOG2E,
    READERS,
    add_products,
    addresses,
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
from attnzoo.backends.hopper.barriers import EMPTY_FIRST, EMPTY_SECOND, barrier_sync, dependency_wait, launch_dependents
from attnzoo.backends.hopper.names import gl, gluon, mbarrier
from attnzoo.backends.hopper.schedule import query_blocks

FAR: gl.constexpr = gl.constexpr(2**30)  # beyond every position


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
def producer(desc_k, descs, kv, queries, walk, q_heads, kv_heads, group, width):
    first_row, start_row, end_row, steps = walk
    batch, kv_head = place(kv_heads, width)
    STAGES: gl.constexpr = queries[0].shape[0]
    BM: gl.constexpr = queries[0].shape[1]
    key = gl.program_id(1) * kv[0].shape[0]
    load_keys(desc_k, kv, batch, kv_head, key)
    dependency_wait()
    head = kv_head * group
    row = start_row
    for i in range(steps):
        await_stage(EMPTY_FIRST, i, STAGES)
        load_query_block(descs, kv, queries, i, batch, head, q_heads, row, kv_head, key)
        head, row = next_block(head, row, first_row, start_row, end_row, BM)
    if steps == 0:
        mbarrier.arrive(kv[2].index(1), count=1)  # nobody sees these keys: V is not needed
    # Leave no barrier half full. In one loop: beside two, what all partitions begin with is hoisted above their branch, into registers.
    for i in range(gl.maximum(steps - STAGES, 0), steps):
        barrier_sync(EMPTY_FIRST + i % STAGES, READERS)
        barrier_sync(EMPTY_SECOND + i % STAGES, READERS)


@gluon.jit
def dq_writer(desc_dq, state_ptr, dqs, walk, q_heads, kv_heads, group, width, q_blocks, BM: gl.constexpr):
    first_row, start_row, end_row, steps = walk
    batch, kv_head = place(kv_heads, width)
    dependency_wait()
    head = kv_head * group
    row = start_row
    for _ in range(steps):
        block_state = state_ptr + (batch * q_heads + head) * q_blocks + row // BM
        send_dq(desc_dq, block_state, dqs, batch * q_heads + head, row, BM)
        head, row = next_block(head, row, first_row, start_row, end_row, BM)


@gluon.jit
def consumer(
    WG: gl.constexpr, desc_dk, desc_dv, scale, buffers, walk, kv_heads, width, bounds, variant: gl.constexpr
):  # fmt: skip
    LEFT: gl.constexpr = variant[0]
    RIGHT: gl.constexpr = variant[1]
    LSE_EARLY: gl.constexpr = variant[2]
    kv, queries, ds_sm, dqs, seen_sm = buffers
    first_row, start_row, end_row, steps = walk
    kv_len, left, right = bounds
    BM: gl.constexpr = queries[0].shape[1]
    BN: gl.constexpr = kv[0].shape[0]
    key = gl.program_id(1) * BN
    operands, zeros, dk, dv = begin(WG, kv, queries, dqs)
    keys, columns = positions(WG, zeros[0])
    # From memory, where a block is cut: held in registers, or worked out again, they spill in the loop (1 to 3% slower)
    if RIGHT:
        first_query = seen_sm.index(0).slice(WG * (BN // 2), BN // 2, 0)
        first_query.store(gl.where(keys < kv_len - key, keys + (key - right), FAR))  # a key past the end is seen by none
    if LEFT:
        last_query = seen_sm.index(1).slice(WG * (BN // 2), BN // 2, 0)
        last_query.store(keys + (key - left))
    cut_below = gl.where(key + BN > kv_len, FAR, key + BN - 1 - right)  # query blocks that start before this need the right mask
    cut_above = key - left - BM + 1  # and those after this the left one
    row = start_row
    mbarrier.wait(kv[2].index(0), 0)
    mbarrier.wait(kv[2].index(1), 0)
    for i in range(steps):
        known = addresses(WG, queries, ds_sm, i)
        s, dp, lse = issue_scores(operands, queries, zeros, i, known, LSE_EARLY)
        if RIGHT:
            if row < cut_below:
                first = first_query.load(gl.SliceLayout(1, s.type.layout)) - row
                s = gl.where(first[:, None] <= columns[None, :], s, -float("inf"))
        if LEFT:
            if row > cut_above:
                last = last_query.load(gl.SliceLayout(1, s.type.layout)) - row
                s = gl.where(last[:, None] >= columns[None, :], s, -float("inf"))
        dk, dv = add_products(WG, s, dp, lse, dk, dv, scale, operands, queries, zeros, ds_sm, dqs, i, known, LSE_EARLY)
        row += BM
        if row >= end_row:
            row = first_row
    put_sums(dk, dv, scale, operands)
    batch, kv_head = place(kv_heads, width)  # worked out here: three registers fewer in the loop
    store_sums(desc_dk, desc_dv, operands, batch, kv_head, key + WG * (BN // 2))


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
    Grid: see `backward_block.place`.
    """
    BM: gl.constexpr = desc_q.block_type.shape[2]
    BN: gl.constexpr = desc_k.block_type.shape[2]
    kv, queries, dqs, ds_sm = allocate(desc_q, desc_k, desc_dq, STAGES)
    first_block, blocks = query_blocks(gl.program_id(1) * BN, q_len, left, right, BM, BN, LEFT, RIGHT)
    turn = 0
    if not RIGHT:
        # CTAs side by side start at different query blocks: each finds one to store, and none waits for another; a diagonal does as much
        turn = gl.program_id(1) * (BN // BM) % gl.maximum(blocks, 1)
    walk = (first_block * BM, (first_block + turn) * BM, (first_block + blocks) * BM, blocks * group)
    seen_sm = 0
    if RIGHT:  # the first query that sees a key, and the last one
        seen_sm = gl.allocate_shared_memory(gl.int32, [2 if LEFT else 1, BN], gl.NVMMASharedLayout(0, 32, rank=1))
    launch_dependents()
    descs = (desc_q, desc_v, desc_do, desc_lse, desc_delta)
    buffers = (kv, queries, ds_sm, dqs, seen_sm)
    bounds = (kv_len, left, right)
    variant: gl.constexpr = (LEFT, RIGHT, LSE_EARLY)
    gl.warp_specialize(
        [
            (consumer, (gl.constexpr(0), desc_dk, desc_dv, scale * LOG2E, buffers, walk, kv_heads, width, bounds, variant)),
            (consumer, (gl.constexpr(1), desc_dk, desc_dv, scale * LOG2E, buffers, walk, kv_heads, width, bounds, variant)),
            (producer, (desc_k, descs, kv, queries, walk, q_heads, kv_heads, group, width)),
            (dq_writer, (desc_dq, state_ptr, dqs, walk, q_heads, kv_heads, group, width, q_blocks, BM)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
