"""What must hold of GPT-2's function whatever the weights: changes of the parameters that leave it as it is.

No trained weights are needed, and most wiring mistakes break one of these.
"""

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from tiny import BATCH, CONFIG, T, draw, random_params, random_tokens, to_float64

from flax_gpt import forward

TOLERANCE = 1e-13  # of float64 log-probabilities of size 5
TOKENS = random_tokens()


@pytest.fixture(autouse=True)
def _double(x64):
    """Everything here is float64."""


@pytest.fixture(scope="module")
def params():
    """Random in every leaf, in NumPy, so that a test can change its own copy in place."""
    return to_float64(random_params())


@pytest.fixture
def changed(params):
    """A copy of the parameters to change in place."""
    return copy.deepcopy(params)


@jax.jit
def log_probs(params):
    return jax.nn.log_softmax(forward(CONFIG, params, TOKENS, layers="scan"))


def assert_unchanged(params, changed):
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(changed), strict=True))
    np.testing.assert_allclose(log_probs(changed), log_probs(params), rtol=0, atol=TOLERANCE)


def vector(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n)


def test_any_vector_may_be_added_to_the_key_bias(params, changed):
    changed["blocks"]["attn"]["qkv"]["bias"][:, 1] += vector((2, 3, 7))
    assert_unchanged(params, changed)


@pytest.mark.parametrize("which", [0, 2], ids=["query", "value"])
def test_no_vector_may_be_added_to_the_query_or_value_bias(params, changed, which):
    changed["blocks"]["attn"]["qkv"]["bias"][:, which] += vector((2, 3, 7))
    assert np.abs(log_probs(changed) - log_probs(params)).max() > 0.1


@pytest.mark.parametrize("table", ["wte", "wpe"])
def test_a_constant_may_be_added_to_every_entry_of_an_embedding(params, changed, table):
    changed[table] += 0.7
    assert_unchanged(params, changed)


def test_a_vector_may_not_be_added_to_every_row_of_wte(params, changed):
    changed["wte"] += vector(21)
    assert np.abs(log_probs(changed) - log_probs(params)).max() > 0.1


def test_what_is_written_to_the_residual_stream_may_be_centred(params, changed):
    for part, name in (("attn", "out"), ("mlp", "down")):
        for leaf in changed["blocks"][part][name].values():
            leaf -= leaf.mean(-1, keepdims=True)
    assert_unchanged(params, changed)


def test_the_value_bias_may_be_folded_into_the_output_bias(params, changed):
    attn = changed["blocks"]["attn"]
    for layer in range(2):
        for head in range(3):
            attn["out"]["bias"][layer] += attn["qkv"]["bias"][layer, 2, head] @ attn["out"]["kernel"][layer, head]
    attn["qkv"]["bias"][:, 2] = 0
    assert_unchanged(params, changed)


@pytest.mark.parametrize(("norm", "part", "name"), [("ln_1", "attn", "qkv"), ("ln_2", "mlp", "up")])
def test_scale_and_shift_of_a_layer_norm_may_be_folded_into_the_next_matrix(params, changed, norm, part, name):
    norm, linear = changed["blocks"][norm], changed["blocks"][part][name]
    for layer in range(2):
        scale, shift, kernel = norm["scale"][layer], norm["bias"][layer], linear["kernel"][layer]
        linear["bias"][layer] += np.tensordot(shift, kernel, 1)
        kernel *= scale.reshape(-1, *[1] * (kernel.ndim - 1))
    norm["scale"][:], norm["bias"][:] = 1, 0
    assert_unchanged(params, changed)


def test_queries_may_be_scaled_if_keys_are_scaled_back(params, changed):
    for leaf, axis in (("kernel", 2), ("bias", 1)):
        query, key = np.moveaxis(changed["blocks"]["attn"]["qkv"][leaf], axis, 0)[:2]
        query *= 3
        key /= 3
    assert_unchanged(params, changed)


def test_heads_may_be_permuted(params, changed):
    qkv, out, order = changed["blocks"]["attn"]["qkv"], changed["blocks"]["attn"]["out"], [2, 0, 1]
    qkv["kernel"], qkv["bias"] = qkv["kernel"][:, :, :, order], qkv["bias"][:, :, order]
    out["kernel"] = out["kernel"][:, order]
    assert_unchanged(params, changed)


