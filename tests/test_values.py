"""Empty rows, empty sizes, alignment and other fixed points of the contract, against tables worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

import attnzoo

BACKENDS = ("naive", "tiled")
NINF = -math.inf

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def column(*numbers):
    """One head, one dim, a number a token: `(1, 1, S, 1)` in float64."""
    return torch.tensor(numbers, dtype=torch.float64).view(1, 1, -1, 1)


def mean_of_seen(q_len, kv_len, backend, **options):
    """With q = 0 each row is the mean of the values it sees; value j is 2 ** j, so that the mean tells which they are."""
    q, k, v = column(*[0.0] * q_len), column(*[1.0] * kv_len), column(*[2.0**j for j in range(kv_len)])
    o, lse = attnzoo.attention(q, k, v, return_lse=True, backend=backend, **options)
    return o.flatten().tolist(), lse.flatten().exp().tolist()


def seen_by(q_len, kv_len, backend, **options):
    """The keys that each row sees, as a string of digits."""
    means, counts = mean_of_seen(q_len, kv_len, backend, **options)
    totals = [round(mean * count) for mean, count in zip(means, counts)]
    return ["".join(str(j) for j in range(kv_len) if total >> j & 1) for total in totals]


# (Sq, Skv, options): the keys of each row.
ALIGNED = {
    "square-causal": (3, 3, {"causal": True}, ["0", "01", "012"]),
    "2-of-5-top-left": (2, 5, {"causal": True, "align": "top_left"}, ["0", "01"]),
    "2-of-5-bottom-right": (2, 5, {"causal": True, "align": "bottom_right"}, ["0123", "01234"]),
    "decode-top-left": (1, 4, {"causal": True, "align": "top_left"}, ["0"]),
    "decode-bottom-right": (1, 4, {"causal": True, "align": "bottom_right"}, ["0123"]),
    "5-of-2-top-left": (5, 2, {"causal": True, "align": "top_left"}, ["0", "01", "01", "01", "01"]),
    "5-of-2-bottom-right": (5, 2, {"causal": True, "align": "bottom_right"}, ["", "", "", "0", "01"]),
    "diagonal-alone": (3, 3, {"window": (0, 0)}, ["0", "1", "2"]),
    "left-1": (4, 4, {"window": (1, 0)}, ["0", "01", "12", "23"]),
    "right-1": (4, 4, {"window": (0, 1)}, ["01", "12", "23", "3"]),
    "left-1-right-open": (3, 3, {"window": (1, None)}, ["012", "012", "12"]),
    "left-open-right-0": (3, 3, {"window": (None, 0)}, ["0", "01", "012"]),
    "no-window": (2, 3, {"window": (None, None)}, ["012", "012"]),
    "window-and-causal": (4, 4, {"window": (1, 2), "causal": True}, ["0", "01", "12", "23"]),
    "window-2-of-5-top-left": (2, 5, {"window": (0, 1), "align": "top_left"}, ["01", "12"]),
    "window-2-of-5-bottom-right": (2, 5, {"window": (1, 0), "align": "bottom_right"}, ["23", "34"]),
    "window-5-of-2-bottom-right": (5, 2, {"window": (0, 1), "align": "bottom_right"}, ["", "", "0", "01", "1"]),
    "window-5-of-2-top-left": (5, 2, {"window": (1, 0), "align": "top_left"}, ["0", "01", "1", "", ""]),
    "align-without-need": (2, 4, {"align": "bottom_right"}, ["0123", "0123"]),
    "huge-window": (2, 3, {"window": (2**70, 2**62), "align": "top_left"}, ["012", "012"]),
}


@pytest.mark.parametrize("name", ALIGNED)
def test_who_sees_whom(name, backend):
    q_len, kv_len, options, expected = ALIGNED[name]
    found = seen_by(q_len, kv_len, backend, **options)
    assert found == expected, f"{name}: rows see {found}, should see {expected}"


def test_segments_see_their_own(backend):
    ids = torch.tensor([[7, 7, -1, -1, 7]])
    assert seen_by(5, 5, backend, segment_ids=ids) == ["014", "014", "23", "23", "014"], "an id was taken for padding"
    assert seen_by(5, 5, backend, segment_ids=ids, causal=True) == ["0", "01", "2", "23", "014"], "causal counts tensor positions"
    pair = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 2, 1, 0]])
    assert seen_by(3, 4, backend, segment_ids=pair) == ["2", "01", ""], "a pair of ids"


def test_masks_layouts_and_biases_compose_by_and(backend):
    mask = torch.tensor([[1, 1, 0, 1]] * 4, dtype=torch.bool)
    layout = attnzoo.BlockLayout.from_blocks(torch.tensor([[1, 1], [0, 1]], dtype=torch.bool), block=2)
    bias = torch.zeros(4, 4, dtype=torch.float64)
    bias[0, 0] = NINF
    assert seen_by(4, 4, backend, mask=mask) == ["013"] * 4, "mask"
    assert seen_by(4, 4, backend, layout=layout) == ["0123", "0123", "23", "23"], "layout"
    assert seen_by(4, 4, backend, bias=bias) == ["123", "0123", "0123", "0123"], "-inf in the bias"
    assert seen_by(4, 4, backend, mask=mask, layout=layout, bias=bias, causal=True) == ["", "01", "", "3"], "together"


def test_softmax_by_hand(backend):
    # scores ln 1, ln 3: weights 1/4 and 3/4
    q, k, v = column(1.0), column(0.0, math.log(3)), column(10.0, 20.0)
    o, lse = attnzoo.attention(q, k, v, return_lse=True, backend=backend)
    assert o.item() == pytest.approx(17.5), f"o is {o.item()}, 10 / 4 + 20 * 3 / 4 is 17.5"
    assert lse.item() == pytest.approx(math.log(4)), f"lse is {lse.item()}, the log of 1 + 3 is {math.log(4)}"
    o, lse = attnzoo.attention(q, k, v, sinks=torch.tensor([math.log(4)]), return_lse=True, backend=backend)
    assert o.item() == pytest.approx(8.75), f"with a sink of weight 4: o is {o.item()}, not 70 / 8"
    assert lse.item() == pytest.approx(math.log(8)), "the lse includes the sink"
    o = attnzoo.attention(q, k, v, bias=torch.tensor([[math.log(3), 0.0]]), backend=backend)
    assert o.item() == pytest.approx(15.0), f"a bias of ln 3 evens the weights out: o is {o.item()}"
    o = attnzoo.attention(q, k * 100, v, softcap=math.log(3), backend=backend)
    assert o.item() == pytest.approx(17.5), f"the cap bends a huge score to ln 3: o is {o.item()}"
    o = attnzoo.attention(q, k, v, scale=-1.0, backend=backend)
    assert o.item() == pytest.approx(12.5), f"a negative scale turns the weights round: o is {o.item()}"
    o = attnzoo.attention(q, k, v, scale=0.0, backend=backend)
    assert o.item() == pytest.approx(15.0), f"scale 0.0 is a value, not a default: o is {o.item()}"


def test_the_default_scale_is_that_of_the_head_dim(backend):
    q = torch.zeros(1, 1, 1, 16, dtype=torch.float64)
    q[..., 0] = 4.0  # times 16 ** -0.5 is 1
    k = torch.zeros(1, 1, 2, 16, dtype=torch.float64)
    k[0, 0, 1, 0] = math.log(3)
    o = attnzoo.attention(q, k, column(10.0, 20.0), backend=backend)
    assert o.item() == pytest.approx(17.5), f"o is {o.item()}"


def test_query_heads_share_in_groups(backend):
    q = torch.zeros(1, 6, 1, 1)
    v = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
    o = attnzoo.attention(q, v, v, backend=backend)
    assert o.flatten().tolist() == [1, 1, 2, 2, 3, 3], f"query head h reads kv head h // 2, got {o.flatten().tolist()}"


# Rows with no key

NO_KEY = {
    "mask": {"mask": torch.tensor([[False, False], [True, True]])},
    "bias": {"bias": torch.tensor([[NINF, NINF], [0.0, 0.0]], requires_grad=True)},
    "segments": {"segment_ids": (torch.tensor([[5, 1]]), torch.tensor([[1, 1]]))},
    "layout": {"layout": attnzoo.BlockLayout.from_dense(torch.tensor([[False, False], [True, True]]), block=1)},
    "mask-and-bias": {
        "mask": torch.tensor([[True, False], [True, True]]),
        "bias": torch.tensor([[NINF, 0.0], [0.0, 0.0]], requires_grad=True),
    },
    "mask-and-causal": {"mask": torch.tensor([[False, True], [True, True]]), "causal": True},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NO_KEY)
def test_a_row_with_no_key(name, dtype, backend):
    options = NO_KEY[name]
    q, k, v = (torch.tensor(n, dtype=dtype).view(1, 1, 2, 1).requires_grad_() for n in ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0]))
    o, lse = attnzoo.attention(q, k, v, return_lse=True, backend=backend, **options)
    assert o[0, 0, 0].item() == 0.0, f"o of the empty row is {o[0, 0, 0].item()}"
    assert lse[0, 0, 0].item() == NINF, f"lse of the empty row is {lse[0, 0, 0].item()}"
    inputs = [q, k, v, *([options["bias"]] if "bias" in options else [])]
    only_empty = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    for gradient in torch.autograd.grad((o * only_empty).sum() + (lse * only_empty[..., 0])[..., :1].nan_to_num(neginf=0).sum(), inputs):
        assert not gradient.any(), f"a gradient flows from the empty row: {gradient.flatten().tolist()}"
    o, lse = attnzoo.attention(q, k, v, return_lse=True, backend=backend, **options)
    both = torch.autograd.grad((o, lse), inputs, (torch.ones_like(o), torch.ones_like(lse)))
    for gradient in both:
        assert gradient.isfinite().all(), f"the empty row poisons a gradient: {gradient.flatten().tolist()}"
    assert both[0][0, 0, 0].item() == 0.0, f"dq of the empty row is {both[0][0, 0, 0].item()}"


@pytest.mark.parametrize("sink", [0.75, -200.0, 500.0])
def test_a_row_with_no_key_and_a_sink(sink, backend):
    q, k, v = (torch.ones(1, 1, 2, 1, requires_grad=True) for _ in range(3))
    sinks = torch.tensor([sink], requires_grad=True)
    mask = torch.zeros(2, 2, dtype=torch.bool)
    o, lse = attnzoo.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, backend=backend)
    assert not o.any(), f"o is {o.flatten().tolist()}, not 0"
    assert lse.flatten().tolist() == [sink, sink], f"lse is {lse.flatten().tolist()}, not the sink"
    grads = torch.autograd.grad((o, lse), (sinks, q, k, v), (torch.ones_like(o), torch.tensor([[[2.0, 3.0]]])))
    assert grads[0].tolist() == [5.0], f"the gradient of the lse flows to the sink: {grads[0].tolist()}, not 5"
    for gradient in grads[1:]:
        assert not gradient.any(), f"but to nothing else: {gradient.flatten().tolist()}"


def test_a_sink_of_minus_infinity_is_no_sink(backend):
    q = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    sinks = torch.full((2,), NINF, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False] * 3, [True] * 3])
    o, lse = attnzoo.attention(q, q, q, mask=mask, sinks=sinks, return_lse=True, backend=backend)
    plain_o, plain_lse = attnzoo.attention(q, q, q, mask=mask, return_lse=True, backend=backend)
    assert torch.equal(o, plain_o), "o differs"
    assert torch.equal(lse, plain_lse), "lse differs"
    (gradient,) = torch.autograd.grad(o.sum() + lse[..., ::2].sum(), sinks)
    assert gradient.tolist() == [0.0, 0.0], f"its gradient is {gradient.tolist()}"


# Empty sizes

SIZES = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 3, "kv_len": 5, "head_dim": 8, "value_dim": 6}
ZERO = ["batch", "q_heads", "heads", "q_len", "kv_len", "head_dim", "value_dim", "lengths", "all"]


def sized(zero):
    groups = {"heads": ("q_heads", "kv_heads"), "lengths": ("q_len", "kv_len"), "all": tuple(SIZES)}
    size = SIZES | dict.fromkeys(groups.get(zero, (zero,)), 0)
    batch, kv_len = size["batch"], size["kv_len"]
    q = torch.ones(batch, size["q_heads"], size["q_len"], size["head_dim"], requires_grad=True)
    k = torch.ones(batch, size["kv_heads"], kv_len, size["head_dim"], requires_grad=True)
    v = torch.ones(batch, size["kv_heads"], kv_len, size["value_dim"], requires_grad=True)
    return q, k, v


def extras(kind, q, kv_len):
    batch, heads, q_len, _ = q.shape
    kinds = {
        "plain": {},
        "causal": {"causal": True, "align": "bottom_right", "window": (2, None)},
        "tables": {
            "mask": torch.ones(q_len, kv_len, dtype=torch.bool),
            "bias": torch.zeros(batch, heads, q_len, kv_len, requires_grad=True),
            "softcap": 5.0,
        },
        "segments": {"segment_ids": (torch.zeros(batch, q_len, dtype=torch.int32), torch.zeros(batch, kv_len, dtype=torch.int32))},
        "layout": {"layout": attnzoo.BlockLayout.from_dense(torch.ones(q_len, kv_len, dtype=torch.bool), block=2)},
        "sinks-dropout": {"sinks": torch.zeros(heads, requires_grad=True), "dropout_p": 0.5, "dropout_seed": 1},
    }
    return kinds[kind]


@pytest.mark.parametrize("kind", ["plain", "causal", "tables", "segments", "layout", "sinks-dropout"])
@pytest.mark.parametrize("zero", ZERO)
def test_empty_sizes(zero, kind, backend):
    q, k, v = sized(zero)
    options = extras(kind, q, k.shape[2])
    o, lse = attnzoo.attention(q, k, v, return_lse=True, backend=backend, **options)
    assert o.shape == (*q.shape[:3], v.shape[3]), f"o has shape {tuple(o.shape)}"
    assert lse.shape == q.shape[:3], f"lse has shape {tuple(lse.shape)}"
    if not k.shape[2]:
        assert not o.any(), "without keys o is 0"
        expected = 0.0 if "sinks" in options else NINF
        assert (lse == expected).all(), f"without keys lse is {lse}, not {expected}"
    inputs = [q, k, v, *[options[name] for name in ("bias", "sinks") if name in options]]
    grads = torch.autograd.grad((o, lse), inputs, (torch.ones_like(o), torch.ones_like(lse)))
    for tensor, gradient in zip(inputs, grads):
        assert gradient.shape == tensor.shape, f"a gradient has shape {tuple(gradient.shape)}, its input {tuple(tensor.shape)}"
        assert gradient.isfinite().all(), f"a gradient is {gradient}"


def test_head_dim_zero_is_the_mean(backend):
    q, k = torch.ones(1, 1, 2, 0), torch.ones(1, 1, 4, 0)
    o, lse = attnzoo.attention(q, k, column(1, 2, 3, 6).float(), return_lse=True, backend=backend)
    assert o.flatten().tolist() == pytest.approx([3.0, 3.0]), f"all-zero scores give the mean, not {o.flatten().tolist()}"
    assert lse.flatten().exp().tolist() == pytest.approx([4.0, 4.0]), "and the log of the number of keys"


def test_no_key_for_some_query_head_less_kv_heads(backend):
    """Key-value heads that no query head reads get a gradient of zero."""
    q, k = torch.ones(1, 0, 2, 4, requires_grad=True), torch.ones(1, 3, 2, 4, requires_grad=True)
    o = attnzoo.attention(q, k, k, backend=backend)
    assert o.shape == (1, 0, 2, 4), f"o has shape {tuple(o.shape)}"
    (gradient,) = torch.autograd.grad(o.sum(), k)
    assert gradient.shape == k.shape, f"dk has shape {tuple(gradient.shape)}"
    assert not gradient.any(), "dk is not 0"


# Shifts and extremes


@pytest.mark.parametrize("shift", [1e4, -1e4, 0.0])
def test_a_constant_shift_of_the_scores_changes_nothing(shift, backend):
    q, k, v = column(1.0, 1.0), column(0.0, math.log(3)), column(10.0, 20.0)
    bias = torch.full((2, 2), shift, dtype=torch.float64)
    o, lse = attnzoo.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    assert o.flatten().tolist() == pytest.approx([17.5, 17.5]), f"o is {o.flatten().tolist()}"
    assert lse.flatten().tolist() == pytest.approx([math.log(4) + shift] * 2), "lse moves with the shift"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_row_of_finfo_min_is_the_mean(dtype, backend):
    lowest = torch.finfo(dtype).min
    q = torch.zeros(1, 1, 2, 8, dtype=dtype)
    v = torch.arange(4, dtype=dtype).view(1, 1, 4, 1)
    k = torch.ones(1, 1, 4, 8, dtype=dtype)
    bias = torch.tensor([[lowest] * 4, [lowest, lowest, 0.0, lowest]], dtype=dtype)
    o = attnzoo.attention(q, k, v, bias=bias, backend=backend)
    assert o.flatten().tolist() == [1.5, 2.0], f"the mean and the one key that is left, not {o.flatten().tolist()}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_gradient_of_a_row_of_finfo_min(dtype, backend):
    q, k = torch.zeros(1, 1, 1, 8, dtype=dtype), torch.ones(1, 1, 4, 8, dtype=dtype)
    v = torch.arange(4, dtype=dtype).view(1, 1, 4, 1).requires_grad_()
    bias = torch.full((1, 4), torch.finfo(dtype).min, dtype=dtype)
    (gradient,) = torch.autograd.grad(attnzoo.attention(q, k, v, bias=bias, backend=backend).sum(), v)
    assert gradient.flatten().tolist() == pytest.approx([0.25] * 4), f"dv is {gradient.flatten().tolist()}"


def test_half_precision_scores_do_not_overflow(backend):
    q = torch.full((1, 1, 2, 64), 576.0, dtype=torch.float16)
    k = torch.full((1, 1, 3, 64), 380.0, dtype=torch.float16)
    v = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16).view(1, 1, 3, 1)
    o, lse = attnzoo.attention(q, k, v, return_lse=True, backend=backend)
    assert o.flatten().tolist() == [2.0, 2.0], f"o is {o.flatten().tolist()}"
    assert lse.flatten().tolist() == pytest.approx([576 * 380 * 8 + math.log(3)] * 2, rel=1e-5), f"lse is {lse.flatten().tolist()}"


def test_slack_beyond_the_keys_never_leaks(backend):
    q = torch.ones(1, 1, 3, 4)
    cache = torch.full((1, 1, 16, 4), math.nan)
    cache[:, :, 4:9] = 1.0
    kv = cache[:, :, 4:9].requires_grad_()
    o = attnzoo.attention(q, kv, kv, backend=backend)
    assert (o == 1).all(), f"o is {o}"
    (gradient,) = torch.autograd.grad(o.sum(), kv)
    assert gradient.isfinite().all(), f"the gradient is {gradient}"


def test_backward_inside_autocast_keeps_the_precision_of_its_dtype(backend):
    q = torch.randn(1, 2, 32, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        (inside,) = torch.autograd.grad(attnzoo.attention(q, q, q, backend=backend).float().square().sum(), q)
    with torch.autocast("cpu", torch.bfloat16):
        o = attnzoo.attention(q, q, q, backend=backend)
    (outside,) = torch.autograd.grad(o.float().square().sum(), q)
    difference = ((inside - outside).abs().max() / outside.abs().max()).item()
    assert difference < 2**-7, f"gradients differ by {difference:.2%} of the largest: more than bfloat16 explains"


def test_the_most_negative_float64_is_arithmetic_in_float32_too(backend):
    v = torch.arange(4.0).view(1, 1, 4, 1)
    q = k = torch.ones(1, 1, 4, 1)
    bias = torch.full((4, 4), torch.finfo(torch.float64).min, dtype=torch.float64, requires_grad=True)
    o = attnzoo.attention(q, k, v, bias=bias, backend=backend)
    assert torch.allclose(o, torch.full_like(o, 1.5))
    (grad,) = torch.autograd.grad(o[0, 0, 0, 0], bias)
    assert torch.allclose(grad[0], torch.tensor([-1.5, -0.5, 0.5, 1.5], dtype=torch.float64) / 4)
    assert not grad[1:].any()
    hidden = torch.zeros(4, 4, dtype=torch.float64)
    hidden[:, 3] = -torch.inf
    assert torch.allclose(attnzoo.attention(q, k, v, bias=hidden, backend=backend), torch.ones(1, 1, 4, 1))


def ends_of_fp32(length=6, dim=4):
    """q, k and v of which some scores are exactly 0."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = [torch.randn(1, 2, length, dim, generator=generator) for _ in range(3)]
    q[:, :, :2] = 0.0
    return q, k, v


