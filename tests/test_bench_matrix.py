"""Workloads and matrices: what a file means, what is refused, and that a workload's own options make it again."""

from __future__ import annotations

import pytest

from attnzoo.bench.matrix import QUICK_CPU, QUICK_CUDA, Matrix, workloads_of
from attnzoo.bench.workload import Workload


def matrix_of(tmp_path, text):
    path = tmp_path / "matrix.toml"
    path.write_text(text)
    return Matrix.from_toml(path)


def test_lists_are_crossed_and_sizes_derived(tmp_path):
    text = """
        backends = ["naive", "tiled"]
        relative_to = "naive"
        rounds = 7
        [[workloads]]
        tokens = 4096
        width = 256
        length = [512, 1024]
        head_dim = [64, 128]
        causal = [true, false]
    """
    matrix = matrix_of(tmp_path, text)
    assert (matrix.backends, matrix.rounds, matrix.relative_to) == (("naive", "tiled"), 7, "naive")
    assert len(matrix.workloads) == 8, matrix.workloads
    sizes = {(w.length, w.head_dim, w.batch, w.heads, w.kv_heads, w.kv_length) for w in matrix.workloads}
    assert sizes == {(512, 64, 8, 4, 4, 512), (512, 128, 8, 2, 2, 512), (1024, 64, 4, 4, 4, 1024), (1024, 128, 4, 2, 2, 1024)}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rounds = 3", "no workload"),
        ("[[workloads]]\nlenght = 4", "lenght"),
        ("speed = 3\n[[workloads]]\nlength = 4", "speed"),
        ("[[workloads]]\nlength = 0", "length is 0"),
        ("[[workloads]]\nlength = '4'", "length is '4'"),
        ("[[workloads]]\ndtype = 'int8'", "dtype is 'int8'; it takes float16"),
        ("[[workloads]]\ndirection = 'sideways'", "it takes forward, backward, both"),
        ("[[workloads]]\nheads = 4\nkv_heads = 3", "not a divisor"),
        ("[[workloads]]\nlaunch = 'graph'", "which is CUDA's"),
        ("[[workloads]]\nlayout = 'spiral'", "layout is 'spiral'"),
        ("[[workloads]]\nlayout = 'random'", "random takes a share"),
        ("[[workloads]]\nlayout = 'butterfly:3'", "butterfly takes no number"),
        ("[[workloads]]\ntokens = 64\nbatch = 2", "both tokens and batch"),
        ("[[workloads]]\ntokens = -5\nlength = 4", "tokens is -5 and length 4; both take a positive int"),
        ("[[workloads]]\ntokens = 0\nlength = 4", "tokens is 0 and length 4; both take a positive int"),
        ("[[workloads]]\ntokens = 100\nlength = 512", "tokens is 100, less than one length of 512"),
        ("[[workloads]]\nwidth = 32\nhead_dim = 64", "width is 32, less than one head_dim of 64"),
        ("[[workloads]]\nlayout = 'random: 0.5'", "random takes a share"),
        ("[[workloads]]\nlayout = 'random:0_1'", "random takes a share"),
        ("[[workloads]]\nlayout = 'sliding_window:٣'", "sliding_window takes a whole number"),
        ("[[workloads]]\nlength = 99999999999999999999", "more than a tensor can hold"),
        ("[[workloads]]\nkv_length = 9223372036854775807", "more than a tensor can hold"),
        ("[[workloads]]\ndevice = 'meta'", "device is 'meta', which computes nothing"),
        ("rounds = 0\n[[workloads]]\nlength = 4", "rounds is 0"),
        ("backends = ['a']\nrelative_to = 'b'\n[[workloads]]\nlength = 4", "none of the backends a"),
        ("backends = ['a']\n[[workloads]]\nbackends = ['b']", "a workload is for b, none of the backends a"),
        ("[[workloads]]\nbackends = 'b'", "backends is 'b'"),
        ("only = {}\n[[workloads]]\nlength = 4", "has only"),
        ("workloads = 3", "write each as a"),
        ("[[workloads]]\ncausal = 'false'", "causal is 'false'; it takes a bool"),
        ("[[workloads]]\ncausal = 1", "causal is 1; it takes a bool"),
        ("[[workloads]]\nlayout = 0.25", "layout is 0.25; it takes a str"),
        ("[[workloads]]\ndevice = 3", "device is 3; it takes a str"),
        ("[[workloads]]\ndtype = 16", "dtype is 16; it takes a str"),
        ("[[workloads]]\nlayout = 'random:2'", "random takes a share from 0 to 1"),
        ("[[workloads]]\nlayout = 'random:nan'", "random takes a share from 0 to 1"),
        ("[[workloads]]\nlayout = 'sliding_window:-5'", "sliding_window takes a whole number of tokens"),
        ("[[workloads]]\nlayout = 'sliding_window:5.7'", "sliding_window takes a whole number of tokens"),
        ("[[workloads]]\nlength = []", "length is an empty list"),
        ("[[workloads]]\ndevice = ['cpu', 'cuda']", "one device, and it has cpu and cuda"),
        ("seconds = nan\n[[workloads]]", "seconds is nan"),
        ("timeout = inf\n[[workloads]]", "timeout is inf"),
        ("relative_to = 3\n[[workloads]]", "relative_to is 3; it takes a name"),
        ("[[workloads]", "matrix.toml"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, text, part):
    with pytest.raises(ValueError, match=part):
        matrix_of(tmp_path, text)


