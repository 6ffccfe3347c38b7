"""The key-value cache: a text read in pieces, padded or not, gives what it gives at once."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import NO_DROPOUT, random_params

import flax_gpt as fg
from flax_gpt.generation import prepare

CONFIG = fg.GPTConfig(vocab_size=23, n_positions=17, n_embd=14, n_layer=3, n_head=2, n_inner=19, **NO_DROPOUT)
PARAMS = random_params(CONFIG)
T = 16


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(23, size=(3, T))


def in_pieces(config, params, tokens, pieces, mask=None, slots=None, **options):
    cache = fg.init_cache(config, len(tokens), slots or tokens.shape[1], params["wte"].dtype)
    logits, start = [], 0
    for n in pieces:
        part = slice(start, start + n)
        out, cache = fg.forward_cached(
            config, params, tokens[:, part], cache, mask=None if mask is None else mask[:, part], **options
        )
        logits.append(out)
        start += n
    assert start == tokens.shape[1]
    return jnp.concatenate(logits, axis=1), cache


@pytest.mark.parametrize(
    "pieces", [(7, 9), (1, 15), (16,), (5, 1, 1, 9), pytest.param((1,) * 16, marks=pytest.mark.slow)]
)
def test_a_text_in_pieces_is_the_text_at_once(tokens, pieces):
    expected = fg.forward(CONFIG, PARAMS, tokens)
    logits, cache = in_pieces(CONFIG, PARAMS, tokens, pieces, slots=19)
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)
    assert logits.dtype == jnp.float32
    assert cache.length == 16
    np.testing.assert_array_equal(cache.mask, np.arange(19) < np.full((3, 1), 16))
    for kept in (*cache.keys, *cache.values):
        assert kept.shape == (3, 2, 7, 19)
        assert not kept[..., 16:].any()
        assert kept[..., :16].all()


@pytest.mark.parametrize("block", [fg.PostLNBlock, pytest.param(fg.NoLNBlock, marks=pytest.mark.slow)])
def test_every_block_can_be_cached(tokens, block):
    params = random_params(CONFIG, block=block)
    expected = fg.forward(CONFIG, params, tokens, block=block)
    logits, _ = in_pieces(CONFIG, params, tokens, (7, 1, 8), block=block)
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_float64_agrees_to_its_precision(x64, tokens, tied):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    params = random_params(config, dtype=jnp.float64)
    mask = np.arange(T) >= np.array([[0], [3], [8]])
    expected = fg.forward(config, params, tokens, mask=mask)
    assert expected.dtype == jnp.float64
    for pieces in ((16,), (7, 9), (1, 15)):
        logits, _ = in_pieces(config, params, tokens, pieces, mask)
        np.testing.assert_allclose(logits[mask], expected[mask], atol=1e-12 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("pieces", [(16,), (7, 9), pytest.param((1, 15), marks=pytest.mark.slow)])
def test_padding_anywhere_changes_nothing(tokens, side, pieces):
    """Each row is what its tokens give alone, whatever stands at padding, be it in range or not."""
    places = np.arange(T)
    mask = np.stack([
        {"left": places >= n, "right": places < T - n, "both": (places >= n // 2) & (places < T - n)}[side]
        for n in (0, 3, 8)
    ])  # fmt: skip
    logits, cache = in_pieces(CONFIG, PARAMS, np.where(mask, tokens, 999), pieces, mask)
    np.testing.assert_array_equal(cache.mask, mask)
    for row in range(3):
        alone = fg.forward(CONFIG, PARAMS, tokens[row : row + 1, mask[row]])
        np.testing.assert_allclose(logits[row, mask[row]], alone[0], atol=1e-4 * np.abs(alone).max(), rtol=0)


def test_two_calls_in_a_row_are_alike_and_leave_the_cache_as_it_was(tokens):
    cache = fg.init_cache(CONFIG, 3, T)
    _, cache = fg.forward_cached(CONFIG, PARAMS, tokens[:, :7], cache)
    before = jax.tree.map(np.array, cache)
    first, second = (fg.forward_cached(CONFIG, PARAMS, tokens[:, 7:], cache) for _ in range(2))
    chex.assert_trees_all_equal(first, second)
    chex.assert_trees_all_equal(cache, before)


def test_parameters_may_be_made_ready_once(tokens):
    cache = fg.init_cache(CONFIG, 3, T, jnp.bfloat16)
    expected = fg.forward_cached(CONFIG, PARAMS, tokens, cache, compute_dtype=jnp.bfloat16)
    ready = jax.jit(prepare, static_argnums=(0, 2))(CONFIG, PARAMS, jnp.dtype(jnp.bfloat16))
    assert ready.matrices[0]["mlp/up"].dtype == jnp.bfloat16
    assert ready.matrices[0]["mlp/up"].shape == (19, 14)
    assert ready.blocks[0]["mlp"]["up"]["bias"].dtype == jnp.float32
    chex.assert_trees_all_close(fg.forward_cached(CONFIG, ready, tokens, cache), expected, atol=1e-6)


def test_bfloat16_computes_what_forward_computes(tokens):
    expected = fg.forward(CONFIG, PARAMS, tokens, compute_dtype=jnp.bfloat16)
    cache = fg.init_cache(CONFIG, 3, T, jnp.bfloat16)
    logits, cache = fg.forward_cached(CONFIG, PARAMS, tokens, cache, compute_dtype=jnp.bfloat16)
    assert logits.dtype == jnp.float32
    assert cache.keys[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(logits, expected, atol=0.03 * np.abs(expected).max(), rtol=0)  # 8 bits, a few roundings


@pytest.mark.slow
def test_an_edit_holds_for_the_new_tokens_and_is_kept(tokens):
    def edit(site, layer, value):
        return value.at[:, :, 1].multiply(jnp.where(layer == 1, 3.0, 1.0)) if site in ("k", "z") else value

    expected = fg.forward(CONFIG, PARAMS, tokens, edit=edit)
    logits, _ = in_pieces(CONFIG, PARAMS, tokens, (7, 1, 8), edit=edit)
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)
    assert not np.allclose(logits, fg.forward(CONFIG, PARAMS, tokens), atol=1e-2)


def test_every_site_is_edited(tokens):
    sites = []
    fg.forward_cached(
        CONFIG, PARAMS, tokens, fg.init_cache(CONFIG, 3, T), edit=lambda site, layer, x: (sites.append(site), x)[1]
    )
    assert sorted(sites) == sorted(["embed", *fg.SITES[1:-2] * 3, "ln_f", "logits"])


def test_too_many_tokens_are_an_error_or_nan(tokens):
    cache = fg.init_cache(CONFIG, 3, 10)
    _, cache = fg.forward_cached(CONFIG, PARAMS, tokens[:, :7], cache)
    with pytest.raises(ValueError, match="4 tokens more do not fit a cache of 10 slots, 7 of them taken"):
        fg.forward_cached(CONFIG, PARAMS, tokens[:, 7:11], cache)
    logits, _ = jax.jit(lambda cache: fg.forward_cached(CONFIG, PARAMS, tokens[:, 7:11], cache))(cache)
    assert np.isnan(logits).all()
    # Beyond n_positions there is no position.
    cache = fg.init_cache(CONFIG, 3, 20)
    long = np.concatenate([tokens, tokens[:, :4]], axis=1)
    logits, _ = fg.forward_cached(CONFIG, PARAMS, long, cache)
    assert np.isnan(logits[:, 17:]).all()


def test_what_does_not_fit_is_refused(tokens):
    cache = fg.init_cache(CONFIG, 2, T)
    with pytest.raises(ValueError, match="tokens of 3 rows for 3 layers do not fit a cache of 2 rows and 3 layers"):
        fg.forward_cached(CONFIG, PARAMS, tokens, cache)
    with pytest.raises(ValueError, match="token id 23 at row 1, position 0"):
        fg.forward_cached(CONFIG, PARAMS, [[0], [23]], cache)

    class Deaf(fg.Block):
        def __call__(self, x, visible=None, tap=None):
            return x

    with pytest.raises(ValueError, match="Deaf cannot be decoded with a cache: it does not pass its k and v through"):
        fg.forward_cached(CONFIG, PARAMS, tokens[:2], cache, block=Deaf)


@pytest.mark.slow
def test_a_vmap_over_models_and_a_gradient_pass_through(tokens):
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)
    cache = fg.init_cache(CONFIG, 3, T)

    def loss(params):
        _, middle = fg.forward_cached(CONFIG, params, tokens[:, :7], cache)
        return fg.forward_cached(CONFIG, params, tokens[:, 7:], middle)[0].mean()

    values, grads = jax.vmap(jax.value_and_grad(loss))(stacked)
    expected = jax.value_and_grad(lambda p: fg.forward(CONFIG, p, tokens)[:, 7:].mean())(PARAMS)
    chex.assert_trees_all_close(values[0], expected[0], rtol=1e-4)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected[1]))
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[0], grads), expected[1], atol=1e-4 * scale, rtol=0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matrices_may_be_stored_either_way_round(tokens, transposed, dtype):
    """One row, several, and too many to be called few."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=False)
    params = random_params(config)
    weights = prepare(config, params, dtype, transposed=transposed)
    assert bool(weights.matrices[0]) == transposed
    for rows, pieces in ((1, (1,) * 3), (3, (1, 2)), (3, (16,))):
        text = tokens[:rows, : sum(pieces)]
        cache = fg.init_cache(config, rows, T, dtype)
        expected = fg.forward(config, params, text, compute_dtype=dtype)
        start = 0
        for n in pieces:
            logits, cache = fg.forward_cached(config, weights, text[:, start : start + n], cache)
            tolerance = {jnp.float32: 1e-4, jnp.bfloat16: 0.03}[dtype] * np.abs(expected).max()
            np.testing.assert_allclose(logits, expected[:, start : start + n], atol=tolerance, rtol=0)
            start += n
