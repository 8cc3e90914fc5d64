"""One query block of the backward, for the dense kernel and the one over a layout: how it comes, its five products, how its dQ leaves.

`buffers` is what `allocate` returns. `hopper.backward` explains the schedule, the two kernels differ in the blocks that
they walk and in which scores they mask, which comes between `issue_scores` and `add_products`.
"""

from attnzoo.backends.hopper.barriers import (
    DQ_FULL,
    EMPTY_FIRST,
    EMPTY_SECOND,
    EXCHANGE,
    barrier_arrive,
    barrier_sync,
    claim,
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

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
READERS: gl.constexpr = gl.constexpr(2 * 128 + 32)  # threads at a stage's barrier: two consumer warpgroups and the producer warp
WRITERS: gl.constexpr = gl.constexpr(128 + 32)  # at the barrier of a half of dQ: the warpgroup that wrote it and the dq writer


@gluon.jit
def place(kv_heads, width):
    """(batch, key head) of this CTA.

    Grid: (width, key blocks, groups of width heads): a group is walked block by block across its heads, the first keys
    first, which under a causal mask meet the most queries.
    """
    batch_head = gl.program_id(2) * width + gl.program_id(0)
    return batch_head // kv_heads, batch_head % kv_heads


@gluon.jit
def allocate(desc_q, desc_k, desc_dq, STAGES: gl.constexpr):
    """Shared memory and barriers: K and V, the stages of the queries, the two halves of dQ, and two dS."""
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
    return (k_sm, v_sm, kv_full), (q_sm, do_sm, lse_sm, delta_sm, q_full, do_full), (dq_sm, dq_empty), ds_sm


@gluon.jit
def load_keys(desc_k, kv, batch, kv_head, key):
    k_sm, _, kv_full = kv
    mbarrier.expect(kv_full.index(0), desc_k.block_type.nbytes)
    tma_load(desc_k, [batch, kv_head, key, 0], kv_full.index(0), k_sm)


@gluon.jit
def await_stage(EMPTY: gl.constexpr, count, STAGES: gl.constexpr):
    """The stage of the count-th query block of this CTA, once both consumers have left the half of it behind the barrier."""
    stage = count % STAGES
    if count >= STAGES:
        barrier_sync(EMPTY + stage, READERS)
    return stage


@gluon.jit
def load_query_block(descs, kv, queries, count, batch, head, q_heads, row, kv_head, key):
    """Copy the count-th query block into its stage, whose first half is free; the first one asks for V as well."""
    desc_q, desc_v, desc_do, desc_lse, desc_delta = descs
    _, v_sm, kv_full = kv
    q_sm, do_sm, lse_sm, delta_sm, q_full, do_full = queries
    STAGES: gl.constexpr = q_sm.shape[0]
    BM: gl.constexpr = q_sm.shape[1]
    stage = count % STAGES
    mbarrier.expect(q_full.index(stage), desc_q.block_type.nbytes + BM * 4)
    tma_load(desc_q, [batch, head, row, 0], q_full.index(stage), q_sm.index(stage))
    tma_load(desc_lse, [batch * q_heads + head, row], q_full.index(stage), lse_sm.index(stage))
    if count == 0:
        mbarrier.expect(kv_full.index(1), desc_v.block_type.nbytes)
        tma_load(desc_v, [batch, kv_head, key, 0], kv_full.index(1), v_sm)
    await_stage(EMPTY_SECOND, count, STAGES)
    mbarrier.expect(do_full.index(stage), desc_do.block_type.nbytes + BM * 4)
    tma_load(desc_do, [batch, head, row, 0], do_full.index(stage), do_sm.index(stage))
    tma_load(desc_delta, [batch * q_heads + head, row], do_full.index(stage), delta_sm.index(stage))


@gluon.jit
def send_dq(desc_dq, block_state, dqs, batch_head, row, BM: gl.constexpr):
    """Store or add both halves of a query block's dQ, as soon as the consumers have written them."""
    dq_sm, dq_empty = dqs
    ROWS: gl.constexpr = dq_sm.shape[1] % BM  # from one half to the other: BM is 0, since then the columns are halved
    COLUMNS: gl.constexpr = 0 if ROWS else dq_sm.shape[2]
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


@gluon.jit
def begin(WG: gl.constexpr, kv, queries, dqs):
    """What a consumer keeps: its halves of K and V and its part of K for dQ, zeros of S and dQ, its sums dK and dV."""
    k_sm, v_sm, _ = kv
    BM: gl.constexpr = queries[0].shape[1]
    D: gl.constexpr = k_sm.shape[1]
    HALF_N: gl.constexpr = k_sm.shape[0] // 2
    DQ_ROWS: gl.constexpr = dqs[0].shape[1]
    DQ_COLUMNS: gl.constexpr = dqs[0].shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    dkv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    zero_s = gl.zeros([HALF_N, BM], gl.float32, s_layout)
    zero_dq = gl.zeros([DQ_ROWS, DQ_COLUMNS], gl.float32, dq_layout)
    dk = gl.zeros([HALF_N, D], gl.float32, dkv_layout)
    dv = gl.zeros([HALF_N, D], gl.float32, dkv_layout)
    k_half = k_sm.slice(WG * HALF_N, HALF_N, 0)
    v_half = v_sm.slice(WG * HALF_N, HALF_N, 0)
    k_dq = k_sm if DQ_ROWS < BM else k_sm.slice(WG * DQ_COLUMNS, DQ_COLUMNS, 1)
    return (k_half, v_half, k_dq), (zero_s, zero_dq), dk, dv


@gluon.jit
def positions(WG: gl.constexpr, zero_s):
    """Rows and columns of S^T: keys, counted within the key block, and queries, within theirs."""
    HALF_N: gl.constexpr = zero_s.shape[0]
    layout: gl.constexpr = zero_s.type.layout
    keys = WG * HALF_N + gl.arange(0, HALF_N, layout=gl.SliceLayout(1, layout))
    return keys, gl.arange(0, zero_s.shape[1], layout=gl.SliceLayout(0, layout))


@gluon.jit
def addresses(WG: gl.constexpr, queries, ds_sm, count):
    """Of the count-th query block: this consumer's half of its dS, Q and dO."""
    q_sm, do_sm, _, _, _, _ = queries
    HALF_N: gl.constexpr = ds_sm.shape[1] // 2
    stage = count % q_sm.shape[0]
    return ds_sm.index(count % 2).slice(WG * HALF_N, HALF_N, 0), q_sm.index(stage), do_sm.index(stage)


@gluon.jit
def issue_scores(operands, queries, zeros, count, known, LSE_EARLY: gl.constexpr):
    """S^T = K Q^T (keys, queries) of the count-th query block, dP^T = V dO^T in flight, and the lse if it is loaded early.

    known: its `addresses`, worked out before the first wait, or (): each where it is needed. The dense kernel is 2% faster with
    them (head dim 64 without a mask, 128 with one), the one over a layout 2% without (head dim 128).
    """
    k_half, v_half, _ = operands
    q_sm, do_sm, lse_sm, _, q_full, do_full = queries
    zero_s = zeros[0]
    STAGES: gl.constexpr = q_sm.shape[0]
    stage = count % STAGES
    phase = (count // STAGES) & 1
    mbarrier.wait(q_full.index(stage), phase)
    q = known[1] if len(known) else q_sm.index(stage)
    s = warpgroup_mma(k_half, q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
    lse = lse_sm.index(stage).load(gl.SliceLayout(0, zero_s.type.layout)) if LSE_EARLY else 0.0
    mbarrier.wait(do_full.index(stage), phase)
    do = known[2] if len(known) else do_sm.index(stage)
    dp = warpgroup_mma(v_half, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    return s, dp, lse


@gluon.jit
def add_products(
    WG: gl.constexpr, s, dp, lse, dk, dv, scale, operands, queries, zeros, ds_sm, dqs, count, known, LSE_EARLY: gl.constexpr
):  # fmt: skip
    """From the masked scores of a query block to its dQ, handed to the dq writer, and the sums dK and dV; the stage is given back."""
    k_dq = operands[2]
    q_sm, _, lse_sm, delta_sm, _, do_full = queries
    zero_dq = zeros[1]
    dq_sm, dq_empty = dqs
    STAGES: gl.constexpr = q_sm.shape[0]
    BM: gl.constexpr = q_sm.shape[1]
    DQ_ROWS: gl.constexpr = dq_sm.shape[1]
    dtype: gl.constexpr = q_sm.dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    column: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    stage = count % STAGES
    phase = (count // STAGES) & 1
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
    ds_half, q, do = known if len(known) else addresses(WG, queries, ds_sm, count)
    ds_half.store(ds)
    dv = warpgroup_mma(p16, do, dv, is_async=True)
    fence_async_shared()
    barrier_sync(EXCHANGE, 256)  # both halves of dS are in shared memory
    ds_dq = ds_sm.index(count % 2).slice(WG * DQ_ROWS, DQ_ROWS, 1) if DQ_ROWS < BM else ds_sm.index(count % 2)
    dq = warpgroup_mma(ds_dq.permute((1, 0)), k_dq, zero_dq, use_acc=False, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds, operand), q, dk, is_async=True)
    dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
    barrier_arrive(EMPTY_SECOND + stage, READERS)
    mbarrier.wait(dq_empty.index(WG), (count & 1) ^ 1)
    dq_sm.index(WG).store(dq)
    fence_async_shared()
    barrier_arrive(DQ_FULL + WG, WRITERS)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    barrier_arrive(EMPTY_FIRST + stage, READERS)
    return dk, dv


@gluon.jit
def put_sums(dk, dv, scale, operands):
    """dK and dV in the place of this consumer's halves of K and V, ready to be copied out."""
    k_half, v_half, _ = operands
    dtype: gl.constexpr = k_half.dtype
    dk = dk * (scale / LOG2E)
    barrier_sync(EXCHANGE, 256)  # K is an operand of the other warpgroup's dQ: both must be done with it
    k_half.store(dk.to(dtype))
    v_half.store(dv.to(dtype))
    fence_async_shared()
    partition_barrier()


@gluon.jit
def store_sums(desc_dk, desc_dv, operands, batch, kv_head, row):
    k_half, v_half, _ = operands
    tma_store(desc_dk, [batch, kv_head, row, 0], k_half)
    tma_store(desc_dv, [batch, kv_head, row, 0], v_half)
    tma_store_wait(0)