@pytest.mark.parametrize("softcap", [1e-320, 1e-50, 1e-40, 1e20, 1e38, 1e39, 1e300])
def test_soft_caps_beyond_the_ends_of_fp32(softcap, backend):
    """As a quotient's divisor they would be 0 or infinite there, and a score of 0 not a number."""
    inputs = ends_of_fp32()
    leaves = [tensor.clone().requires_grad_() for tensor in inputs], [tensor.double().requires_grad_() for tensor in inputs]
    found, truth = [attnzoo.attention(*tensors, softcap=softcap, backend=backend, causal=True) for tensors in leaves]
    torch.testing.assert_close(found.double(), truth, atol=1e-5, rtol=1e-5)
    for one, other in zip(torch.autograd.grad(found.sum(), leaves[0]), torch.autograd.grad(truth.sum(), leaves[1])):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-320, 1e-50, 3e38, 1e39, -1e300])
def test_scales_beyond_the_ends_of_fp32(scale, backend):
    q, k, v = ends_of_fp32(length=20, dim=8)
    if abs(scale) < 1e39:
        q *= 1e-38
    else:
        q.zero_()
    found = attnzoo.attention(q, k, v, scale=scale, backend=backend, causal=True)
    truth = attnzoo.attention(q.double(), k.double(), v.double(), scale=scale, backend=backend, causal=True)
    torch.testing.assert_close(found.double(), truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sink", [1e39, 1e300, -1e39, -1e300])
def test_sinks_of_float64_beyond_fp32_are_arithmetic(sink, backend):
    q, k, v = ends_of_fp32()
    sinks = torch.tensor([sink, 0.5], dtype=torch.float64, requires_grad=True)
    o, lse = attnzoo.attention(
        q, k[:, :, :4], v[:, :, :4], sinks=sinks, causal=True, align="bottom_right", return_lse=True, backend=backend
    )
    double = q.double(), k[:, :, :4].double(), v[:, :, :4].double()
    truth, _ = attnzoo.attention(*double, sinks=sinks, causal=True, align="bottom_right", return_lse=True, backend=backend)
    torch.testing.assert_close(o.double(), truth, atol=1e-5, rtol=1e-5)
    largest = torch.finfo(torch.float32).max
    assert lse[0, 0, 0] == math.copysign(largest, sink), "a row that sees no key has the sink as its lse"
    (grad,) = torch.autograd.grad(lse[0, 0, 0] + o.sum(), sinks, retain_graph=True)
    assert grad.isfinite().all(), f"the gradient of the sinks is {grad}"
    torch.testing.assert_close(grad, torch.autograd.grad(truth.sum(), sinks)[0] + torch.tensor([1.0, 0.0]).double(), atol=1e-5, rtol=1e-5)
