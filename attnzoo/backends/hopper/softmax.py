"""Steps of the online softmax on tiles whose rows are split over the threads of a warpgroup."""

from attnzoo.backends.hopper.names import gl, gluon

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
LN2: gl.constexpr = gl.constexpr(0.6931471805599453)


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
def mask_scores(s, key, first_key, end_key, columns, RIGHT: gl.constexpr, LEFT: gl.constexpr):
    """-inf where a row may not see a key of the block that starts at key, by the right bound, the left one or both."""
    if RIGHT:
        s = gl.where((end_key - key)[:, None] > columns[None, :], s, -float("inf"))
    if LEFT:
        s = gl.where((first_key - key)[:, None] <= columns[None, :], s, -float("inf"))
    return s


@gluon.jit
def by_row(x, tile):
    """A value a row, ready to meet the tile."""
    return gl.convert_layout(x, gl.SliceLayout(1, tile.type.layout))[:, None]
