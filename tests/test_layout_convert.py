"""Layouts survive the trip to FlexAttention's BlockMask, padded lists, BSR and files, and back."""

from __future__ import annotations

import json
import random
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from attnzoo import BlockLayout, layouts
from attnzoo.layouts.convert import (
    PaddedLists,
    from_block_mask,
    from_bsr,
    from_padded_lists,
    mask_mod_of,
    padded_lists,
    to_block_mask,
    to_bsr,
)
from attnzoo.layouts.files import load, save


def assert_same(a: BlockLayout, b: BlockLayout) -> None:
    for name, mine, theirs in zip(("full.offsets", "full.indices", "partial.offsets", "partial.indices"), a.tensors(), b.tensors()):
        assert torch.equal(mine, theirs), name
    assert torch.equal(a.to_dense(), b.to_dense())


def drawn(seed: int) -> BlockLayout:
    rng = random.Random(seed)
    q_len, kv_len = rng.randint(1, 90), rng.randint(1, 90)
    block = (rng.choice([4, 16, 32, 33, 64]), rng.choice([4, 16, 32, 33, 64]))
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, 3, q_len, kv_len, generator=generator) > 0.3
    mask[..., : q_len // 2, : kv_len // 2] = True
    mask[..., q_len // 2 :, : kv_len // 2] = False
    ids = torch.randint(0, 4, (2, q_len), generator=generator).sort().values
    kinds = [
        lambda: BlockLayout.from_dense(mask, block=block),
        lambda: layouts.causal(q_len, kv_len, block=block, align="bottom_right"),
        lambda: layouts.documents(ids, causal=True, block=block[0]),
        lambda: layouts.butterfly(q_len, block=block),
    ]
    return kinds[seed % len(kinds)]()


@pytest.mark.parametrize("seed", range(24))
def test_every_form_gives_the_layout_back(seed, tmp_path):
    layout = drawn(seed)
    dense = layout.to_dense()
    batch, heads, q_len, kv_len = dense.shape
    block_mask = to_block_mask(layout)
    assert torch.equal(create_mask(block_mask.mask_mod, batch, heads, q_len, kv_len, device="cpu"), dense)
    assert_same(from_block_mask(block_mask), layout)
    block = (layout.block_q, layout.block_kv)
    lists = padded_lists(layout)
    assert_same(from_padded_lists(lists, q_len=q_len, kv_len=kv_len, block=block, mask_mod=mask_mod_of(layout)), layout)
    for suffix in (".json", ".safetensors"):
        if suffix == ".safetensors":
            pytest.importorskip("safetensors")
        save(layout, tmp_path / f"layout{suffix}")
        loaded = load(tmp_path / f"layout{suffix}")
        assert_same(loaded, layout)
        assert loaded.rule.parts == layout.rule.parts


@pytest.mark.parametrize("layout", [layouts.causal(64, block=16), layouts.butterfly(64, block=(8, 16))], ids=["causal", "butterfly"])
def test_bsr(layout):
    assert_same(from_bsr(to_bsr(layout)), layout)


def test_a_block_mask_that_flex_attention_made():
    block_mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 70 * (h + 1)), None, 2, 300, 300, device="cpu")
    i, j = torch.arange(300)[:, None], torch.arange(300)
    expected = torch.stack([(i >= j) & (i - j < 70), (i >= j) & (i - j < 140)])
    assert torch.equal(from_block_mask(block_mask).to_dense()[0], expected)


def tampered(path, change):
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(format="other"), "format"),
        (lambda f: f.pop("q_len"), "q_len"),
        (lambda f: f.update(q_len=-1), "q_len"),
        (lambda f: f.update(block_q="16"), "block_q"),
        (lambda f: f.update(band=[0, -2, 0]), "band"),
        (lambda f: f["tensors"].pop("full.indices"), "full.indices"),
        (lambda f: f["tensors"]["full.indices"]["values"].__setitem__(0, 99), "full.indices"),
        (lambda f: f["tensors"]["full.indices"]["values"].__setitem__(0, -1), "full.indices"),
        (lambda f: f["tensors"]["full.indices"].update(shape=[7]), "read"),
        (lambda f: f["tensors"]["partial.offsets"]["values"].__setitem__(1, 9), "partial.offsets"),
        (lambda f: f["tensors"]["partial.offsets"].update(dtype="float32"), "read"),
        (lambda f: f["tensors"]["full.offsets"].update(values=["x"]), "read"),
        (lambda f: f["tensors"]["full.indices"]["values"].__setitem__(0, 0.5), "read"),
        (lambda f: f.pop("band"), "band"),
        (lambda f: f["tensors"].update({"segments.q": {"dtype": "int32", "shape": [1, 64], "values": [0] * 64}}), "segments.kv"),
        (lambda f: f["tensors"].update({"mask": {"dtype": "int32", "shape": [0], "values": []}}), "mask"),
    ],
)
def test_a_tampered_file_is_refused(change, message, tmp_path):
    path = tmp_path / "layout.json"
    save(layouts.causal(64, block=16), path)
    tampered(path, change)
    with pytest.raises((TypeError, ValueError), match=message):
        load(path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"[]", b"null", b"{", b"\xff\xfe"])
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_what_is_no_layout_is_refused(content, suffix, tmp_path):
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    path = tmp_path / f"layout{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="layout"):
        load(path)


