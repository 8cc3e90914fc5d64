"""attnzoo-sdpa: what each backend claims holds, what it can't do it refuses, and a pinned kernel is the one that runs."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnzoo
from attnzoo import AttentionSpec, UnsupportedError
from attnzoo.testing import Subject, run_case
from attnzoo.testing.cases import CASES
from attnzoo.testing.inputs import make_call

kernels = pytest.importorskip("attnzoo_sdpa.kernels", reason="attnzoo-sdpa is not installed: pip install -e plugins/attnzoo-sdpa")
convert = pytest.importorskip("attnzoo_sdpa.convert")

NAMES = ("sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math")
ON_CPU = ("sdpa", "sdpa_flash", "sdpa_math")
CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def randn(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype).requires_grad_(grad)


def spec(**changes):
    q = torch.empty(2, 4, 16, 32)
    return dataclasses.replace(AttentionSpec.of(q, q, q), **changes)


def on_cuda(**changes):
    return spec(**{"device": torch.device("cuda"), "dtype": torch.bfloat16, **changes})


def reasons(name, asked):
    return attnzoo.get(name).unsupported_reasons(asked)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("case", CASES[:: max(len(CASES) // 80, 1)], ids=lambda case: case.id)
def test_a_sample_of_the_conformance_kit(name, case):
    run_case(Subject(name), case, "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 0)}, {"mask": torch.ones(9, 9, dtype=torch.bool).tril()}])
def test_the_pinned_kernel_is_the_one_that_runs(dtype, options):
    q = randn(1, 2, 9, 8, dtype=dtype)
    for name, is_fused in (("sdpa_flash", True), ("sdpa_math", False)):
        with Seen() as seen:
            attnzoo.attention(q, q, q, backend=name, **options)
        assert (CPU_FLASH in seen.names) is is_fused, f"{name} ran {sorted(seen.names)}"


@pytest.mark.parametrize("name", ["sdpa", "sdpa_math"])
def test_a_bias_without_keys(name):
    q, k, bias = randn(2, 2, 6, 4), randn(2, 2, 0, 4), randn(1, 2, 6, 0)
    assert not attnzoo.attention(q, k, k, bias=bias, backend=name).any()


def test_rows_without_a_key_are_zero_and_send_no_gradient():
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    bias = torch.zeros(6, 6).masked_fill(~mask, -torch.inf)
    for name in ON_CPU:
        for options in ({"mask": mask}, *([{"bias": bias}] if name != "sdpa_flash" else [])):
            q, k, v = (randn(1, 1, 6, 4, grad=True) for _ in range(3))
            o = attnzoo.attention(q, k, v, backend=name, **options)
            grads = torch.autograd.grad(o.sum(), (q, k, v))
            assert torch.equal(o[:, :, 2], torch.zeros(1, 1, 4)), f"{name}: the row is {o[:, :, 2]}"
            assert torch.equal(grads[0][:, :, 2], torch.zeros(1, 1, 4)), f"{name}: its gradient is {grads[0][:, :, 2]}"
            assert all(torch.isfinite(grad).all() for grad in grads), f"{name}: a gradient is not finite"


@pytest.mark.parametrize("name", ON_CPU)
def test_top_left_and_bottom_right(name):
    q, k = randn(1, 1, 2, 4), randn(1, 1, 5, 4)
    for align, seen in (("top_left", (1, 2)), ("bottom_right", (4, 5))):
        o = attnzoo.attention(q, k, k, causal=True, align=align, scale=0.0, backend=name)
        for row, count in enumerate(seen):
            expected = k[0, 0, :count].mean(0)
            assert torch.allclose(o[0, 0, row], expected), f"{align}, row {row}: {o[0, 0, row]}, not the mean of {count} values"


@pytest.mark.parametrize(
    ("q_len", "kv_len", "options", "kind"),
    [
        (4, 4, {}, "none"),
        (4, 4, {"causal": True}, "causal"),
        (4, 4, {"window": (None, 0)}, "causal"),
        (4, 4, {"window": (3, 3)}, "none"),
        (4, 4, {"window": (2, 3)}, "table"),
        (4, 4, {"causal": True, "window": (3, 5)}, "causal"),
        (2, 5, {"causal": True, "align": "top_left"}, "causal"),
        (2, 5, {"causal": True, "align": "bottom_right"}, "table"),
        (1, 5, {"causal": True, "align": "bottom_right"}, "none"),
        (5, 2, {"causal": True, "align": "top_left"}, "causal"),
        (5, 2, {"causal": True, "align": "bottom_right"}, "table"),
        (2, 5, {"window": (None, 0), "align": "bottom_right"}, "table"),
        (2, 5, {"window": (None, 1), "align": "bottom_right"}, "none"),
        (2, 5, {"window": (None, 4), "align": "top_left"}, "none"),
    ],
)
def test_what_a_band_comes_to(q_len, kv_len, options, kind):
    asked = AttentionSpec.of(torch.empty(1, 1, q_len, 4), torch.empty(1, 1, kv_len, 4), torch.empty(1, 1, kv_len, 4), **options)
    assert convert.band_kind(asked) == kind


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("feature", "changes"),
    [
        ("lse", {"return_lse": True}),
        ("softcap", {"softcap": 5.0}),
        ("sinks", {"sinks_dtype": torch.float32}),
        ("dropout", {"dropout_p": 0.1}),
        ("device", {"device": torch.device("meta")}),
    ],
)
def test_what_torch_has_not_is_refused(name, feature, changes):
    found = reasons(name, spec(**changes))
    assert any(feature in reason for reason in found), f"{name} says {found}"


@pytest.mark.parametrize(
    ("name", "part", "changes"),
    [
        ("sdpa_flash", "float32, it takes bfloat16", {"dtype": torch.float32}),
        ("sdpa_flash", "head_dim is 264", {"head_dim": 264, "value_dim": 264}),
        ("sdpa_flash", "value_dim is 16", {"value_dim": 16}),
        ("sdpa_flash", "mask (", {"mask": (1, 1, 16, 16)}),
        ("sdpa_flash", "window (", {"window": (1, 1)}),
        ("sdpa_flash", "top_left (", {"causal": True, "align": "top_left", "kv_len": 20}),
        ("sdpa_flash", "deterministic", {"deterministic": True, "grads": ("q",)}),
        ("sdpa_flash", "empty", {"kv_len": 0}),
        ("sdpa_flash", "batch is 65536", {"batch": 65536}),
        ("sdpa_flash", "q_heads is 65536", {"q_heads": 65536}),
        ("sdpa_cudnn", "head_dim is 20", {"head_dim": 20}),
        ("sdpa_cudnn", "k has length 1", {"kv_len": 1}),
        ("sdpa_cudnn", "scale is 1e-06", {"scale": 1e-6, "dtype": torch.float16, "grads": ("q",)}),
        ("sdpa_efficient", "scale is -1e-06", {"scale": -1e-6, "dtype": torch.float16, "grads": ("q",)}),
        ("sdpa_cudnn", "head_dim is 136", {"head_dim": 136}),
        ("sdpa_efficient", "head_dim is 12", {"head_dim": 12}),
        ("sdpa_efficient", "head_dim is 6", {"head_dim": 6, "dtype": torch.float32}),
        ("sdpa_efficient", "batch is 70000", {"batch": 70000}),
        ("sdpa_efficient", "2**31", {"mask": (1, 1, 1, 1), "q_len": 2**16, "kv_len": 2**15}),
        ("sdpa_efficient", "a lone row", {"mask": (1, 1, 1, 1), "q_len": 65}),
        ("sdpa_efficient", "float64", {"dtype": torch.float64}),
        ("sdpa_efficient", "cast the bias", {"bias": (1, 1, 1, 1), "bias_dtype": torch.float32}),
        ("sdpa", "torch's math path: lse", {"return_lse": True}),
    ],
)
def test_what_a_cuda_kernel_has_not_is_refused(monkeypatch, name, part, changes):
    monkeypatch.setattr(kernels, "least_capability", lambda: 90)
    found = reasons(name, on_cuda(**changes))
    assert any(part in reason for reason in found), f"{name} says {found}"


CLAIMS = [case for case in CASES if case.check == "claim"]


@pytest.mark.parametrize(("name", "device"), [*[(name, "cpu") for name in ON_CPU], *[(name, "cuda") for name in NAMES]])
def test_what_is_claimed_on_a_device_is_what_it_serves(monkeypatch, name, device):
    """The kit asks the same of a card; here the decisions alone."""
    monkeypatch.setattr(kernels, "least_capability", lambda: 90)
    monkeypatch.setattr(kernels, "has_cudnn", lambda: True)
    backend = attnzoo.get(name).backend
    claims = backend.capabilities_on(device)
    for case in CLAIMS:
        problem = dataclasses.replace(case.problem, dtype=str(min(claims.dtypes, key=str)).removeprefix("torch."))
        asked = dataclasses.replace(Subject(name).spec(make_call(problem, torch.device("cpu"))), device=torch.device(device))
        claimed = set(problem.features) <= (claims.backward if problem.grads else claims.forward)
        found = backend.unsupported_reasons(asked)
        assert claimed is not bool(found), f"{case.id} is {'claimed' if claimed else 'not claimed'}, the reasons against it are {found}"


def test_a_device_has_its_own_claims():
    flash = attnzoo.get("sdpa_flash").backend
    assert "mask" in flash.capabilities_on("cpu").forward
    assert "mask" not in flash.capabilities_on("cuda").forward
    assert torch.float32 not in flash.capabilities_on("cuda").dtypes
    assert flash.capabilities.devices == {"cpu", "cuda"}, "the claims of both, taken together"


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient"])
def test_a_card_that_is_not_there_is_a_reason(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "the device is cuda, torch sees no CUDA device here" in " ".join(reasons(name, on_cuda()))


def test_an_old_card_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "least_capability", lambda: 75)
    for name in ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient"):
        assert any("sm_75" in reason for reason in reasons(name, on_cuda())), f"{name} says {reasons(name, on_cuda())}"
    assert not reasons("sdpa", on_cuda()), "sdpa has the math path on any card"


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_efficient"])
def test_the_cpu_has_no_such_kernel(name):
    assert any("device is cpu, it takes cuda" in reason for reason in reasons(name, spec())), f"{name} says {reasons(name, spec())}"


def test_half_precision_reductions_are_refused():
    try:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        assert any("allow_fp16" in reason for reason in reasons("sdpa_math", spec(dtype=torch.float16)))
        assert not reasons("sdpa_math", spec()), "float32 has nothing to reduce to"
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)


def test_a_bias_in_full_precision_goes_to_the_math_path():
    q, bias = randn(1, 2, 5, 8, dtype=torch.bfloat16), randn(5, 5)
    with pytest.raises(UnsupportedError, match="cast the bias"):
        attnzoo.attention(q, q, q, bias=bias, backend="sdpa_flash")
    o = attnzoo.attention(q, q, q, bias=bias, backend="sdpa")
    assert torch.equal(o, attnzoo.attention(q, q, q, bias=bias, backend="sdpa_math"))


def test_a_view_of_one_batch_entry_is_written_out_for_cuda_kernels():
    q, k = randn(1, 2, 8, 16).expand(3, -1, -1, -1), randn(3, 2, 8, 16)
    asked = AttentionSpec.of(q, k, k)
    wants = convert.Wants(torch.float32, None, aligned=True, expands_groups=False)
    made = convert.convert(asked, attnzoo.AttentionInputs.of(asked, q, k, k), wants)
    assert 0 not in made.q.stride(), f"strides are {made.q.stride()}: cuDNN lays its result out like that"
    assert torch.equal(made.q, q)


@pytest.mark.parametrize(
    "q",
    [randn(2, 5, 4, 16).transpose(1, 2), randn(2, 4, 5, 32)[..., :16], randn(2, 4, 5, 16), randn(2, 4, 21).unfold(-1, 16, 1)],
    ids=["bshd", "slack", "bhsd", "overlap"],
)
def test_what_is_copied_when_compiled_keeps_its_order_in_memory(q):
    """The kernels lay their result out like q: a compiled call would give other strides than an eager one."""
    compiled = torch.compile(lambda tensor: convert.kernel_ready(tensor, True), fullgraph=True, backend="aot_eager")
    eager = torch.empty_like(convert.kernel_ready(q, True))
    assert torch.empty_like(compiled(q)).stride() == eager.stride()
    assert convert.kernel_ready(q, True).stride(-1) == compiled(q).stride(-1) == 1
    assert torch.equal(compiled(q), q)


def test_a_compiled_copy_is_one_that_the_compiler_keeps():
    """Of what is laid out like its copy Inductor drops a clone, and cuDNN then reads rows at odd addresses: NaN on an H200."""
    graphs = []

    def seen(graph, example):
        graphs.append(graph)
        return graph

    torch.compile(lambda tensor: convert.kernel_ready(tensor, True), fullgraph=True, backend=seen)(randn(2, 5, 4, 16).transpose(1, 2))
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert torch.where in called, f"the graph calls {called}, not what attnzoo.copied makes its copies of"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, of its rules for tangents
def test_a_compiled_derivative_goes_through_the_copies():
    """With an operator of its own for them, a compiled jvp was 0."""
    q, k, w = (randn(2, 4, 33, 16) for _ in range(3))

    def tangent(v):
        run = lambda v: attnzoo.attention(q, k, v[:, :, :1].expand(2, 4, 33, 16), causal=True, backend="sdpa_math").sum()  # noqa: E731
        return torch.func.jvp(run, (v,), (torch.ones_like(v),))[1]

    torch.testing.assert_close(torch.compile(tangent, backend="aot_eager")(w), tangent(w))


def test_torchs_switches_are_as_before():
    def switches():
        cuda = torch.backends.cuda
        return cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()

    before, q = switches(), randn(1, 1, 4, 8)
    for name in ON_CPU:
        attnzoo.attention(q, q, q, backend=name)
    assert switches() == before, f"{before} became {switches()}"


def test_threads_do_not_exchange_their_kernels():
    q, wrong = randn(1, 2, 33, 16), []

    def call(name, is_fused):
        for _ in range(40):
            with Seen() as seen:
                attnzoo.attention(q, q, q, backend=name)
            if (CPU_FLASH in seen.names) is not is_fused:
                wrong.append(f"{name} ran {sorted(seen.names)}")

    threads = [threading.Thread(target=call, args=pin) for pin in (("sdpa_flash", True), ("sdpa_math", False)) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_math"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_in_one_graph(name, dynamic):
    def call(q, k):
        return attnzoo.attention(q, k, k, causal=True, align="bottom_right", backend=name)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for heads, kv_heads in ((4, 2), (6, 3), (2, 2)):
        q, k = randn(1, heads, 3, 8), randn(1, kv_heads, 7, 8)
        assert torch.allclose(compiled(q, k), call(q, k), atol=1e-6), "compiled and eager differ"


def test_second_derivatives():
    leaves = [randn(1, 1, 4, 3, dtype=torch.float64, grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(lambda q, k, v: attnzoo.attention(q, k, v, causal=True, backend="sdpa_math"), leaves)
    first = torch.autograd.grad(attnzoo.attention(*leaves, backend="sdpa_flash").square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="flash_attention_for_cpu_backward is not implemented"):
        torch.autograd.grad(first[0].sum(), leaves)
