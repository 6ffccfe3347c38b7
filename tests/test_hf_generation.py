"""Generation beside Hugging Face's, live, where torch is installed: greedy and beam search give the same tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import NO_DROPOUT

import flax_gpt as fg
from flax_gpt.pretrained import from_gpt2_names

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# layers, heads, width, n_inner, tied, activation
MODELS = [
    (1, 1, 15, None, True, "gelu_new"),
    (2, 3, 21, 17, False, "gelu"),
    (5, 4, 28, 50, True, "relu"),
    (2, 2, 26, None, True, "gelu_pytorch_tanh"),
]
STOP = 7


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: f"{m[0]}-layers-{m[1]}-heads-{m[5]}")
def pair(request):
    """The same model, theirs and ours."""
    n_layer, n_head, n_embd, n_inner, tied, activation = request.param
    config = fg.GPTConfig(
        vocab_size=53, n_positions=80, n_embd=n_embd, n_layer=n_layer, n_head=n_head, n_inner=n_inner,
        activation_function=activation, tie_word_embeddings=tied, **NO_DROPOUT,
    )  # fmt: skip
    torch.manual_seed(n_layer)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**config.to_dict(), attn_implementation="eager", bos_token_id=0, eos_token_id=STOP)
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter == 1))
    state = {name: tensor.detach().numpy() for name, tensor in theirs.state_dict().items()}
    return theirs, config, from_gpt2_names(config, state)


PROMPTS = [[3, 5, 8], [1, 2, 3, 4, 5, 6], [9]]


def padded():
    """Their form of ragged prompts: padded on the left."""
    width = max(map(len, PROMPTS))
    rows = np.array([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = np.array([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask), "pad_token_id": 0}


def rows_of(output, lengths):
    """Their new tokens, cut to the lengths of ours; what follows must be padding."""
    rows = output[:, max(map(len, PROMPTS)) :].numpy()
    for row, n in zip(rows, lengths, strict=True):
        assert not row[n:].any()
    return [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_writes_the_same_64_tokens(pair, penalty):
    theirs, config, params = pair
    expected = theirs.generate(
        **padded(), max_new_tokens=64, do_sample=False, repetition_penalty=penalty, eos_token_id=STOP
    )
    ours = fg.generate(config, params, PROMPTS, 64, temperature=0.0, repetition_penalty=penalty, stop_ids=[STOP])
    assert rows_of(expected, ours.lengths) == [
        row[:n].tolist() for row, n in zip(np.asarray(ours.tokens), ours.lengths, strict=True)
    ]


@pytest.mark.parametrize(
    ("num_beams", "length_penalty", "early_stopping"),
    [(4, 1.0, False), (3, 0.0, False), (2, -1.5, True), (5, 2.0, True)],
)
def test_beam_search_finds_the_same(pair, num_beams, length_penalty, early_stopping):
    theirs, config, params = pair
    expected = theirs.generate(
        **padded(), max_new_tokens=24, do_sample=False, num_beams=num_beams, num_return_sequences=num_beams,
        length_penalty=length_penalty, early_stopping=early_stopping, eos_token_id=STOP,
        output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    ours = fg.beam_search(
        config, params, PROMPTS, 24, num_beams=num_beams, length_penalty=length_penalty,
        early_stopping=early_stopping, stop_ids=[STOP],
    )  # fmt: skip
    lengths = ours.lengths.reshape(-1)
    assert rows_of(expected.sequences, lengths) == [
        row[:n].tolist() for row, n in zip(np.asarray(ours.tokens).reshape(len(lengths), -1), lengths, strict=True)
    ]
    np.testing.assert_allclose(ours.scores.reshape(-1), expected.sequences_scores.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.7}],
)
def test_filters_keep_the_same_tokens(options):
    """The probabilities that they draw from, and ours by the drawing of many."""
    from flax_gpt.generation import kept_tokens, make_sampling

    logits = np.random.default_rng(0).normal(size=(40, 53)).astype(np.float32) * 2
    temperature = options.get("temperature", 1.0)
    scores = torch.tensor(logits) / temperature
    if "top_k" in options:
        scores = transformers.TopKLogitsWarper(options["top_k"])(None, scores)
    if "top_p" in options:
        scores = transformers.TopPLogitsWarper(options["top_p"])(None, scores)
    if "min_p" in options:
        scores = transformers.MinPLogitsWarper(options["min_p"])(None, scores)
    sampling = make_sampling(40, 53, **options)
    kept = kept_tokens(jnp.asarray(logits / temperature), sampling.top_k, sampling.top_p, sampling.min_p)
    np.testing.assert_array_equal(kept, torch.isfinite(scores).numpy())
