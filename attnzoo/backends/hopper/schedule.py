"""Which tile comes when, and which blocks of keys or queries it meets.

The band of a call is two offsets: query i sees key j only if `i + left <= j <= i + right`. An unbounded side is
an offset of 2**30 in size (see launch), so that no sum overflows int32.
"""

from attnzoo.backends.hopper.names import gl, gluon


@gluon.jit
def tile_at(t, q_tiles, heads, heads_in_group):
    """(head, query tile) of the t-th tile in launch order.

    Heads go in groups whose K and V stay in L2; a group is walked tile by tile across its heads, the last queries
    first: under a causal mask those have the most keys, and the longest tiles first is what balances best.
    """
    per_group = q_tiles * heads_in_group
    first_head = (t // per_group) * heads_in_group
    in_group = t % per_group
    heads_here = gl.minimum(heads_in_group, heads - first_head)
    return first_head + in_group % heads_here, q_tiles - 1 - in_group // heads_here


@gluon.jit
def key_blocks(
    row, q_len, kv_len, left, right,
    BM: gl.constexpr, BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, ONE_MASKED: gl.constexpr,
):  # fmt: skip
    """(first, full_first, full_end, end) of the key blocks for the query tile that starts at row.

    Blocks `end - 1` down to `first` are computed, at least one even where no query sees a key. Those in
    `full_first .. full_end - 1` need no mask; block `end - 1`, the first one computed, is never among them.
    """
    row_end = gl.minimum(row + BM, q_len)
    end = gl.cdiv(kv_len, BN)
    if RIGHT:
        end = gl.cdiv(gl.minimum(kv_len, gl.maximum(row_end + right, 1)), BN)
    first = 0
    if LEFT:
        first = gl.minimum(gl.maximum(row + left, 0) // BN, end - 1)
    full_end = end - 1
    if RIGHT and not ONE_MASKED:
        full_end = gl.maximum(gl.minimum(gl.minimum(kv_len, gl.maximum(row + right + 1, 0)) // BN, end - 1), first)
    full_first = first
    if LEFT:
        full_first = gl.minimum(gl.maximum(gl.cdiv(gl.maximum(row_end - 1 + left, 0), BN), first), full_end)
    return first, full_first, full_end, end


@gluon.jit
def query_blocks(key, q_len, left, right, BM: gl.constexpr, BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """(first, count) of the query blocks that see any key of the block that starts at key; count may be 0."""
    first = 0
    end = gl.cdiv(q_len, BM)
    if RIGHT:
        first = gl.maximum(key - right, 0) // BM
    if LEFT:
        end = gl.minimum(end, gl.cdiv(gl.maximum(key + BN - left, 0), BM))
    return first, gl.maximum(end - first, 0)