def test_a_table_may_name_backends_of_its_own(tmp_path):
    text = """
        backends = ["naive", "tiled"]
        [[workloads]]
        length = 64
        [[workloads]]
        backends = ["tiled"]
        length = 128
    """
    matrix = matrix_of(tmp_path, text)
    first, second = matrix.workloads
    assert all(matrix.runs(first, name) for name in ("naive", "tiled"))
    assert [name for name in matrix.backends if matrix.runs(second, name)] == ["tiled"]


@pytest.mark.parametrize(
    ("first", "second", "runs"),
    [("['a']", "['b', 'a']", {"a", "b"}), ("['a']", None, {"a", "b", "c"}), (None, "['a']", {"a", "b", "c"})],
)
def test_a_workload_of_two_tables_runs_on_the_backends_of_both(tmp_path, first, second, runs):
    tables = ["[[workloads]]\nlength = 64\n" + ("" if names is None else f"backends = {names}\n") for names in (first, second)]
    matrix = matrix_of(tmp_path, "backends = ['a', 'b', 'c']\n" + "".join(tables))
    (workload,) = matrix.workloads
    assert {name for name in matrix.backends if matrix.runs(workload, name)} == runs


def test_every_backend_that_a_file_names_is_known(tmp_path):
    text = "relative_to = 'c'\n[[workloads]]\nbackends = ['a', 'b']\n[[workloads]]\nbackends = ['b']\nlength = 8"
    assert matrix_of(tmp_path, text).named == ("a", "b", "c")


def test_ids_are_unique_and_the_quick_matrices_hold():
    for entries in (QUICK_CPU, QUICK_CUDA):
        workloads = workloads_of(entries)
        assert len({workload.id for workload in workloads}) == len(workloads), "two workloads have one id"
        assert {workload.direction for workload in workloads} >= {"forward", "backward"}


@pytest.mark.parametrize(
    "workload",
    [
        Workload(causal=True, length=100, kv_length=300, heads=8, kv_heads=2, direction="both", cache="cold"),
        Workload(layout="random:0.25", length=256, kv_length=256, block=64, direction="backward"),
    ],
    ids=lambda workload: workload.id,
)
def test_its_options_make_it_again(workload):
    options = dict(zip(workload.options()[::2], workload.options()[1::2]))
    causal = "--causal" in workload.options()
    entry = {name: getattr(workload, name) for name in ("block",)} | {"causal": causal}
    for option, text in options.items():
        name = option.removeprefix("--").replace("-", "_")
        if name in Workload.__dataclass_fields__ and name not in entry:
            entry[name] = int(text) if text.isdigit() else text
    assert workloads_of([entry]) == (workload,), workload.options()


def test_useful_flops_and_compulsory_bytes():
    forward, backward, both = (Workload(batch=2, length=256, kv_length=256, direction=d).cost() for d in ("forward", "backward", "both"))
    assert forward.flops == 4 * 2 * 8 * 256 * 256 * 64, forward
    assert backward.flops == 2.5 * forward.flops, "the backward has five products where the forward has two"
    assert forward.flops + backward.flops == both.flops
    assert forward.hbm_bytes + backward.hbm_bytes == both.hbm_bytes
    sparse = Workload(batch=2, length=256, kv_length=256, layout="random:0.5", block=128).cost()
    assert sparse.flops == forward.flops // 2, "half of the blocks exist"
