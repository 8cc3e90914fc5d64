"""Segment ids of a tile's columns."""

from attnzoo.backends.hopper.names import gl, gluon


@gluon.jit
def load_ids(pointer, count, LENGTH: gl.constexpr):
    """Ids side by side, 0 beyond the count, each loaded by one thread of the warpgroup.

    In the layout of the scores' columns each thread would load a quarter of them.
    """
    at = gl.arange(0, LENGTH, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(pointer + at, mask=at < count, other=0)
