"""torch.compile(fullgraph=True) of a function that calls attention gives what eager gives."""

from __future__ import annotations

import copy
import shutil
import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import attnzoo
from attnzoo import BlockLayout, layouts

BACKENDS = ("naive", "tiled")
needs_compiler = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # raised while torch imports Inductor
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on CPU"),
]


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(q_len=12, kv_len=12, seed=0, heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, q_len, 8), (2, kv_heads, kv_len, 8), (2, kv_heads, kv_len, 8))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def assert_same(compiled, eager, inputs):
    """Outputs and gradients."""
    found, expected = compiled(*inputs), eager(*inputs)
    found, expected = (out if isinstance(out, tuple) else (out,) for out in (found, expected))
    for place, (one, other) in enumerate(zip(found, expected)):
        torch.testing.assert_close(one, other, msg=lambda text, place=place: f"output {place} differs from eager: {text}")
        assert one.stride() == other.stride(), f"output {place} has strides {one.stride()}, in eager {other.stride()}"
    leaves = list({id(t): t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad}.values())
    if not leaves:
        return
    upstream = [torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view_as(out) for out in expected]
    gradients = zip(torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(expected, leaves, upstream))
    for place, (one, other) in enumerate(gradients):
        torch.testing.assert_close(one, other, msg=lambda text, place=place: f"gradient {place} differs from eager: {text}")


OPTIONS = {
    "plain": {},
    "causal-window": {"causal": True, "window": (5, None)},
    "tables": {"mask": torch.ones(12, 12, dtype=torch.bool).tril(3), "bias": torch.linspace(-1, 1, 144).view(12, 12), "softcap": 2.0},
    "segments": {"segment_ids": torch.tensor([[0] * 5 + [1] * 7] * 2)},
    "layout": {"layout": BlockLayout.from_dense(torch.ones(12, 12, dtype=torch.bool).tril(), block=5)},
    "sinks-lse": {"sinks": torch.linspace(-1, 1, 4), "return_lse": True},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 7},
    "dropout-tensor-seed": {"dropout_p": 0.3, "dropout_seed": torch.tensor([2**40 + 1])},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_full_graph_with_gradients(name, backend):
    def call(q, k, v):
        return attnzoo.attention(q, k, v, backend=backend, **OPTIONS[name])

    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager"), call, qkv())


def test_a_layout_chosen_in_compiled_code():
    def call(q, k, v, scores):
        return attnzoo.attention(q, k, v, layout=layouts.topk(scores, 2, q_len=12, kv_len=12, block=4), backend="tiled")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        assert_same(compiled, call, [*qkv(), torch.rand(3, 3, generator=torch.Generator().manual_seed(seed))])


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_a_write_to_a_layout_is_caught_by_compiled_code(compiler):
    q, k, v = qkv()
    layout = BlockLayout.from_dense(torch.ones(12, 12, dtype=torch.bool).tril(), block=4)
    compiled = torch.compile(lambda q: attnzoo.attention(q, k, v, layout=layout, backend="tiled"), fullgraph=True, backend=compiler)
    torch.testing.assert_close(compiled(q), attnzoo.attention(q, k, v, layout=layout, backend="naive"))
    copy.deepcopy(layout).full.indices[0] = 99
    out = compiled(q)
    layout.full.indices[0] = 99
    with pytest.raises(ValueError, match="written in place"):
        compiled(q)
    with pytest.raises((ValueError, RuntimeError), match=r"written in place|modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_bias_and_sinks(backend):
    def call(q, k, v, bias, sinks):
        return attnzoo.attention(q, k, v, bias=bias, sinks=sinks, causal=True, return_lse=True, backend=backend)

    tables = [torch.linspace(-1, 1, 48).view(1, 4, 1, 12).requires_grad_(), torch.linspace(-1, 1, 4).requires_grad_()]
    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager"), call, [*qkv(), *tables])


def with_dynamic_lengths(inputs):
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 2)
    return inputs


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_lengths(backend):
    def call(q, k, v):
        return attnzoo.attention(q, k, v, causal=True, align="bottom_right", window=(9, None), backend=backend)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for q_len, kv_len in ((12, 20), (13, 21), (30, 12), (64, 67)):
        assert_same(compiled, call, with_dynamic_lengths(qkv(q_len, kv_len)))
    assert counter.frame_count == 1, f"compiled {counter.frame_count} times for 4 pairs of lengths"
    assert_same(compiled, call, qkv(20, 20))  # equal lengths need no align: another graph


