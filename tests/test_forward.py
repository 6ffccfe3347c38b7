"""The whole model: against the oracle, site by site, and against itself under jax's transformations."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.test_util import check_grads
from tiny import BATCH, CONFIG, SIZES, T, random_params, random_tokens, to_float64

from flax_gpt import BLOCKS, SITES, GPTConfig, NoLNBlock, forward, init_params, ops, token_log_probs
from flax_gpt.forward import _forward_jit

# Of values of size 1 to 10, after some hundred roundings.
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
DROPOUT = GPTConfig(**SIZES, embd_pdrop=0.2, attn_pdrop=0.3, resid_pdrop=0.4)


@pytest.mark.parametrize(
    ("block", "layers", "dtype"),
    [
        ("pre_ln", "scan", "float32"),
        ("pre_ln", "scan", "float64"),
        ("pre_ln", "unroll", "float32"),
        ("pre_ln", "unroll", "float64"),
        ("post_ln", "unroll", "float32"),
        ("post_ln", "scan", "float64"),
        ("no_ln", "scan", "float32"),
        ("no_ln", "unroll", "float64"),
    ],
)
def test_every_site_is_the_oracles(block, layers, dtype):
    with jax.enable_x64(dtype == "float64"):
        params, tokens = random_params(dtype=dtype, block=BLOCKS[block]), random_tokens()
        sites = [site for site in SITES if block != "no_ln" or not site.startswith("ln_") or site == "ln_f"]
        logits, acts = forward(CONFIG, params, tokens, capture=sites, layers=layers, block=BLOCKS[block])
    expected = reference.forward(to_float64(params), tokens, block)
    assert acts.keys() == expected.keys()
    for site in sites:
        assert acts[site].dtype == dtype
        np.testing.assert_allclose(
            acts[site], expected[site], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], err_msg=site
        )
    np.testing.assert_array_equal(logits, acts["logits"])


def test_the_oracle_is_met_without_tied_embeddings_or_qkv_bias_and_with_another_epsilon():
    config = dataclasses.replace(CONFIG, tie_word_embeddings=False, qkv_bias=False, layer_norm_epsilon=0.1)
    params, tokens = random_params(config), random_tokens()
    expected = reference.forward(to_float64(params), tokens, epsilon=0.1)["logits"]
    np.testing.assert_allclose(forward(config, params, tokens), expected, rtol=1e-5, atol=1e-5)


# jax's transformations


@pytest.fixture(scope="module")
def under_dropout():
    """Logits, and gradient of their loss, with the same dropout key however the layers are walked."""
    params, tokens = random_params(DROPOUT), random_tokens()

    @functools.cache
    def run(layers, remat):
        def loss(params):
            logits = forward(DROPOUT, params, tokens, dropout_key=jax.random.key(3), layers=layers, remat=remat)
            return ops.cross_entropy(logits, tokens).sum(), logits

        grads, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
        return logits, grads

    return run


@pytest.mark.parametrize("layers", [pytest.param("scan", marks=pytest.mark.slow), "unroll"])
def test_remat_changes_neither_logits_nor_gradients_with_dropout_on(under_dropout, layers):
    (logits, grads), (plain_logits, plain_grads) = under_dropout(layers, True), under_dropout(layers, False)
    np.testing.assert_array_equal(logits, plain_logits)
    # Bit-equal at the compiler's lowest level; at its usual one sums may be taken in another order (5e-7 was seen).
    for grad, plain_grad in zip(jax.tree.leaves(grads), jax.tree.leaves(plain_grads), strict=True):
        np.testing.assert_allclose(grad, plain_grad, rtol=0, atol=1e-6 * np.abs(plain_grad).max())


def test_scan_and_unroll_draw_the_same_dropout(under_dropout):
    chex.assert_trees_all_close(under_dropout("scan", False), under_dropout("unroll", False), rtol=1e-5, atol=1e-5)


def test_vmap_over_parameters_is_a_loop_over_models():
    models, tokens = [random_params(seed=seed) for seed in range(3)], random_tokens()
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    ensemble = jax.jit(jax.vmap(lambda params: forward(CONFIG, params, tokens)))(stacked)
    loop = jnp.stack([forward(CONFIG, params, tokens) for params in models])
    np.testing.assert_allclose(ensemble, loop, rtol=1e-5, atol=1e-5)


def test_vmap_over_inputs_is_a_loop_over_batches():
    params, tokens = random_params(), random_tokens(shape=(3, BATCH, T))
    mapped = jax.jit(jax.vmap(lambda tokens: forward(CONFIG, params, tokens)))(tokens)
    loop = jnp.stack([forward(CONFIG, params, batch) for batch in tokens])
    np.testing.assert_allclose(mapped, loop, rtol=1e-5, atol=1e-5)


def test_the_gradient_is_that_of_finite_differences(x64):
    config = dataclasses.replace(CONFIG, n_layer=1)
    params, tokens = random_params(config, dtype=np.float64), random_tokens()
    loss = jax.jit(lambda params: ops.cross_entropy(forward(config, params, tokens), tokens).mean())
    check_grads(loss, (params,), order=1, modes=["rev"], atol=1e-8, rtol=1e-6, eps=1e-6)


def test_one_shape_is_traced_once_whatever_the_values():
    params = random_params()
    masks = jnp.ones((BATCH, T), bool), jnp.ones((BATCH, T), bool).at[1, :4].set(False)
    forward(CONFIG, params, random_tokens(), mask=masks[0])
    traces = _forward_jit._cache_size()
    equal_config = GPTConfig(**dataclasses.asdict(CONFIG))
    results = [forward(equal_config, params, random_tokens(seed=seed), mask=masks[seed]) for seed in range(2)]
    assert _forward_jit._cache_size() == traces
    assert np.abs(results[0] - results[1]).max() > 0.1
    forward(CONFIG, params, random_tokens(), mask=masks[0], layers="scan")
    assert _forward_jit._cache_size() == traces + 1  # what is static does compile anew: the count can move


def test_a_jitted_caller_traces_once():
    params = random_params()
    run = jax.jit(chex.assert_max_traces(lambda params, tokens: forward(CONFIG, params, tokens), n=1))
    for seed in range(3):
        run(params, random_tokens(seed=seed))


def test_an_unknown_way_through_the_layers_is_refused():
    with pytest.raises((ValueError, TypeError), match="'loop'"):
        forward(CONFIG, random_params(), random_tokens(), layers="loop")


# Dropout and dtypes


def test_dropout_is_off_without_a_key_and_reproducible_with_one():
    params, tokens = random_params(DROPOUT), random_tokens()
    plain = forward(CONFIG, params, tokens)
    np.testing.assert_array_equal(forward(DROPOUT, params, tokens), plain)
    once, again, other = (forward(DROPOUT, params, tokens, dropout_key=jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(once, again)
    assert np.abs(once - plain).max() > 0.1
    assert np.abs(once - other).max() > 0.1


def test_layers_draw_different_dropout():
    config = dataclasses.replace(DROPOUT, embd_pdrop=0.0, attn_pdrop=0.0)
    _, acts = forward(
        config, random_params(config), random_tokens(), dropout_key=jax.random.key(0), capture=("attn_out", "mlp_out")
    )
    dropped = [acts[site][layer] == 0 for site in ("attn_out", "mlp_out") for layer in range(2)]
    for i, first in enumerate(dropped):
        assert 0.3 < first.mean() < 0.5
        for second in dropped[:i]:
            assert (first != second).mean() > 0.3  # independent masks at rate 0.4 differ in 0.48


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_bfloat16_computes_in_bfloat16_around_islands_of_float32(layers):
    params, tokens = random_params(), random_tokens()
    logits, acts = forward(CONFIG, params, tokens, compute_dtype=jnp.bfloat16, capture=SITES, layers=layers)
    islands = {"attn_scores", "pattern", "logits"}
    assert {site for site, value in acts.items() if value.dtype == jnp.float32} == islands
    assert {site for site, value in acts.items() if value.dtype == jnp.bfloat16} == set(SITES) - islands
    error = np.abs(logits - reference.forward(to_float64(params), tokens)["logits"])
    # Logits of size 1 from some ten roundings of 2^-9 each; not zero, or nothing was computed in bfloat16.
    assert 1e-3 < error.mean() < 10 * 2.0**-9
    assert logits.dtype == jnp.float32


# Log-probabilities


def test_token_log_probs_are_the_oracles():
    params, tokens = random_params(), random_tokens()
    expected = reference.token_log_probs(reference.forward(to_float64(params), tokens)["logits"], np.asarray(tokens))
    scores = token_log_probs(CONFIG, params, tokens)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


def test_token_log_probs_score_neither_padding_nor_the_first_token_of_a_document():
    params, tokens = random_params(), np.asarray(random_tokens())
    mask = np.array([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]], bool)
    segments = np.array([[0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2], [4, 4, 4, 4, 7, 7, 7, 7, 7, 7, 7]])
    logits = reference.forward(to_float64(params), tokens, mask=mask, segments=segments)["logits"]
    expected = reference.token_log_probs(logits, tokens, mask, segments)
    scores = token_log_probs(CONFIG, params, tokens, mask=mask, segment_ids=segments)
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(scores) == 0, expected == 0)


# Fresh parameters


def test_fresh_parameters_have_gpt2s_distributions():
    config = GPTConfig(vocab_size=997, n_positions=211, n_embd=96, n_layer=3, n_head=4, n_inner=127)
    params = init_params(config, jax.random.key(0))
    residual = 0.02 / math.sqrt(2 * 3)
    std = {"wte": 0.02, "wpe": 0.01, "attn.out.kernel": residual, "mlp.down.kernel": residual, "kernel": 0.02}
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name.endswith(("bias", "scale")):
            np.testing.assert_array_equal(leaf, float(name.endswith("scale")))
            continue
        expected = next(value for end, value in std.items() if name.endswith(end))
        for x in leaf if name.startswith("blocks") else leaf[None]:  # layer by layer
            sigmas = 5 / math.sqrt(x.size)
            assert abs(x.std() / expected - 1) < sigmas / math.sqrt(2), name
            assert abs(x.mean() / expected) < sigmas, name
    kernel = params["blocks"]["attn"]["qkv"]["kernel"].reshape(3, -1)
    assert np.abs(np.corrcoef(kernel) - np.eye(3)).max() < 5 / math.sqrt(kernel.shape[1])  # layers differ


def test_fresh_parameters_follow_from_the_key_the_dtype_and_the_block():
    first, again, other = (init_params(CONFIG, jax.random.key(seed)) for seed in (0, 0, 1))
    chex.assert_trees_all_equal(first, again)
    assert np.abs(first["wte"] - other["wte"]).max() > 0.01
    half = init_params(CONFIG, jax.random.key(0), dtype=jnp.bfloat16)
    chex.assert_trees_all_equal(half, jax.tree.map(lambda x: x.astype(jnp.bfloat16), first))
    blocks = jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0), block=NoLNBlock))["blocks"]
    assert blocks.keys() == {"attn", "mlp"}


def test_the_initial_loss_of_an_untied_head_is_that_of_gaussian_logits():
    d, v = 768, 1999
    config = GPTConfig(
        vocab_size=v, n_positions=8, n_embd=d, n_layer=1, n_head=12, n_inner=64, tie_word_embeddings=False
    )
    logits = forward(config, init_params(config, jax.random.key(0)), random_tokens(config, (2, 8)))
    loss = jax.nn.logsumexp(logits, -1) - logits.mean(-1)  # averaged over every possible target
    # Half the variance of the logits, estimated from v of them at each of 16 positions; three standard deviations.
    half_variance = d * 0.02**2 / 2
    assert abs(loss.mean() - (math.log(v) + half_variance)) < 3 * half_variance * math.sqrt(2 / v / 16)


@pytest.mark.parametrize(("n_layer", "with_scaling", "without"), [(1, 0.087, 0.119), (12, 0.094, 0.456)])
def test_the_residual_stream_does_not_grow_with_depth(n_layer, with_scaling, without):
    config = GPTConfig(vocab_size=61, n_positions=17, n_embd=256, n_layer=n_layer, n_head=4)
    params = init_params(config, jax.random.key(0))

    def rms():
        _, acts = forward(config, params, random_tokens(config, (2, 17)), capture="resid_post", layers="scan")
        return math.sqrt(jnp.square(acts["resid_post"][-1]).mean())

    # The positions are correlated: the root mean square of d = 256 numbers is good to 1 / sqrt(2 d) = 4.4 percent.
    np.testing.assert_allclose(rms(), with_scaling, rtol=3 * 0.044)
    for part, name in (("attn", "out"), ("mlp", "down")):
        params["blocks"][part][name]["kernel"] *= math.sqrt(2 * n_layer)
    np.testing.assert_allclose(rms(), without, rtol=3 * 0.044)