def test_neurons_may_be_permuted(params, changed):
    up, down = changed["blocks"]["mlp"]["up"], changed["blocks"]["mlp"]["down"]
    order = np.random.default_rng(0).permutation(29)
    up["kernel"], up["bias"], down["kernel"] = up["kernel"][..., order], up["bias"][:, order], down["kernel"][:, order]
    assert_unchanged(params, changed)


def test_the_key_bias_has_no_gradient(params):
    grad = jax.jit(jax.grad(lambda params: log_probs(params)[..., 5].sum()))(params)
    bias = np.abs(grad["blocks"]["attn"]["qkv"]["bias"]).max((0, 2, 3))
    # Zero but for the rounding of sums of numbers as large as the other two.
    assert bias[1] < 1e-14 * bias[0]
    assert bias[0] > 0.1


def test_with_nothing_written_to_the_stream_only_the_embeddings_are_left(changed):
    for part, name in (("attn", "out"), ("mlp", "down")):
        for leaf in changed["blocks"][part][name].values():
            leaf[:] = 0
    x = changed["wte"][np.asarray(TOKENS)] + changed["wpe"][:T]
    expected = reference.layer_norm(x, changed["ln_f"]["scale"], changed["ln_f"]["bias"]) @ changed["wte"].T
    np.testing.assert_allclose(log_probs(changed), jax.nn.log_softmax(expected), rtol=0, atol=TOLERANCE)


def test_without_the_final_layer_norm_every_token_is_as_likely(changed):
    changed["ln_f"]["scale"][:], changed["ln_f"]["bias"][:] = 0, 0
    np.testing.assert_allclose(log_probs(changed), -math.log(61), rtol=1e-15)


# Causality: nothing at all reaches an earlier position, not even a rounding.


@pytest.mark.parametrize("layers", ["scan", "unroll"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_token_changes_no_bit_before_it(dtype, layers):
    params = random_params(dtype="float64" if dtype == "float64" else "float32")
    compute_dtype = jnp.bfloat16 if dtype == "bfloat16" else None

    @jax.jit
    def run(tokens):
        return forward(CONFIG, params, tokens, layers=layers, compute_dtype=compute_dtype)

    before = run(TOKENS)
    for position in range(T):
        after = run(changed_at(position))
        np.testing.assert_array_equal(after[:, :position], before[:, :position])
        assert (np.abs(after - before)[:, position:].max((0, 2)) > 1e-4).all()


def changed_at(position):
    """The tokens with another one at a position."""
    tokens = np.array(TOKENS)
    tokens[:, position] = (tokens[:, position] + 1) % CONFIG.vocab_size
    return jnp.asarray(tokens)


@pytest.mark.parametrize(("dtype", "layers"), [("float32", "scan"), ("bfloat16", "unroll"), ("float64", "unroll")])
def test_no_gradient_reaches_a_later_position(dtype, layers):
    params = random_params(dtype="float64" if dtype == "float64" else "float32")
    compute_dtype = jnp.bfloat16 if dtype == "bfloat16" else None

    def logits(shift):
        def edit(site, layer, value):
            return value + shift.astype(value.dtype) if site == "embed" else value

        return forward(CONFIG, params, TOKENS, layers=layers, compute_dtype=compute_dtype, edit=edit)

    @jax.jit
    def gradients(weights):
        """Of each position's logits [t] with regard to each position's embedding: [t, s]."""
        out, vjp = jax.vjp(logits, jnp.zeros((BATCH, T, CONFIG.n_embd)))
        one_position = jnp.eye(T)[:, None, :, None] * weights
        return jnp.abs(jax.vmap(lambda w: vjp(w.astype(out.dtype))[0])(one_position)).max((1, 3))

    reached = np.asarray(gradients(draw(BATCH, T, CONFIG.vocab_size)))
    np.testing.assert_array_equal(reached > 0, np.tri(T, dtype=bool))
    assert not reached[~np.tri(T, dtype=bool)].any()