def test_other_suffixes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="path"):
        save(layouts.causal(8, block=4), tmp_path / "layout.pt")


def test_padded_lists_are_validated():
    def lists(counts, indices):
        none, nothing = torch.zeros(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
        full = torch.tensor([[[indices, [0, 1]]]], dtype=torch.int32)
        return PaddedLists(none, nothing, torch.tensor([[counts]], dtype=torch.int32), full)

    far = PaddedLists(*[part.long() for part in vars(lists([2, 1], [0, 0])).values()])
    far.full_indices[0, 0, 0, 1] = 2**32 + 1  # 1 in 32 bits
    with pytest.raises(ValueError, match="indices"):
        from_padded_lists(far, q_len=8, kv_len=8, block=4)
    for counts, indices in (([2, 1], [0, 5]), ([2, 1], [1, 1]), ([3, 1], [0, 1]), ([-1, 1], [0, 1]), ([2, 1], [0, -1])):
        with pytest.raises(ValueError, match=r"indices|counts"):
            from_padded_lists(lists(counts, indices), q_len=8, kv_len=8, block=4)


NONE = {"counts": torch.zeros(1, 1, 2, dtype=torch.int32), "indices": torch.zeros(1, 1, 2, 2, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"full_indices": torch.full((1, 1, 2, 2), 0.7)}, "full_indices is torch.float32"),
        ({"full_counts": [1, 2]}, "full_counts is list"),
        ({"partial_counts": torch.zeros(1, 2, dtype=torch.int32)}, r"partial_counts has shape \(1, 2\)"),
        ({"partial_indices": torch.zeros(1, 1, 3, 2, dtype=torch.int32)}, r"partial_indices has shape \(1, 1, 3, 2\)"),
        (
            {name: NONE[name[8:]].expand(1, 2, *NONE[name[8:]].shape[2:]) for name in ("partial_counts", "partial_indices")},
            "partial_counts",
        ),
        ({"full_indices": NONE["indices"].to("meta")}, "full_indices is on meta"),
    ],
)
def test_padded_lists_that_do_not_fit_one_another(change, message):
    whole = {"partial_counts": NONE["counts"], "partial_indices": NONE["indices"]}
    whole |= {"full_counts": NONE["counts"] + 1, "full_indices": NONE["indices"]}
    assert from_padded_lists(PaddedLists(**whole), q_len=8, kv_len=8, block=4).density == 0.5
    with pytest.raises((TypeError, ValueError), match=message):
        from_padded_lists(PaddedLists(**whole | change), q_len=8, kv_len=8, block=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_bsr("mask"), "mask is a str"),
        (lambda: from_block_mask(None), "block_mask is a NoneType"),
        (lambda: from_padded_lists((), q_len=8, kv_len=8, block=4), "lists is a tuple"),
        (lambda: layouts.from_mask_mod(3, 8, 8, block=4), "mask_mod is a int"),
        (lambda: layouts.from_mask_mod(lambda b, h, i, j: torch.ones(3, 5, dtype=torch.bool), 8, 8, block=4), r"shape \(3, 5\).*\(8, 8\)"),
    ],
)
def test_what_is_of_another_type_is_named(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_tampered_safetensors_file_is_refused(tmp_path):
    torch_files = pytest.importorskip("safetensors.torch")
    save(layouts.causal(64, block=16), path := tmp_path / "layout.safetensors")
    tensors = torch_files.load_file(path)
    with pytest.importorskip("safetensors").safe_open(path, framework="pt") as file:
        facts = file.metadata()["layout"]
    changes = {
        "full.indices holds 99": (lambda t: t["full.indices"].fill_(99), facts),
        "full.indices has dtype": (lambda t: t.update({"full.indices": t["full.indices"].float()}), facts),
        "partial.offsets": (lambda t: t.pop("partial.offsets"), facts),
        "heads": (lambda t: None, facts.replace('"heads": 1', '"heads": 3')),
        "format": (lambda t: None, facts.replace("BlockLayout", "Model")),
        "can't be read": (lambda t: None, facts[:-1]),
        "can't be read as a layout": (lambda t: None, "[" * 100_000),
    }
    for message, (change, metadata) in changes.items():
        altered = {name: tensor.clone() for name, tensor in tensors.items()}
        change(altered)
        torch_files.save_file(altered, path, metadata={"layout": metadata})
        with pytest.raises((TypeError, ValueError), match=message):
            load(path)


def test_partial_blocks_need_their_function():
    lists = padded_lists(layouts.causal(8, block=4))
    with pytest.raises(ValueError, match="mask_mod"):
        from_padded_lists(lists, q_len=8, kv_len=8, block=4)


def test_bsr_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="whole blocks"):
        to_bsr(layouts.causal(9, block=4))
    with pytest.raises(ValueError, match="heads"):
        to_bsr(layouts.stack_heads([layouts.causal(8, block=4)] * 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        csr = torch.eye(8).to_sparse_csr()
    with pytest.raises(TypeError, match="sparse_bsr"):
        from_bsr(csr)


@pytest.mark.parametrize("partial", [0, 1])
def test_the_function_of_a_layout_reads_no_bits_of_full_blocks(partial):
    """It is asked for every pair of the blocks that a BlockMask lists: four full ones here, at most one with bits."""
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[7, 7] = not partial
    layout = BlockLayout.from_dense(mask, block=4)
    pairs = torch.arange(8)
    found = mask_mod_of(layout)(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), pairs[:, None], pairs[None, :])
    assert torch.equal(found, mask), f"{found} is not the layout's mask"


def test_a_block_mask_whose_function_reduces_is_asked_as_flex_attention_asks():
    anchors = torch.tensor([3, 40])
    functions = {
        "any": lambda b, h, i, j: (i == anchors).any() | (j <= i),
        "any of the last dim": lambda b, h, i, j: ((i - anchors).abs() < 2).any(-1) & (j != anchors).all(-1),
        "stack": lambda b, h, i, j: torch.stack([j <= i, i == 3 + h, j == 5 + b]).any(0),
    }
    for name, mask_mod in functions.items():
        block_mask = create_block_mask(mask_mod, 2, 3, 64, 50, device="cpu", BLOCK_SIZE=16)
        assert torch.equal(from_block_mask(block_mask).to_dense(), create_mask(mask_mod, 2, 3, 64, 50, device="cpu")), name


@pytest.mark.parametrize(
    ("offsets", "columns", "block"),
    [
        ([0, 2, 2], [2**32, 2**32 + 1], (4, 4)),  # 0 and 1 in 32 bits
        ([0, 1, 2], [0, 2], (4, 4)),
        ([0, 1, 2], [-1, 0], (4, 4)),
        ([0, 2, 2], [1, 0], (4, 4)),
        ([0, 2, 2], [1, 1], (4, 4)),
        ([0, 5, 2], [0, 1], (4, 4)),
        ([1, 1, 2], [0, 1], (4, 4)),
        ([0, 1, 1, 2], [0, 1], (4, 4)),
        ([0, 2, 2], [0, 1], (3, 4)),
    ],
)
def test_a_bsr_tensor_that_torch_never_checked(offsets, columns, block):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [torch.tensor(part) for part in (offsets, columns)]
        mask = torch.sparse_bsr_tensor(*parts, torch.ones(2, *block), size=(8, 8), check_invariants=False)
    with pytest.raises(ValueError, match="mask is not a well-formed sparse_bsr tensor"):
        from_bsr(mask)


def test_a_default_device_is_not_where_a_layout_of_the_cpu_is_converted():
    """ "meta" stands for a GPU."""
    layout = layouts.sliding_window(64, window=20, block=16)
    with torch.device("meta"):
        forms = to_bsr(layout), to_block_mask(layout), padded_lists(layout)
        backs = [from_bsr(forms[0]), from_block_mask(forms[1])]
        backs.append(from_padded_lists(forms[2], q_len=64, kv_len=64, block=16, mask_mod=mask_mod_of(layout)))
        combined = layouts.stack_heads([layout & layout, layout | layout, ~~layout])
    for back in (*backs, combined):
        assert torch.equal(back.to_dense(), layout.to_dense().expand(1, back.heads, 64, 64))
