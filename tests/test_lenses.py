"""The logit lens and the parts of a logit."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from reference import layer_norm
from tiny import BATCH, CONFIG, T, random_params, random_tokens, to_float64

from flax_gpt import forward
from flax_gpt.interp import direct_logit_attribution, logit_lens

PARAMS = random_params()
TOKENS = random_tokens()


def test_the_lens_reads_every_layer_and_ends_at_the_models_logits():
    lens = logit_lens(CONFIG, PARAMS, TOKENS)
    logits, acts = forward(CONFIG, PARAMS, TOKENS, capture=("resid_pre", "resid_post"))
    assert lens.shape == (CONFIG.n_layer + 1, BATCH, T, CONFIG.vocab_size)
    np.testing.assert_array_equal(lens[-1], logits)
    params = to_float64(PARAMS)
    for layer, stream in enumerate(acts["resid_pre"]):
        normed = layer_norm(
            np.asarray(stream, np.float64), params["ln_f"]["scale"], params["ln_f"]["bias"], CONFIG.layer_norm_epsilon
        )
        np.testing.assert_allclose(lens[layer], normed @ params["wte"].T, rtol=1e-5, atol=1e-4)


def test_the_lens_at_one_position():
    lens = logit_lens(CONFIG, PARAMS, TOKENS)
    np.testing.assert_allclose(logit_lens(CONFIG, PARAMS, TOKENS, at=-1), lens[:, :, -1], rtol=1e-5, atol=1e-5)
    rows = logit_lens(CONFIG, PARAMS, TOKENS, at=[2, 5])
    np.testing.assert_allclose(rows, lens[:, [0, 1], [2, 5]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"qkv_bias": False}])
def test_the_parts_sum_to_the_logit(changes):
    config = dataclasses.replace(CONFIG, **changes)
    params = random_params(config)
    logits = forward(config, params, TOKENS)
    targets, versus = random_tokens(seed=5), random_tokens(seed=6)
    expected = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    parts = direct_logit_attribution(config, params, TOKENS, targets)
    assert parts.heads.shape == (config.n_layer, config.n_head, BATCH, T)
    scale = float(jnp.abs(jnp.concatenate([x.ravel() for x in parts])).max())
    np.testing.assert_allclose(parts.total(), expected, rtol=1e-5, atol=1e-5 * scale)
    difference = expected - jnp.take_along_axis(logits, versus[..., None], -1)[..., 0]
    parts = direct_logit_attribution(config, params, TOKENS, targets, versus=versus)
    np.testing.assert_allclose(parts.total(), difference, rtol=1e-5, atol=1e-5 * scale)


def test_the_parts_in_float64_and_with_padding(x64):
    params = random_params(dtype=np.float64)
    mask = np.ones((BATCH, T), int)
    mask[1, :4] = 0
    logits = forward(CONFIG, params, TOKENS, mask=mask)
    parts = direct_logit_attribution(CONFIG, params, TOKENS, [[3], [4]], mask=mask)
    for row, token in enumerate((3, 4)):
        real = mask[row].astype(bool)
        np.testing.assert_allclose(parts.total()[row, real], logits[row, real, token], rtol=1e-12, atol=1e-12)


def test_each_part_is_what_taking_it_out_of_the_stream_takes_off():
    # With the final LayerNorm's deviation held, a head's part is the change in the logit when what it wrote is removed.
    _, acts = forward(CONFIG, PARAMS, TOKENS, capture=("z", "resid_post"))
    parts = direct_logit_attribution(CONFIG, PARAMS, TOKENS, [[7], [7]])
    wrote = jnp.einsum("btk,kd->btd", acts["z"][1][:, :, 2], PARAMS["blocks"]["attn"]["out"]["kernel"][1, 2])
    last = acts["resid_post"][-1]
    reader = PARAMS["wte"][7] * PARAMS["ln_f"]["scale"] / jnp.sqrt(last.var(-1, keepdims=True) + 1e-5)
    expected = ((wrote - wrote.mean(-1, keepdims=True)) * reader).sum(-1)
    np.testing.assert_allclose(parts.heads[1, 2], expected, rtol=1e-4, atol=1e-5)


def test_targets_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"targets has shape \(2, 3\), tokens have \(2, 11\)"):
        direct_logit_attribution(CONFIG, PARAMS, TOKENS, TOKENS[:, :3])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        direct_logit_attribution(CONFIG, PARAMS, TOKENS, [[3], [61]])
