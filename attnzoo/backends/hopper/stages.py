"""The forward's buffers: Q, stages of K and V, filled by the producer, given back by the consumers; O leaves through Q's."""

from attnzoo.backends.hopper.barriers import EMPTY_FIRST, EMPTY_SECOND, barrier_arrive, barrier_sync
from attnzoo.backends.hopper.names import fence_async_shared, gl, gluon, mbarrier, partition_barrier, tma_load, tma_store
from attnzoo.backends.hopper.softmax import by_row


@gluon.jit
def allocate(dtype: gl.constexpr, count: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, second: gl.constexpr):
    """Buffers of tiles of rows x columns, and likewise of the head dim's second piece."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    buffer = gl.allocate_shared_memory(dtype, [count, rows, columns], layout)
    buffer_2 = buffer
    if second:
        layout_2: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, second], dtype)
        buffer_2 = gl.allocate_shared_memory(dtype, [count, rows, second], layout_2)
    return buffer, buffer_2


@gluon.jit
def barriers(number: gl.constexpr, arrivals: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def load_queries(descs, buffers, full, slot, batch, head, row, CONSUMERS: gl.constexpr, SECOND: gl.constexpr):
    """Copy the 64 rows of each consumer into its part of the slot."""
    nbytes: gl.constexpr = descs[0].block_type.nbytes + (descs[1].block_type.nbytes if SECOND else 0)
    mbarrier.expect(full.index(slot), CONSUMERS * nbytes)
    for wg in gl.static_range(CONSUMERS):
        tma_load(descs[0], [batch, head, row + wg * 64, 0], full.index(slot), buffers[0].index(slot * CONSUMERS + wg))
        if SECOND:
            part = buffers[1].index(slot * CONSUMERS + wg)
            tma_load(descs[1], [batch, head, row + wg * 64, buffers[0].shape[2]], full.index(slot), part)


@gluon.jit
def load_block(desc, buffer, full, count, batch, head, row, EMPTY: gl.constexpr, CONSUMERS: gl.constexpr):
    """Copy the count-th key or value block of this CTA into its stage, once all consumers have left it."""
    load_pieces((desc, desc), (buffer, buffer), full, count, batch, head, row, EMPTY, CONSUMERS, 0)


@gluon.jit
def load_pieces(descs, buffers, full, count, batch, head, row, EMPTY: gl.constexpr, CONSUMERS: gl.constexpr, SECOND: gl.constexpr):
    """load_block for a head dim in one or two pieces."""
    STAGES: gl.constexpr = buffers[0].shape[0]
    nbytes: gl.constexpr = descs[0].block_type.nbytes + (descs[1].block_type.nbytes if SECOND else 0)
    stage = count % STAGES
    if count >= STAGES:
        barrier_sync(EMPTY + stage, CONSUMERS * 128 + 32)
    mbarrier.expect(full.index(stage), nbytes)
    tma_load(descs[0], [batch, head, row, 0], full.index(stage), buffers[0].index(stage))
    if SECOND:
        tma_load(descs[1], [batch, head, row, buffers[0].shape[2]], full.index(stage), buffers[1].index(stage))


@gluon.jit
def wait_for(full, count, pred=True):
    """Wait until the count-th block has come; the stage that it is in."""
    STAGES: gl.constexpr = full.shape[0]
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1, pred=pred)
    return stage


@gluon.jit
def release(barrier, CONSUMERS: gl.constexpr, pred=True):
    """This warpgroup has read the stage behind the barrier."""
    if pred:
        barrier_arrive(barrier, CONSUMERS * 128 + 32)


@gluon.jit
def drain(count, EMPTY: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Leave no named barrier half full."""
    for i in range(gl.maximum(count - STAGES, 0), count):
        barrier_sync(EMPTY + i % STAGES, CONSUMERS * 128 + 32)


@gluon.jit
def pass_over(k_full, v_full, count, blocks, CONSUMERS: gl.constexpr):
    """Give blocks back that this warpgroup does not see; the count after them.

    It waits until they have come: a second arrival at a barrier that the producer has not left yet would free a stage too early.
    """
    for i in range(blocks):
        release(EMPTY_FIRST + wait_for(k_full, count + i), CONSUMERS)
        release(EMPTY_SECOND + wait_for(v_full, count + i), CONSUMERS)
    return count + blocks


@gluon.jit
def store_output(desc, acc, inverse, staging, batch, head, row, column, RIGHT: gl.constexpr):
    """O = acc / l in its dtype, staged where this warpgroup's Q was."""
    inverse = by_row(inverse, acc)
    if RIGHT:
        acc = gl.where(inverse == 0.0, 0.0, acc * inverse)  # also where a value that no key of the row stands for is not finite
    else:
        acc = acc * inverse
    staging.store(acc.to(staging.dtype))
    fence_async_shared()
    partition_barrier()
    tma_store(desc, [batch, head, row, column], staging)
