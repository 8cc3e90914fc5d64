"""Named hardware barriers and other instructions that Gluon does not expose, and the map of the barriers in use.

A release by `arrive` costs one instruction a warp; `mbarrier.arrive` first makes the whole partition meet.
Triton uses id 0 for the default partition, 1 to dispatch partitions and 2 up to one a worker partition (4 at most here).
A named barrier is full when the stated number of threads has come, by `sync` (waits) or `arrive` (does not).
"""

from attnzoo.backends.hopper.names import gl, gluon

# 5 to 8 (backward: 5 and 6): all consumers have read K (backward: Q) of stage 0 to 3; 11 to 14: likewise V (backward: dO)
EMPTY_FIRST: gl.constexpr = gl.constexpr(5)
EMPTY_SECOND: gl.constexpr = gl.constexpr(11)
# 9 and 10: forward, whose turn it is to issue Q K^T; 9: backward, both halves of dS are written
TURN: gl.constexpr = gl.constexpr(9)
EXCHANGE: gl.constexpr = gl.constexpr(9)
# 7 and 8: backward, a warpgroup's half of dQ is written
DQ_FULL: gl.constexpr = gl.constexpr(7)


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


@gluon.jit
def dependency_wait():
    """Wait until the kernel before, whose end this launch did not wait for, has finished; its writes are seen, by TMA too."""
    wait: gl.constexpr = "griddepcontrol.wait; fence.proxy.async.global; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(wait, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def launch_dependents():
    """Let the next kernel of the stream start as soon as every CTA of this one has called this."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


# One lane of the warp asks for all: 0 -> 1 makes this warp the first; at 1 it waits until the first has published 2.
# The acquire pairs with the release in _PUBLISH, bar.warp.sync takes it from that lane to the one that issues the TMA add, and
# the proxy fence from ordinary accesses to those of the copy engine; docs/hopper.md goes through it link by link.
_CLAIM: gl.constexpr = gl.constexpr("""{
    .reg .pred other, done;
    .reg .b32 lane, state;
    mov.u32 lane, %laneid;
    setp.ne.u32 other, lane, 0;
    mov.u32 state, 2;
    @other bra ANSWER;
    atom.acquire.gpu.global.cas.b32 state, [$1], 0, 1;
ASK:
    setp.ne.u32 done, state, 1;
    @done bra ANSWER;
    ld.acquire.gpu.global.u32 state, [$1];
    bra ASK;
ANSWER:
    shfl.sync.idx.b32 $0, state, 0, 31, -1;
    bar.warp.sync -1;
    fence.proxy.async.global;
}""")

_PUBLISH: gl.constexpr = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 lane;
    cp.async.bulk.wait_group 0;
    fence.proxy.async.global;
    bar.warp.sync -1;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    @first st.release.gpu.global.u32 [$1], 2;
    mov.u32 $0, 0;
}""")


@gluon.jit
def claim(state_ptr):
    """Whether this warp is the first to claim; if not, returns once the first has published. For a partition of one warp.

    The asm, not `gl.atomic_cas`, because that one takes registers that the producers' partitions don't have.
    """
    address = state_ptr.to(gl.int64, bitcast=True)
    return gl.inline_asm_elementwise(_CLAIM, "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1) == 0


@gluon.jit
def publish(state_ptr):
    """Once this warp's TMA stores are in memory, and not merely read from shared memory, let the others go on."""
    address = state_ptr.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(_PUBLISH, "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


# The answer is in lane 0 alone, and nothing waits for it before `uniform` spreads it
_DRAW: gl.constexpr = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 lane;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    mov.u32 $0, 0;
    @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
}""")


@gluon.jit
def draw(counter_ptr):
    """Add 1 to a counter; what it was, once `uniform` has been asked of the result. For a partition of one warp."""
    address = counter_ptr.to(gl.int64, bitcast=True)
    return gl.inline_asm_elementwise(_DRAW, "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)
