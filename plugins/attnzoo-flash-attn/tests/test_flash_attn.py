"""attnzoo-flash-attn: what is not installed or not measured is refused; calls arrive at flash-attn in its own terms.

The kernels run on Hopper alone. Here their places are taken by functions that read flash-attn's arguments as its own
documentation defines them, in plain PyTorch.
"""

from __future__ import annotations

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

import attnzoo
from attnzoo import AttentionInputs, AttentionSpec, BlockLayout

fa2 = pytest.importorskip("attnzoo_flash_attn.fa2", reason="attnzoo-flash-attn is not installed: pip install -e plugins/attnzoo-flash-attn")
fa3 = pytest.importorskip("attnzoo_flash_attn.fa3", reason="attnzoo-flash-attn is not installed: pip install -e plugins/attnzoo-flash-attn")
fa4 = pytest.importorskip("attnzoo_flash_attn.fa4")
tensors = pytest.importorskip("attnzoo_flash_attn.tensors")


class Lists(NamedTuple):
    """As flash_attn.cute.block_sparsity names its fields."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    block_size: tuple[int, int]


def dense(lists, rows, columns):
    """The block table that lists stand for."""
    assert int(lists.mask_block_cnt.sum()) == 0
    batch, heads, lines = lists.full_block_cnt.shape
    table = torch.zeros(batch, heads, lines, columns, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for line in range(rows):
                table[b, h, line, lists.full_block_idx[b, h, line, : lists.full_block_cnt[b, h, line]].long()] = True
    return table


def flash_attn(q, k, v, softmax_scale, causal=False, window_size=(None, None), softcap=0.0, block_sparse_tensors=None, **others):
    """flash-attn's semantics: (B, S, H, D), bottom-right bands, o and lse."""
    q, k, v = (t.transpose(1, 2).double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = softmax_scale * (q @ k.mT)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(k.shape[2])[None] - torch.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
    left, right = window_size
    kept = torch.ones_like(distance, dtype=torch.bool)
    if causal or right is not None:
        kept &= distance <= (0 if causal else right)
    if left is not None:
        kept &= distance >= -left
    if block_sparse_tensors is not None:
        size = block_sparse_tensors.block_size[0]
        table = dense(block_sparse_tensors, q.shape[2] // size, k.shape[2] // size)
        transposed = dense(others["block_sparse_tensors_bwd"], k.shape[2] // size, q.shape[2] // size)
        assert torch.equal(table.mT, transposed), "the lists of the backward are not those of the forward, transposed"
        kept = kept & table.repeat_interleave(size, 2).repeat_interleave(size, 3)
    scores = scores.masked_fill(~kept, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), scores.logsumexp(-1).float()


def flash_attn_2(q, k, v, *, dropout_p, softmax_scale, causal, window_size, softcap, return_attn_probs):
    """flash-attn 2's: -1 is no bound, and the probabilities of its dropout are a third result."""
    assert dropout_p == 0.0
    assert return_attn_probs
    bounds = tuple(None if bound == -1 else bound for bound in window_size)
    return (*flash_attn(q, k, v, softmax_scale, causal, bounds, softcap), None)


def flash_attn_4_forward(q, k, v, *, softmax_scale, causal, window_size_left, window_size_right, softcap, return_lse):
    """flash_attn.cute.interface's, which its autograd function calls."""
    assert return_lse
    return (*flash_attn(q, k, v, softmax_scale, causal, (window_size_left, window_size_right), softcap), None, None, None)


def flash_attn_4_backward(q, k, v, out, dout, lse, softmax_scale, causal, softcap, *, window_size_left, window_size_right, dlse):
    """By differentiating the forward again, in a thread of its own: inside an operator nothing is recorded."""

    def differentiate():
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        o, again = flash_attn(*leaves, softmax_scale, causal, (window_size_left, window_size_right), softcap)
        torch.testing.assert_close(out, o.detach())
        torch.testing.assert_close(lse, again.detach())
        grads = (dout,) if dlse is None else (dout, dlse)
        return torch.autograd.grad((o, again)[: len(grads)], leaves, grads)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(differentiate).result()


@pytest.fixture
def installed(monkeypatch):
    """Modules of flash-attn's names, with the functions above."""
    for name in ("flash_attn", "fa3_fwd_interface", "flash_attn.cute", "flash_attn.cute.block_sparsity"):
        module = ModuleType(name)
        module.flash_attn_func = flash_attn_2 if name == "flash_attn" else flash_attn
        module.BlockSparseTensorsTorch = lambda cnt, idx, full, full_idx, block_size: Lists(cnt, idx, full, full_idx, block_size)
        monkeypatch.setitem(sys.modules, name, module)
    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = flash_attn_4_forward, flash_attn_4_backward
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("backend", [fa2.Fa2(), fa3.Fa3(), fa4.Fa4()], ids=["fa2", "fa3", "fa4"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "align": "bottom_right"},
        {"scale": -0.3, "softcap": 2.0},
        {"scale": 0.0},
        {"window": (9, 4), "align": "bottom_right"},
        {"window": (9, None), "causal": True, "align": "bottom_right"},
        {"window": (500, 3), "align": "bottom_right"},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_calls_arrive_as_they_are_meant(installed, backend, options):
    if "window" in options and backend.name == "fa3":
        pytest.skip("fa3 refuses windows")
    q, k, v = randn(2, 4, 50, 16), randn(2, 2, 70, 16), randn(2, 2, 70, 16)
    asked = AttentionSpec.of(q, k, v, return_lse=True, **options)
    o, lse = backend.attend(asked, AttentionInputs.of(asked, q, k, v))
    truth, truth_lse = attnzoo.attention(q, k, v, return_lse=True, backend="naive", **options)
    torch.testing.assert_close(o, truth)
    torch.testing.assert_close(lse.double(), truth_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "align": "bottom_right"}, {"window": (9, 4), "align": "bottom_right"}, {"scale": -0.3, "softcap": 2.0}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_fa4_compiles_in_one_graph_with_its_gradients(installed, options):
    def call(q, k, v):
        asked = AttentionSpec.of(q, k, v, return_lse=True, **options)
        return fa4.Fa4().attend(asked, AttentionInputs.of(asked, q, k, v))

    def results(function):
        q, k, v = [made.transpose(1, 2).requires_grad_() for made in (randn(2, 50, 4, 16), randn(2, 70, 2, 16), randn(2, 70, 2, 16))]
        o, lse = function(q, k, v)
        return [o, lse, *torch.autograd.grad((o.sin().sum(), lse.sum().double()), (q, k, v), (torch.tensor(1.0, dtype=o.dtype),) * 2)]

    eager, compiled = results(call), results(torch.compile(call, fullgraph=True, backend="aot_eager"))
    for one, other in zip(compiled, eager):
        torch.testing.assert_close(one, other)
    assert compiled[0].stride() == eager[0].stride()


def test_a_compiled_copy_is_one_that_the_compiler_keeps():
    """Of what is laid out like its copy Inductor drops a clone: the kernels would read 16 bytes at a time from an odd address."""
    from attnzoo_flash_attn.tensors import aligned

    graphs = []

    def seen(graph, example):
        graphs.append(graph)
        return graph

    torch.compile(aligned, fullgraph=True, backend=seen)(torch.randn(2, 4, 5, 16))
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert torch.where in called, f"the graph calls {called}, not what attnzoo.copied makes its copies of"


@pytest.mark.parametrize("backend", [fa2.Fa2(), fa3.Fa3()], ids=["fa2", "fa3"])
def test_the_others_leave_their_own_operators_to_the_compiler(installed, backend):
    """They bring operators; what this plugin does around them must not stop Dynamo, which can't tell an address."""

    def call(q, k):
        asked = AttentionSpec.of(q, k, k, causal=True)
        return backend.attend(asked, AttentionInputs.of(asked, q, k, k))[0]

    q, k = randn(2, 4, 50, 16), randn(2, 2, 50, 16)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k), call(q, k))


@pytest.mark.parametrize("heads", [1, 2])
def test_layouts_arrive_as_lists_and_their_transposes(installed, heads):
    blocks = torch.rand(1, heads, 3, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    blocks[..., 0] = True
    layout = BlockLayout.from_blocks(blocks, block=128)
    q, k = randn(2, 2, 384, 8), randn(2, 2, 512, 8)
    asked = AttentionSpec.of(q, k, k, layout=layout)
    o, _ = fa4.Fa4().attend(asked, AttentionInputs.of(asked, q, k, k, layout=layout))
    torch.testing.assert_close(o, attnzoo.attention(q, k, k, layout=layout, backend="naive"))


def test_rows_that_start_off_16_bytes_are_copied():
    q = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16).transpose(1, 2)
    asked = AttentionSpec.of(q, q, q)
    assert tensors.ready(asked, AttentionInputs.of(asked, q, q, q))[0].data_ptr() == q.data_ptr(), "what is aligned is not copied"
    shifted = torch.zeros(300, dtype=torch.bfloat16)[1:257].view(1, 8, 2, 16).transpose(1, 2)
    ready = tensors.ready(asked, AttentionInputs.of(asked, shifted, q, q))[0]
    assert ready.data_ptr() % 16 == 0, "an odd offset reaches the kernel"
    spread = torch.zeros(1, 8, 1, 16, dtype=torch.bfloat16).expand(1, 8, 2, 16).transpose(1, 2)
    assert 0 not in tensors.ready(asked, AttentionInputs.of(asked, spread, q, q))[0].stride(), "a stride of 0 reaches the kernel"


def spec(**changes):
    q = torch.empty(2, 4, 256, 64)
    return dataclasses.replace(AttentionSpec.of(q, q, q), **{"device": torch.device("cuda"), "dtype": torch.bfloat16, **changes})


LAYOUT = BlockLayout.from_blocks(torch.ones(2, 2, dtype=torch.bool), block=128).summary


@pytest.mark.parametrize(
    ("name", "part", "changes"),
    [
        ("fa2", "flash-attn 2 is not installed: pip install", {}),
        ("fa2", "dtype is float32", {"dtype": torch.float32}),
        ("fa2", "bottom_right (", {"causal": True, "align": "bottom_right", "kv_len": 512}),
        ("fa2", "head_dim is 68, it takes multiples of 8", {"head_dim": 68, "value_dim": 68}),
        ("fa3", "fa3-fwd is not installed: pip install", {}),
        ("fa4", "flash-attn-4 is not installed: pip install", {}),
        ("fa3", "it has no backward", {"grads": ("q",)}),
        ("fa3", "dtype is float16", {"dtype": torch.float16}),
        ("fa3", "window (", {"window": (4, 4)}),
        ("fa4", "device is cpu", {"device": torch.device("cpu")}),
        ("fa4", "it takes causal and window where q is no longer than k", {"causal": True, "align": "bottom_right", "kv_len": 128}),
        ("fa4", "top_left (", {"causal": True, "align": "top_left", "kv_len": 512}),
        ("fa4", "head_dim is 72, it takes multiples of 32", {"head_dim": 72, "value_dim": 72}),
        ("fa4", "blocks are 256 x 128, it takes 128 x 128", {"layout": dataclasses.replace(LAYOUT, block_q=256)}),
        ("fa4", "blocks are 64 x 128, it takes multiples of 128", {"layout": dataclasses.replace(LAYOUT, block_q=64)}),
        ("fa4", "3 partial blocks", {"layout": dataclasses.replace(LAYOUT, partial_blocks=3)}),
        ("fa4", "multiples of 128", {"layout": LAYOUT, "kv_len": 250}),
        ("fa4", "causal or window beside a layout", {"layout": LAYOUT, "causal": True}),
        ("fa4", "mask (", {"mask": (1, 1, 256, 256)}),
    ],
)
def test_what_it_can_not_do_is_refused(name, part, changes):
    found = attnzoo.get(name).unsupported_reasons(spec(**changes))
    assert any(part in reason for reason in found), f"{name} says {found}"


def test_gradients_come_back_through_flash_attn_2(installed):
    q, k, v = (tensor.requires_grad_() for tensor in (randn(1, 4, 30, 16), randn(1, 2, 30, 16), randn(1, 2, 30, 16)))
    asked = AttentionSpec.of(q, k, v, causal=True)
    o, _ = fa2.Fa2().attend(asked, AttentionInputs.of(asked, q, k, v))
    found = torch.autograd.grad(o.sum(), (q, k, v))
    expected = torch.autograd.grad(attnzoo.attention(q, k, v, causal=True, backend="naive").sum(), (q, k, v))
    torch.testing.assert_close(found, expected)


def test_a_card_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("fa2", "fa3", "fa4"):
        found = attnzoo.get(name).unsupported_reasons(spec(device=torch.device("cuda:7")))
        assert "the device is cuda:7, this machine has 1 CUDA devices" in found


def test_another_card_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert any("8.0, it takes 9.0" in reason for reason in attnzoo.get("fa4").unsupported_reasons(spec()))
    assert not any("compute capability" in reason for reason in attnzoo.get("fa2").unsupported_reasons(spec()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert any("7.5, it takes 8.0" in reason for reason in attnzoo.get("fa2").unsupported_reasons(spec()))
