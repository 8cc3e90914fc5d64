"""Named hardware barriers, which Gluon does not expose, and the map of those in use.

A release by `arrive` costs one instruction a warp; `mbarrier.arrive` first makes the whole partition meet.
Triton uses id 0 for the default partition, 1 to dispatch partitions and 2 up to one a worker partition (4 at most here).
A named barrier is full when the stated number of threads has come, by `sync` (waits) or `arrive` (does not).
"""

from attnzoo.backends.hopper.names import gl, gluon

# 5 to 8: all consumers have read K (backward: Q) of stage 0 to 3; 11 to 14: likewise V (backward: dO)
EMPTY_FIRST: gl.constexpr = gl.constexpr(5)
EMPTY_SECOND: gl.constexpr = gl.constexpr(11)
# 9 and 10: forward, whose turn it is to issue Q K^T; 9: backward, both halves of dS are written
TURN: gl.constexpr = gl.constexpr(9)
EXCHANGE: gl.constexpr = gl.constexpr(9)


@gluon.constexpr_function
def _instruction(kind, threads):
    return f"bar.{kind} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def barrier_sync(barrier, threads: gl.constexpr):
    """Arrive and wait until `threads` threads have come."""
    gl.inline_asm_elementwise(_instruction("sync", threads), "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_arrive(barrier, threads: gl.constexpr):
    """Arrive without waiting."""
    gl.inline_asm_elementwise(_instruction("arrive", threads), "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def uniform(x):
    """An int32 that every thread of the warp holds, marked as such: it may then live in a uniform register."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)
