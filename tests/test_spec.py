"""Malformed calls are typed errors that name the argument; well-formed ones are normalised once."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

import attnzoo
from attnzoo import AttentionInputs, AttentionSpec, Backend, BlockLayout, Capabilities
from attnzoo import registry as registry_module
from attnzoo.backend import FEATURES
from attnzoo.registry import Registry

NAN, INF = float("nan"), float("inf")


def tensor(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def call(**changes):
    """q (2, 4, 6, 8), k and v (2, 2, 6, 8), with changes; a function among them is called first."""
    arguments = {"q": tensor(2, 4, 6, 8), "k": tensor(2, 2, 6, 8), "v": tensor(2, 2, 6, 8), **changes}
    return {name: value() if callable(value) else value for name, value in arguments.items()}


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its nested tensors a prototype
        return torch.nested.nested_tensor([tensor(4, 6, 8), tensor(4, 6, 8)])


def layout(q_len=6, kv_len=6, batch=1, heads=1, device="cpu"):
    return BlockLayout.from_dense(torch.ones(batch, heads, q_len, kv_len, dtype=torch.bool), block=4).to(device)


def written_layout():
    written = layout()
    written.full.indices.add_(0)
    return written


SHORT_K = {"k": tensor(2, 2, 5, 8), "v": tensor(2, 2, 5, 8)}
IDS = tensor(2, 6, dtype=torch.int64)

# id: (error, words of the message, what is changed in a well-formed call)
MALFORMED = {
    "q-list": (TypeError, "q is a list, tensor", {"q": [1.0]}),
    "k-none": (TypeError, "k is a NoneType, tensor", {"k": None}),
    "v-numpy": (TypeError, "v is a ndarray, tensor", {"v": lambda: tensor(2, 2, 6, 8).numpy()}),
    "q-int64": (TypeError, "q has dtype torch.int64, float16, float64", {"q": tensor(2, 4, 6, 8, dtype=torch.int64)}),
    "k-complex": (TypeError, "k has dtype torch.complex64, float16", {"k": tensor(2, 2, 6, 8, dtype=torch.complex64)}),
    "v-float8": (TypeError, "v has dtype torch.float8_e5m2, float16", {"v": tensor(2, 2, 6, 8, dtype=torch.float8_e5m2)}),
    "q-sparse": (TypeError, "q, sparse, strided", {"q": lambda: tensor(2, 4, 6, 8).to_sparse()}),
    "q-nested": (TypeError, "q, nested, strided", {"q": nested}),
    "v-jagged": (TypeError, "v, jagged, strided", {"v": lambda: torch.nested.nested_tensor([tensor(6, 8)] * 2, layout=torch.jagged)}),
    "q-3-dims": (ValueError, "q has 3 dims, (4, 6, 8), 4: (batch", {"q": tensor(4, 6, 8)}),
    "k-5-dims": (ValueError, "k has 5 dims, 4: (batch", {"k": tensor(1, 2, 2, 6, 8)}),
    "k-device": (ValueError, "k is on meta, q on cpu, one device", {"k": tensor(2, 2, 6, 8, device="meta")}),
    "v-device": (ValueError, "v is on meta, q on cpu, one device", {"v": tensor(2, 2, 6, 8, device="meta")}),
    "k-dtype": (TypeError, "k has dtype torch.float16, torch.float32, one dtype", {"k": tensor(2, 2, 6, 8, dtype=torch.float16)}),
    "v-dtype": (TypeError, "v has dtype torch.float64, torch.float32, one dtype", {"v": tensor(2, 2, 6, 8, dtype=torch.float64)}),
    "k-batch": (ValueError, "batch sizes 2 3 2, one", {"k": tensor(3, 2, 6, 8)}),
    "v-batch-1": (ValueError, "batch sizes 2 2 1, one", {"v": tensor(1, 2, 6, 8)}),
    "k-head-dim": (ValueError, "k has head dim 7, 8, same", {"k": tensor(2, 2, 6, 7)}),
    "v-heads": (ValueError, "v has 4 heads, k has 2, same", {"v": tensor(2, 4, 6, 8)}),
    "v-length": (ValueError, "v has length 5, 6, same", {"v": tensor(2, 2, 5, 8)}),
    "kv-heads": (ValueError, "k has 3 heads, divisor, 4 heads of q", {"k": tensor(2, 3, 6, 8), "v": tensor(2, 3, 6, 8)}),
    "kv-heads-more": (ValueError, "k has 8 heads, divisor, 4", {"k": tensor(2, 8, 6, 8), "v": tensor(2, 8, 6, 8)}),
    "kv-heads-zero": (ValueError, "k has 0 heads, divisor, 4", {"k": tensor(2, 0, 6, 8), "v": tensor(2, 0, 6, 8)}),
    "causal-int": (TypeError, "causal is 1, int, bool", {"causal": 1}),
    "causal-none": (TypeError, "causal is None, bool", {"causal": None}),
    "causal-tensor": (TypeError, "causal is, Tensor, bool", {"causal": torch.tensor(True)}),
    "lse-string": (TypeError, "return_lse is 'yes', bool", {"return_lse": "yes"}),
    "deterministic-int": (TypeError, "deterministic is 0, bool", {"deterministic": 0}),
    "align-missing": (ValueError, "align is None, length 6, 5, align='top_left', align='bottom_right'", {**SHORT_K, "causal": True}),
    "align-missing-window": (ValueError, "align is None, length 6, 5, 'top_left'", {**SHORT_K, "window": (1, None)}),
    "align-unknown": (ValueError, "align is 'left', 'top_left', 'bottom_right'", {**SHORT_K, "causal": True, "align": "left"}),
    "align-unknown-unneeded": (ValueError, "align is 'topleft', 'top_left'", {"align": "topleft"}),
    "align-bool": (TypeError, "align is True, 'top_left', None", {"align": True}),
    "align-array": (TypeError, "align is, ndarray, 'top_left'", {"align": lambda: tensor(2).numpy()}),
    "window-list": (TypeError, "window is [1, (left, right), None", {"window": [1, 0]}),
    "window-int": (TypeError, "window is 4, (left, right)", {"window": 4}),
    "window-triple": (TypeError, "window is (1, (left, right)", {"window": (1, 2, 3)}),
    "window-minus-one": (ValueError, "window left is -1, non-negative, None", {"window": (-1, -1)}),
    "window-right-negative": (ValueError, "window right is -2, non-negative, None", {"window": (None, -2)}),
    "window-bool": (TypeError, "window left is True, bool, non-negative int", {"window": (True, 0)}),
    "window-float": (TypeError, "window right is 2.0, float, non-negative int", {"window": (1, 2.0)}),
    "window-tensor": (TypeError, "window left is, Tensor, non-negative int", {"window": (torch.tensor(1), 0)}),
    "mask-float": (TypeError, "mask has dtype torch.float32, torch.bool, bias=", {"mask": tensor(6, 6)}),
    "mask-int": (TypeError, "mask has dtype torch.uint8, torch.bool", {"mask": tensor(6, 6, dtype=torch.uint8)}),
    "mask-list": (TypeError, "mask is a list, bool tensor", {"mask": [[True]]}),
    "mask-3-dims": (ValueError, "mask has 3 dims, ambiguous, (2, 4, 6, 6)", {"mask": tensor(4, 6, 6, dtype=torch.bool)}),
    "mask-1-dim": (ValueError, "mask has 1 dims, 2 or 4", {"mask": tensor(6, dtype=torch.bool)}),
    "mask-shape": (ValueError, "mask has shape (6, 5), broadcastable, (2, 4, 6, 6)", {"mask": tensor(6, 5, dtype=torch.bool)}),
    "mask-kv-heads": (ValueError, "mask has shape (2, 2, 6, 6), (2, 4, 6, 6)", {"mask": tensor(2, 2, 6, 6, dtype=torch.bool)}),
    "mask-device": (ValueError, "mask is on meta, q on cpu", {"mask": tensor(6, 6, dtype=torch.bool, device="meta")}),
    "mask-sparse": (TypeError, "mask, sparse, strided", {"mask": lambda: tensor(6, 6, dtype=torch.bool).to_sparse()}),
    "bias-bool": (TypeError, "bias has dtype torch.bool, float32, mask=", {"bias": tensor(6, 6, dtype=torch.bool)}),
    "bias-int": (TypeError, "bias has dtype torch.int32, float32", {"bias": tensor(6, 6, dtype=torch.int32)}),
    "bias-number": (TypeError, "bias is a float, tensor", {"bias": 0.5}),
    "bias-3-dims": (ValueError, "bias has 3 dims, ambiguous", {"bias": tensor(1, 6, 6)}),
    "bias-shape": (ValueError, "bias has shape (3, 1, 6, 6), (2, 4, 6, 6)", {"bias": tensor(3, 1, 6, 6)}),
    "bias-device": (ValueError, "bias is on meta, q on cpu", {"bias": tensor(6, 6, device="meta")}),
    "bias-sparse": (TypeError, "bias, sparse, strided", {"bias": lambda: tensor(6, 6).to_sparse()}),
    "segments-list": (TypeError, "segment_ids, list, integer tensor", {"segment_ids": [0, 1]}),
    "segments-float": (TypeError, "segment_ids, torch.float32, int64", {"segment_ids": tensor(2, 6)}),
    "segments-bool": (TypeError, "segment_ids, torch.bool, int64", {"segment_ids": tensor(2, 6, dtype=torch.bool)}),
    "segments-uint64": (TypeError, "segment_ids, torch.uint64, int64", {"segment_ids": tensor(2, 6, dtype=torch.uint64)}),
    "segments-shape": (ValueError, "segment_ids, (2, 5), (2, 6)", {"segment_ids": tensor(2, 5, dtype=torch.int64)}),
    "segments-1-dim": (ValueError, "segment_ids, (6,), (2, 6)", {"segment_ids": tensor(6, dtype=torch.int64)}),
    "segments-triple": (ValueError, "segment_ids is a tuple of 3, pair", {"segment_ids": (IDS, IDS, IDS)}),
    "segments-pair-none": (TypeError, "segment_ids of kv, NoneType, integer tensor", {"segment_ids": (IDS, None)}),
    "segments-one-two-lengths": (ValueError, "segment_ids is one tensor, 6, 5, pair", {**SHORT_K, "segment_ids": IDS}),
    "segments-device": (ValueError, "segment_ids, meta, cpu", {"segment_ids": tensor(2, 6, dtype=torch.int64, device="meta")}),
    "segments-sparse": (TypeError, "segment_ids, sparse, strided", {"segment_ids": lambda: IDS.to_sparse()}),
    "layout-tensor": (TypeError, "layout is a Tensor, BlockLayout", {"layout": tensor(6, 6, dtype=torch.bool)}),
    "layout-length": (ValueError, "layout is for lengths (8, 6), (6, 6)", {"layout": lambda: layout(q_len=8)}),
    "layout-batch": (ValueError, "layout has batch 3, 1 or 2", {"layout": lambda: layout(batch=3)}),
    "layout-kv-heads": (ValueError, "layout has 2 heads, 1 or 4", {"layout": lambda: layout(heads=2)}),
    "layout-device": (ValueError, "layout is on meta, q on cpu, layout.to('cpu')", {"layout": lambda: layout(device="meta")}),
    "layout-written": (ValueError, "layout, written in place", {"layout": written_layout}),
    "scale-nan": (ValueError, "scale is nan, finite", {"scale": NAN}),
    "scale-inf": (ValueError, "scale is -inf, finite", {"scale": -INF}),
    "scale-huge-int": (ValueError, "scale is, finite", {"scale": 10**400}),
    "scale-bool": (TypeError, "scale is True, bool, finite number", {"scale": True}),
    "scale-tensor": (TypeError, "scale is, Tensor, finite number", {"scale": torch.tensor(0.5)}),
    "scale-string": (TypeError, "scale is '1', str, finite number", {"scale": "1"}),
    "softcap-zero": (ValueError, "softcap is 0.0, positive", {"softcap": 0.0}),
    "softcap-negative": (ValueError, "softcap is -5, positive", {"softcap": -5}),
    "softcap-nan": (ValueError, "softcap is nan, positive", {"softcap": NAN}),
    "softcap-inf": (ValueError, "softcap is inf, positive finite, None", {"softcap": INF}),
    "softcap-tensor": (TypeError, "softcap is, Tensor, positive number", {"softcap": torch.tensor(5.0)}),
    "sinks-list": (TypeError, "sinks is a list, float tensor", {"sinks": [0.0] * 4}),
    "sinks-int": (TypeError, "sinks has dtype torch.int64, float32", {"sinks": tensor(4, dtype=torch.int64)}),
    "sinks-kv-heads": (ValueError, "sinks has shape (2,), (4,)", {"sinks": tensor(2)}),
    "sinks-2-dims": (ValueError, "sinks has shape (1, 4), (4,)", {"sinks": tensor(1, 4)}),
    "sinks-device": (ValueError, "sinks is on meta, q on cpu", {"sinks": tensor(4, device="meta")}),
    "sinks-sparse": (TypeError, "sinks, sparse, strided", {"sinks": lambda: tensor(4).to_sparse()}),
    "dropout-one": (ValueError, "dropout_p is 1.0, 0 <= p < 1", {"dropout_p": 1.0}),
    "dropout-negative": (ValueError, "dropout_p is -0.1, 0 <= p < 1", {"dropout_p": -0.1}),
    "dropout-nan": (ValueError, "dropout_p is nan, 0 <= p < 1", {"dropout_p": NAN}),
    "dropout-false": (TypeError, "dropout_p is False, bool, 0 <= p < 1", {"dropout_p": False}),
    "dropout-none": (TypeError, "dropout_p is None, 0 <= p < 1", {"dropout_p": None}),
    "dropout-tensor": (TypeError, "dropout_p is, Tensor, 0 <= p < 1", {"dropout_p": torch.zeros(2)}),
    "seed-float": (TypeError, "dropout_seed is 1.0, float, int", {"dropout_p": 0.5, "dropout_seed": 1.0}),
    "seed-bool": (TypeError, "dropout_seed is True, bool, int", {"dropout_p": 0.5, "dropout_seed": True}),
    "seed-dtype": (TypeError, "dropout_seed has dtype torch.int32, int64", {"dropout_seed": tensor(1, dtype=torch.int32)}),
    "seed-2-elements": (ValueError, "dropout_seed has 2 elements, one", {"dropout_seed": tensor(2, dtype=torch.int64)}),
    "seed-device": (ValueError, "dropout_seed is on meta, q on cpu", {"dropout_seed": tensor(1, dtype=torch.int64, device="meta")}),
    "seed-65-bits": (ValueError, "dropout_seed is 18446744073709551616, 64 bits", {"dropout_p": 0.5, "dropout_seed": 2**64}),
    "seed-below-int64": (ValueError, "dropout_seed is -9223372036854775809, 64 bits", {"dropout_seed": -(2**63) - 1}),
}


class Recorder(Backend):
    """Claims everything, and notes each call that reaches it."""

    name = "recorder"
    capabilities = Capabilities(dtypes={torch.float32}, head_dims=(1, 2**31), forward=set(FEATURES), backward=set(FEATURES))

    def __init__(self):
        self.asked, self.served = [], []

    def unsupported_reasons(self, spec):
        self.asked.append(spec)
        return super().unsupported_reasons(spec)

    def attend(self, spec, inputs):
        self.served.append(inputs)
        return inputs.q, None


@pytest.fixture
def recorder(monkeypatch):
    backend = Recorder()
    monkeypatch.setattr(registry_module, "_default", Registry([backend], preference=("recorder",)))
    return backend


@pytest.mark.parametrize("entry", ["attention", "get", "explain"])
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call_names_the_argument_and_reaches_no_backend(name, entry, recorder):
    error, words, changes = MALFORMED[name]
    entries = {"attention": attnzoo.attention, "get": attnzoo.get("recorder"), "explain": attnzoo.explain}
    with pytest.raises(error) as caught:
        entries[entry](**call(**changes))
    message = str(caught.value)
    missing = [word for word in words.split(", ") if word not in message.replace(", ", " ") and word not in message]
    assert not missing, f"{name}: the message {message!r} lacks {missing}"
    assert type(caught.value) is error, f"{name}: raised {type(caught.value).__name__}, not {error.__name__}"
    assert not recorder.asked, f"{name}: a backend was asked"
    assert not recorder.served, f"{name}: a backend was called"


def test_the_well_formed_call_reaches_the_backend(recorder):
    attnzoo.attention(**call())
    assert len(recorder.served) == 1, "the unchanged call did not arrive: every malformed case would pass for the wrong reason"


@pytest.mark.parametrize(
    ("q", "k", "v", "found"),
    [
        (torch.float32, torch.float64, torch.float32, "torch.float64"),
        (torch.float16, torch.float32, torch.float64, "torch.float64"),
        (torch.float64, torch.float32, torch.float64, "k has dtype torch.float32"),
    ],
    ids=str,
)
def test_autocast_mixes_with_float64_are_refused(q, k, v, found):
    changes = {"q": tensor(2, 4, 6, 8, dtype=q), "k": tensor(2, 2, 6, 8, dtype=k), "v": tensor(2, 2, 6, 8, dtype=v)}
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=found):
        AttentionSpec.of(**call(**changes))


def test_autocast_casts_mixed_inputs_first():
    arguments = call(q=tensor(2, 4, 6, 8, dtype=torch.float16), k=torch.randn(2, 2, 12, 8)[:, :, ::2])
    with torch.autocast("cpu", torch.bfloat16):
        spec = AttentionSpec.of(**arguments)
        inputs = AttentionInputs.of(spec, **arguments)
    assert spec.dtype == torch.bfloat16, f"spec has {spec.dtype}"
    for name in "qkv":
        assert getattr(inputs, name).dtype == torch.bfloat16, f"{name} was not cast"


def test_autocast_leaves_float64_alone():
    arguments = call(**{name: tensor(2, heads, 6, 8, dtype=torch.float64) for name, heads in (("q", 4), ("k", 2), ("v", 2))})
    with torch.autocast("cpu", torch.bfloat16):
        assert AttentionSpec.of(**arguments).dtype == torch.float64, "autocast does not cast float64"


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.randn(2, 6, 2, 8).transpose(1, 2),
        lambda: torch.randn(2, 2, 12, 8)[:, :, ::2],
        lambda: torch.randn(2, 2, 8, 6).transpose(2, 3),
        lambda: torch.randn(2, 2, 6, 16)[..., ::2],
        lambda: torch.randn(2, 1, 6, 8).expand(2, 2, 6, 8),
        lambda: torch.randn(2, 2, 6, 1).expand(2, 2, 6, 8),
        lambda: torch._neg_view(torch.randn(2, 2, 6, 16))[..., :8],
        lambda: torch.randn(2, 6, 2, 8, dtype=torch.complex64).conj().imag.transpose(1, 2),
    ],
    ids=["bshd", "step-rows", "transposed", "step-columns", "expanded-heads", "expanded-columns", "negative", "imaginary"],
)
def test_strides_of_the_spec_are_those_of_the_inputs(view, autocast):
    arguments = call(k=view())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        spec = AttentionSpec.of(**arguments)
        inputs = AttentionInputs.of(spec, **arguments)
    assert inputs.k.stride() == spec.strides[1], f"spec says {spec.strides[1]}, the backend gets {inputs.k.stride()}"
    assert inputs.k.stride(-1) == 1, f"the last stride is {inputs.k.stride(-1)}"
    assert not inputs.k.is_neg(), "k stands for the negative of what lies in memory"


@pytest.mark.parametrize(
    "view", [lambda: torch.randn(4, 3)[:, 1], lambda: torch.randn(1).expand(4), lambda: torch._neg_view(torch.randn(4))]
)
def test_sinks_lie_side_by_side(view):
    sinks = view()
    arguments = call(sinks=sinks)
    given = AttentionInputs.of(AttentionSpec.of(**arguments), **arguments).sinks
    assert torch.equal(given, sinks)
    assert given.stride() == (1,)
    assert not given.is_neg()


def spec_of(**changes):
    return AttentionSpec.of(**call(**changes))


def test_defaults_are_normalised():
    assert spec_of().scale == 8**-0.5, "default scale is D ** -0.5"
    assert spec_of(scale=0.0).scale == 0.0, "0.0 is a value"
    assert spec_of(scale=-2).scale == -2.0, "negative scales are values"
    assert isinstance(spec_of(scale=1).scale, float), "scale is always a float"
    empty = {name: tensor(2, 2, 6, 0) for name in "qk"}
    assert spec_of(**empty).scale == 1.0, "D = 0 has scale 1"
    assert spec_of(window=(None, None)).window is None, "(None, None) is no window"
    assert spec_of(dropout_p=0).dropout_p == 0.0, "an int p is a number"


@pytest.mark.parametrize(
    ("changes", "align"),
    [
        ({"causal": True, "align": "bottom_right"}, None),
        ({**SHORT_K, "align": "bottom_right"}, None),
        ({**SHORT_K, "window": (None, None), "align": "top_left"}, None),
        ({**SHORT_K, "causal": True, "align": "top_left"}, "top_left"),
        ({**SHORT_K, "window": (1, 0), "align": "bottom_right"}, "bottom_right"),
    ],
    ids=["equal-lengths", "no-band", "unbounded-window", "causal", "window"],
)
def test_align_is_kept_only_where_it_matters(changes, align):
    assert spec_of(**changes).align == align, f"align should be {align}"


@pytest.mark.parametrize(
    ("changes", "band", "diagonal"),
    [
        ({}, (None, None), 0),
        ({"causal": True}, (None, 0), 0),
        ({"causal": True, "window": (3, 2)}, (3, 0), 0),
        ({"window": (0, None)}, (0, None), 0),
        ({**SHORT_K, "causal": True, "align": "top_left"}, (None, 0), 0),
        ({**SHORT_K, "causal": True, "align": "bottom_right"}, (None, 0), -1),
    ],
    ids=["none", "causal", "causal-window", "left-zero", "top-left", "bottom-right"],
)
def test_band_and_diagonal(changes, band, diagonal):
    spec = spec_of(**changes)
    assert (spec.band, spec.diagonal) == (band, diagonal), f"got {spec.band}, {spec.diagonal}"


@pytest.mark.parametrize(
    ("lengths", "changes", "expected"),
    [
        ((9, 9), {"causal": True}, (None, 0)),
        ((1, 9), {"causal": True, "align": "bottom_right"}, (None, None)),
        ((9, 5), {"causal": True, "align": "bottom_right"}, (None, 0)),
        ((9, 9), {"window": (8, 7)}, (None, 7)),
        ((9, 9), {"window": (7, 8)}, (7, None)),
        ((9, 9), {"window": (2**31, 2**31)}, (None, None)),
        ((3, 9), {"window": (2, 1), "align": "top_left"}, (None, 1)),
    ],
)
def test_bounds_that_rule_out_nothing_do_not_bind(lengths, changes, expected):
    q_len, kv_len = lengths
    spec = spec_of(q=tensor(2, 4, q_len, 8), k=tensor(2, 2, kv_len, 8), v=tensor(2, 2, kv_len, 8), **changes)
    assert spec.binding_band == expected, f"of {spec.band} over {lengths}"


def test_a_window_beyond_any_length_is_like_no_bound():
    spec = spec_of(window=(2**70, 2**63))
    assert all(bound is not None and 6 < bound < 2**31 for bound in spec.window), f"window {spec.window} may overflow 32 bits"
    assert spec.window == spec_of(window=(2**31, 2**40)).window, "bounds that no length reaches are one and the same"


def test_masks_and_biases_have_4_dims():
    spec = spec_of(mask=tensor(6, 1, dtype=torch.bool), bias=tensor(1, 4, 1, 6, dtype=torch.float16))
    assert spec.mask == (1, 1, 6, 1), f"mask is {spec.mask}"
    assert (spec.bias, spec.bias_dtype) == ((1, 4, 1, 6), torch.float16), f"bias is {spec.bias}, {spec.bias_dtype}"


def test_equal_calls_give_equal_specs_and_hashes():
    options = {"causal": True, "window": (2, 0), "mask": tensor(6, 6, dtype=torch.bool), "layout": layout(), "sinks": tensor(4)}
    one, other = spec_of(**options), spec_of(**options | {"mask": torch.ones(6, 6, dtype=torch.bool), "layout": layout()})
    assert one == other, "a spec depends on the values of a tensor"
    assert hash(one) == hash(other), "equal specs have different hashes"
    assert one != spec_of(**options, softcap=1.0), "softcap is not part of the spec"
    assert len({one, other, replace(one, batch=3)}) == 2, "specs do not work as keys"


def test_grads_lists_the_inputs_that_need_one():
    changes = {"k": tensor(2, 2, 6, 8).requires_grad_(), "bias": tensor(6, 6).requires_grad_(), "sinks": tensor(4)}
    assert spec_of(**changes).grads == ("k", "bias"), f"got {spec_of(**changes).grads}"
    with torch.no_grad():
        assert spec_of(**changes).grads == (), "no_grad asks for no gradient"
    with torch.inference_mode():
        assert spec_of(**changes).grads == (), "inference_mode asks for no gradient"


def test_torch_deterministic_algorithms_imply_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        assert spec_of().deterministic, "torch.use_deterministic_algorithms is not seen"
    finally:
        torch.use_deterministic_algorithms(False)
    assert not spec_of().deterministic, "deterministic without being asked"


@pytest.mark.parametrize(("q_heads", "kv_heads", "group"), [(4, 2, 2), (4, 4, 1), (0, 0, 1), (0, 4, 1), (6, 1, 6)])
def test_group_is_never_zero(q_heads, kv_heads, group):
    spec = spec_of(q=tensor(2, q_heads, 6, 8), k=tensor(2, kv_heads, 6, 8), v=tensor(2, kv_heads, 6, 8))
    assert spec.group == group, f"{q_heads} query heads over {kv_heads} give a group of {spec.group}"
