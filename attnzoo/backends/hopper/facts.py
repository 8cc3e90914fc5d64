"""Integers that the producer tells the other partitions through shared memory, a group of them a slot."""

from attnzoo.backends.hopper.barriers import uniform
from attnzoo.backends.hopper.names import gl, gluon, partition_barrier


@gluon.jit
def allocate_facts(count: gl.constexpr):
    return gl.allocate_shared_memory(gl.int32, [count, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def put_facts(buffer, slot, facts):
    """Fill a slot, from a partition of one warp; whatever barrier hands the slot over comes after."""
    COUNT: gl.constexpr = len(facts)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, layout)
    for i in gl.static_range(COUNT):
        buffer.index(slot * COUNT + i).store(zero + facts[i])
    partition_barrier()


@gluon.jit
def fact_at(buffer, index):
    """One of them, for a partition of four warps."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return uniform(gl.max(buffer.index(index).load(layout), 0))
