"""Ready-made edits, in a forward pass and in generation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import BATCH, CONFIG, T, random_params, random_tokens

from flax_gpt import forward, generate
from flax_gpt.interp import replace, silence_heads, steer, steering_vectors

PARAMS = random_params()
TOKENS = random_tokens()
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def test_silent_heads_are_heads_without_an_output_matrix():
    heads = np.array([[True, False, False], [False, True, True]])
    attn = PARAMS["blocks"]["attn"]
    kernel = jnp.where(heads[:, :, None, None], 0, attn["out"]["kernel"])
    without = {**PARAMS["blocks"], "attn": {**attn, "out": {**attn["out"], "kernel": kernel}}}
    expected = forward(CONFIG, {**PARAMS, "blocks": without}, TOKENS)
    for layers in ("scan", "unroll"):
        found = forward(CONFIG, PARAMS, TOKENS, edit=silence_heads(heads), layers=layers)
        np.testing.assert_allclose(found, expected, **CLOSE)


def test_replacing_goes_to_one_layer_and_one_head():
    new = jnp.full((BATCH, T, CONFIG.n_head, CONFIG.head_width), 0.5)
    _, plain = forward(CONFIG, PARAMS, TOKENS, capture="z")
    _, acts = forward(CONFIG, PARAMS, TOKENS, capture="z", edit=replace("z", 0, new, head=2))
    assert (acts["z"][0][:, :, 2] == 0.5).all()
    np.testing.assert_allclose(acts["z"][0][:, :, :2], plain["z"][0][:, :, :2], **CLOSE)
    assert (acts["z"][1] != 0.5).all()
    _, acts = forward(CONFIG, PARAMS, TOKENS, capture="z", edit=replace("z", 1, new))
    assert (acts["z"][1] == 0.5).all()
    assert (acts["z"][0] != 0.5).all()
    logits = forward(CONFIG, PARAMS, TOKENS, edit=replace("logits", 0, jnp.float32(2.0)))
    assert (logits == 2.0).all()
    with pytest.raises(ValueError, match="has no heads"):
        forward(CONFIG, PARAMS, TOKENS, edit=replace("mlp_out", 1, jnp.float32(2.0), head=1))


def test_a_steering_vector_is_a_difference_of_means_and_is_added():
    positive, negative = random_tokens(shape=(3, 7), seed=1), random_tokens(shape=(5, 4), seed=2)
    vectors = steering_vectors(CONFIG, PARAMS, positive, negative)
    _, up = forward(CONFIG, PARAMS, positive, capture="resid_post")
    _, down = forward(CONFIG, PARAMS, negative, capture="resid_post")
    expected = up["resid_post"][:, :, -1].mean(1) - down["resid_post"][:, :, -1].mean(1)
    np.testing.assert_allclose(vectors, expected, **CLOSE)
    at_two = steering_vectors(CONFIG, PARAMS, positive, negative, at=2, site="mlp_out")
    assert at_two.shape == (CONFIG.n_layer, CONFIG.n_embd)
    assert not np.allclose(at_two, vectors)

    _, plain = forward(CONFIG, PARAMS, TOKENS, capture="resid_post")
    _, steered = forward(CONFIG, PARAMS, TOKENS, capture="resid_post", edit=steer(vectors[0], 0, scale=2.0))
    moved = steered["resid_post"][0] - plain["resid_post"][0]
    np.testing.assert_allclose(moved, jnp.broadcast_to(2 * vectors[0], moved.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_generation_is_steered():
    token = 17
    towards = PARAMS["wte"][token] / PARAMS["ln_f"]["scale"]
    written = generate(CONFIG, PARAMS, [[1, 2, 3]], 4, temperature=0.0, edit=steer(towards, 1, scale=1e4))
    plain = generate(CONFIG, PARAMS, [[1, 2, 3]], 4, temperature=0.0)
    logits = jax.nn.log_softmax(forward(CONFIG, PARAMS, [[1, 2, 3]], edit=steer(towards, 1, scale=1e4))[0, -1])
    assert int(written.tokens[0, 0]) == int(jnp.argmax(logits))
    assert (written.tokens != plain.tokens).any()