def test_every_size_dynamic():
    def call(q, k, v):
        return attnzoo.attention(q, k, v, causal=True, backend="tiled")

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    assert_same(compiled, call, qkv(12, 12, heads=4))
    before = counter.frame_count
    for length, heads in ((13, 6), (64, 8)):
        assert_same(compiled, call, qkv(length, length, heads=heads))
    assert counter.frame_count == before, f"compiled {counter.frame_count - before} times more for other sizes"


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_that_turn_dynamic(backend):
    """By default torch.compile takes the first shape as static, and generalises at the second."""

    def call(q, k, v):
        return attnzoo.attention(q, k, v, backend=backend)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for length in (8, 16, 24):
        assert_same(compiled, call, qkv(length, length))


@pytest.mark.parametrize("backend", [*BACKENDS, None], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_one_tensor_as_q_k_and_v(dynamic, backend):
    def call(x):
        return attnzoo.attention(x, x, x, causal=True, backend=backend)

    inputs = with_dynamic_lengths(qkv()[:1]) if dynamic else qkv()[:1]
    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager"), call, inputs)


def test_q_k_and_v_from_one_projection():
    def call(x):
        q, k, v = x.unflatten(-1, (3, 4, 8)).unbind(2)
        return attnzoo.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), backend="tiled").transpose(1, 2).flatten(2)

    x = torch.randn(2, 12, 96, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager"), call, [x])


@pytest.mark.parametrize("choice", [None, "auto", ("tiled", "naive")], ids=str)
def test_choice_is_part_of_the_graph(choice):
    def call(q, k, v):
        return attnzoo.attention(q, k, v, backend=choice)

    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager"), call, qkv())


@pytest.mark.parametrize("when", ["compiled inside", "compiled before"])
def test_a_nameless_call_inside_use_raises(when):
    def call(q, k, v):
        return attnzoo.attention(q, k, v)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    inputs = [t.detach() for t in qkv()]
    if when == "compiled before":
        compiled(*inputs)
    with attnzoo.use("naive"), pytest.raises(Exception, match="must name its backend"):
        compiled(*inputs)
    torch.testing.assert_close(compiled(*inputs), call(*inputs), msg="after use() it no longer works")


def test_the_error_in_another_thread_says_why():
    inputs, caught = [t.detach() for t in qkv()], []
    compiled = torch.compile(lambda q, k, v: attnzoo.attention(q, k, v), fullgraph=True, backend="eager")

    def run():
        try:
            compiled(*inputs)
        except Exception as error:
            caught.append(str(error))

    with attnzoo.use("naive"):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(caught) == 1, "no error: a compiled call can't tell whose use() it is in"
    assert "while any thread is inside attnzoo.use()" in caught[0], f"it says {caught[0]}"


def test_a_named_call_inside_use_compiles():
    def call(q, k, v):
        return attnzoo.attention(q, k, v, backend="naive")

    with attnzoo.use("tiled"):
        assert_same(torch.compile(call, fullgraph=True, backend="eager"), call, [t.detach() for t in qkv()])


def test_drawn_dropout_follows_manual_seed():
    def call(q, k, v):
        return attnzoo.attention(q, k, v, dropout_p=0.5, backend="tiled")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    inputs = [t.detach() for t in qkv()]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second = compiled(*inputs), compiled(*inputs)
        torch.manual_seed(3)
        again = compiled(*inputs)
    assert torch.equal(first, again), "manual_seed does not repeat the draw"
    assert not torch.equal(first, second), "the seed was drawn once, at compile time"


def test_numbers_that_change():
    def call(q, k, v, scale, window, seed):
        options = {"scale": scale, "softcap": abs(scale) + 1, "window": (window, 0), "dropout_p": 0.25, "dropout_seed": seed}
        return attnzoo.attention(q, k, v, backend="tiled", **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for numbers in ((1.0, 1, 0), (0.5, 2, 7), (-2.5, 3, -1), (0.0, 2**40, 2**64 - 1)):
        assert_same(compiled, call, [*(t.detach() for t in qkv()), *numbers])


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend):
    def call(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return attnzoo.attention(q, k, v, backend=backend)

    inputs = [t.detach() for t in qkv()]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*inputs), call(*inputs)
    assert found.dtype == torch.bfloat16, f"o has {found.dtype}"
    torch.testing.assert_close(found, expected, msg="differs from eager")


def test_errors_are_the_same_when_compiled():
    def call(q, k, v):
        return attnzoo.attention(q, k, v, causal=True, backend="naive")

    with pytest.raises(Exception, match="say where the diagonal"):
        torch.compile(call, fullgraph=True, backend="eager")(*qkv(3, 5))


def test_a_refusal_keeps_its_reasons_when_compiled():
    def call(q, k, v):
        return attnzoo.attention(q, k, v, backend="flash")

    with pytest.raises(Exception, match="device is cpu, it takes cuda"):
        torch.compile(call, fullgraph=True, backend="eager")(*qkv())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # raised while torch imports Inductor
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on CPU")
def test_inductor():
    def call(q, k, v):
        return attnzoo.attention(q * 2, k, v, causal=True, backend="tiled") + 1

    assert_same(torch.compile(call, fullgraph=True), call, qkv())
