"""The forward's two products, in flight: S = Q K^T and O += P V, for a head dim in one or two pieces."""

from attnzoo.backends.hopper.barriers import TURN, barrier_arrive, barrier_sync
from attnzoo.backends.hopper.names import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from attnzoo.backends.hopper.stages import wait_for


@gluon.jit
def issue_scores(q, k_sm, k_full, count, zero, WG: gl.constexpr, CONSUMERS: gl.constexpr, PING_PONG: gl.constexpr, pred=True):
    """S = Q K^T of block count, in flight.

    With PING_PONG the two warpgroups take turns, so that one's softmax meets the other's products.
    """
    return issue_pieces((q, q), (k_sm, k_sm), k_full, count, zero, WG, CONSUMERS, PING_PONG, 0, pred)


@gluon.jit
def issue_pieces(
    q, k_sm, k_full, count, zero,
    WG: gl.constexpr, CONSUMERS: gl.constexpr, PING_PONG: gl.constexpr, SECOND: gl.constexpr, pred=True,
):  # fmt: skip
    """issue_scores for a head dim in one or two pieces."""
    stage = wait_for(k_full, count, pred)
    if PING_PONG:
        barrier_sync(TURN + WG, CONSUMERS * 128)
    s = warpgroup_mma(q[0], k_sm[0].index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    if SECOND:
        s = warpgroup_mma(q[1], k_sm[1].index(stage).permute((1, 0)), s, is_async=True)
    if PING_PONG:
        barrier_arrive(TURN + 1 - WG, CONSUMERS * 128)
    return s


@gluon.jit
def issue_values(p, v_sm, stage, acc, acc_2, V_SECOND: gl.constexpr):
    """acc += P V, in flight: one product a piece of the values' dim."""
    acc = warpgroup_mma(p, v_sm[0].index(stage), acc, is_async=True)
    if V_SECOND:
        p = gl.convert_layout(p, gl.DotOperandLayout(0, acc_2.type.layout, 2))  # the same registers
        acc_2 = warpgroup_mma(p, v_sm[1].index(stage), acc_2, is_async=True)
    return acc, acc_2


@gluon.jit
def wait_values(acc, acc_2, later: gl.constexpr, V_SECOND: gl.constexpr):
    """Wait for P V, not for the `later` products that were issued after it."""
    if V_SECOND:
        acc, acc_2 = warpgroup_mma_wait(later, deps=(acc, acc_2))
    else:
        acc = warpgroup_mma_wait(later, deps=(acc,))
    return acc, acc_2
