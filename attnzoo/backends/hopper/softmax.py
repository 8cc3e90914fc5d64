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


# 2^x = 2^n 2^f with n the nearest integer, by adding 1.5 * 2^23, and f in [-1/2, 1/2], where degree 5 is right to 9e-8 of
# the value, as `ex2` is to 2e-7. n goes into the exponent by an integer addition. -126 and below give 2^-126, not 0.
_POLYNOMIAL = """
    max.ftz.f32 x, ${x}, 0fC2FC0000;
    add.rn.ftz.f32 n, x, 0f4B400000;
    mov.b32 bits, n;
    add.rn.ftz.f32 n, n, 0fCB400000;
    sub.rn.ftz.f32 f, x, n;
    fma.rn.ftz.f32 y, f, 0f3AADDD0A, 0f3C1E7544;
    fma.rn.ftz.f32 y, y, f, 0f3D635BA9;
    fma.rn.ftz.f32 y, y, f, 0f3E75FCDE;
    fma.rn.ftz.f32 y, y, f, 0f3F317215;
    fma.rn.ftz.f32 y, y, f, 0f3F800000;
    shl.b32 shifted, bits, 23;
    mov.b32 bits, y;
    add.s32 bits, bits, shifted;
    mov.b32 ${y}, bits;
"""


def _exponentials(of: int) -> str:
    lines = "".join([f"ex2.approx.ftz.f32 ${i}, ${of + i};\n" for i in range(of - 1)])
    polynomial = _POLYNOMIAL.replace("${x}", f"${2 * of - 1}").replace("${y}", f"${of - 1}")
    return "{\n.reg .f32 x, n, f, y;\n.reg .b32 bits, shifted;\n" + lines + polynomial + "}"


def _constraints(of: int) -> str:
    return ",".join(["=f"] * of + ["f"] * of)


_IN_8: gl.constexpr = gl.constexpr(_exponentials(8))
_IN_16: gl.constexpr = gl.constexpr(_exponentials(16))
_OPERANDS_8: gl.constexpr = gl.constexpr(_constraints(8))
_OPERANDS_16: gl.constexpr = gl.constexpr(_constraints(16))


@gluon.jit
def exp2_shared(x, OF: gl.constexpr):
    """2^x for scores that no mask has touched, one in OF by the multiply-add pipe: where `ex2`, of which a multiprocessor does 16 a
    cycle, binds."""
    if OF == 8:
        return gl.inline_asm_elementwise(_IN_8, _OPERANDS_8, [x], dtype=gl.float32, is_pure=True, pack=8)
    else:
        return gl.inline_asm_elementwise(_IN_16, _OPERANDS_16, [x], dtype=gl.float32, is_pure=True, pack=16)
