"""The array maths against the oracle, in each dtype, and at the places where such maths goes wrong."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import draw

from flax_gpt import ops

# Of results of size 1, after sums of some ten terms.
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
# Half a unit in the last of bfloat16's 8 bits: what one rounding of the result costs, relative.
BFLOAT16_ROUNDING = 2.0**-8
ABOVE_FLOAT32 = ("float32", "float64")


def double(*arrays):
    return tuple(np.asarray(x, np.float64) for x in arrays)


def assert_close(x, expected, dtype):
    assert x.dtype == dtype
    np.testing.assert_allclose(x, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_annotations_are_enforced():
    with pytest.raises(jaxtyping.TypeCheckError):
        ops.layer_norm(jnp.ones((2, 5)), jnp.ones(7), jnp.ones(5))


# Matrix products


@pytest.mark.parametrize("dtype", ABOVE_FLOAT32)
def test_linear_contracts_one_axis_or_several(dtype):
    with jax.enable_x64(dtype == "float64"):
        x, kernel, bias = draw(2, 3, 5, dtype=dtype), draw(3, 5, 7, 11, dtype=dtype), draw(7, 11, dtype=dtype)
        x64, kernel64, bias64 = double(x, kernel, bias)
        expected = (x64.reshape(2, 15) @ kernel64.reshape(15, 77)).reshape(2, 7, 11)
        assert_close(ops.linear(x, kernel, bias, n_in=2), expected + bias64, dtype)
        assert_close(ops.linear(x, kernel, n_in=2), expected, dtype)
        assert_close(ops.linear(x, kernel[0]), np.tensordot(x64, kernel64[0], 1), dtype)


def test_linear_of_a_kernel_that_does_not_fit_is_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"\(2, 3, 5\).*\(3, 7\) with n_in=1"):
        ops.linear(draw(2, 3, 5), draw(3, 7))


def test_linear_takes_the_dtype_of_x_and_rounds_once():
    x, kernel, bias = draw(3, 997, dtype=jnp.bfloat16), draw(997, 5, seed=1), draw(5, seed=2)
    y = ops.linear(x, kernel, bias)
    assert y.dtype == jnp.bfloat16
    x64, kernel64, bias64 = double(x, kernel.astype(jnp.bfloat16), bias.astype(jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(y, np.float64), x64 @ kernel64 + bias64, rtol=BFLOAT16_ROUNDING, atol=1e-4)


def test_einsum_of_bfloat16_accumulates_and_returns_float32():
    x = jnp.ones((1, 1009), jnp.bfloat16)  # the ones stop adding up at 256 in bfloat16
    y = ops.einsum("ij,kj->ik", x, x)
    assert y.dtype == jnp.float32
    assert y.item() == 1009


# LayerNorm


@pytest.mark.parametrize("dtype", ABOVE_FLOAT32)
def test_layer_norm_is_the_oracles(dtype):
    with jax.enable_x64(dtype == "float64"):
        args = draw(2, 3, 7, dtype=dtype), draw(7, dtype=dtype, seed=1), draw(7, dtype=dtype, seed=2)
        assert_close(ops.layer_norm(*args, 0.03), reference.layer_norm(*double(*args), 0.03), dtype)
        assert_close(ops.layer_norm(*args), reference.layer_norm(*double(*args), 1e-5), dtype)


def test_layer_norm_of_two_numbers():
    y = ops.layer_norm(jnp.array([0.0, 2.0]), jnp.ones(2), jnp.zeros(2))
    np.testing.assert_allclose(y, [-0.999995, 0.999995], rtol=3e-7)  # 1 - 1e-5/2; without epsilon it is 1


@pytest.mark.parametrize("mean", [100.0, 1e4])
def test_layer_norm_keeps_its_digits_under_a_large_mean(mean):
    x = draw(3, 769) + mean
    y = ops.layer_norm(x, jnp.ones(769), jnp.zeros(769))
    # The mean itself is good to half a unit in float32's last place; variance by mean of squares would be off by 1.
    atol = 2 * mean * float(jnp.finfo(jnp.float32).eps) + 1e-5
    np.testing.assert_allclose(y, reference.layer_norm(*double(x), 1.0, 0.0), rtol=0, atol=atol)


def test_layer_norm_takes_its_statistics_in_float32():
    x = draw(3, 769, dtype=jnp.bfloat16) + jnp.bfloat16(4)
    y = ops.layer_norm(x, jnp.ones(769), jnp.zeros(769))
    assert y.dtype == jnp.bfloat16
    expected = reference.layer_norm(*double(x), 1.0, 0.0)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=BFLOAT16_ROUNDING, atol=1e-5)


INVARIANCE = 1e-13


class TestInvarianceOfLayerNorm:
    """The table of Ba et al. 2016 (arXiv 1607.06450, table 1), for LN(W x) over data x [case, d]."""

    @pytest.fixture(autouse=True)
    def _data(self, x64):
        self.x, self.w, self.shift = draw(5, 7, dtype="float64"), draw(7, 11, dtype="float64", seed=1), draw(7, seed=2)

    def change(self, x, w):
        def norm(x, w):
            return ops.layer_norm(x @ w, jnp.ones(11), jnp.zeros(11), 0.0)

        return float(jnp.abs(norm(x, w) - norm(self.x, self.w)).max())

    def test_invariant_to_rescaling_and_recentring_the_weight_matrix(self):
        assert self.change(self.x, 3 * self.w) < INVARIANCE
        assert self.change(self.x, self.w + self.shift[:, None]) < INVARIANCE  # the same vector to every neuron

    def test_invariant_to_rescaling_the_data_or_a_single_case(self):
        assert self.change(3 * self.x, self.w) < INVARIANCE
        assert self.change(self.x.at[2].multiply(3), self.w) < INVARIANCE

    def test_not_invariant_to_rescaling_one_weight_vector_or_recentring_the_data(self):
        assert self.change(self.x, self.w.at[:, 3].multiply(3)) > 0.1
        assert self.change(self.x + self.shift, self.w) > 0.1

    @pytest.mark.parametrize("a", [0.01, 0.1, 10.0])
    def test_epsilon_breaks_the_scale_invariance_by_as_much_as_it_should(self, a):
        x = self.x / self.x.std(-1, keepdims=True)
        ones, zeros, epsilon = jnp.ones(7), jnp.zeros(7), 1e-5
        ratio = ops.layer_norm(a * x, ones, zeros, epsilon) / ops.layer_norm(x, ones, zeros, 0.0)
        np.testing.assert_allclose(ratio, 1 / math.sqrt(1 + epsilon / a**2), rtol=1e-12)


# Non-linearities


@pytest.mark.parametrize("name", ops.ACTIVATION_FUNCTIONS)
@pytest.mark.parametrize("dtype", [*ABOVE_FLOAT32, "bfloat16"])
def test_activation_functions_are_the_oracles(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.linspace(-30, 30, 601).astype(dtype)
        y, expected = ops.ACTIVATION_FUNCTIONS[name](x), reference.ACTIVATIONS[name](*double(x))
        if dtype == "bfloat16":
            assert y.dtype == dtype
            np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=BFLOAT16_ROUNDING, atol=1e-6)
        else:
            assert_close(y, expected, dtype)


@pytest.mark.parametrize(
    ("x", "tanh", "erf"),
    [
        (1.0, 0.8411920, 0.8413447),
        (2.0, 1.9545977, 1.9544997),
        (-1.0, -0.1588080, -0.1586553),
        (3, 2.9963626, 2.9959503),
    ],
)
def test_gelu_at_points(x64, x, tanh, erf):
    assert abs(ops.gelu(jnp.float64(x)) - tanh) < 5.1e-8  # the digits given
    assert abs(ops.gelu_exact(jnp.float64(x)) - erf) < 5.1e-8


def test_the_two_gelus_differ_by_no_more_than_they_should(x64):
    x = jnp.linspace(-6, 6, 120001)
    difference = jnp.abs(ops.gelu(x) - ops.gelu_exact(x))
    assert abs(difference.max() - 4.7324e-4) < 5e-9
    assert abs(abs(x[difference.argmax()]) - 2.699) < 1e-3
    quick = jnp.abs(x * jax.nn.sigmoid(1.702 * x) - ops.gelu_exact(x))
    assert abs(quick.max() - 2.0335e-2) < 1e-6
    assert abs(abs(x[quick.argmax()]) - 2.270) < 1e-3


def test_exact_gelu_keeps_its_digits_on_the_far_negative_side():
    x = jnp.float32(-6.0)
    np.testing.assert_allclose(ops.gelu_exact(x), reference.gelu_exact(np.float64(-6)), rtol=1e-5)


# Who sees whom

T = 7
rows_of = functools.partial(st.lists, min_size=T, max_size=T)


@settings(deadline=None, max_examples=20)
@given(
    mask=st.none() | rows_of(st.booleans()),
    documents=st.none() | st.lists(st.booleans(), min_size=T, max_size=T).map(lambda new: np.cumsum(new).tolist()),
)
def test_visible_keys_and_positions_are_those_of_a_loop(mask, documents):
    batched = [None if row is None else jnp.array([row, row[::-1]]) for row in (mask, documents)]
    visible = ops.visible_keys(T, *batched)
    position = ops.positions(visible)
    for row, order in enumerate((1, -1)[: len(visible)]):
        of_row = [None if x is None else x[::order] for x in (mask, documents)]
        np.testing.assert_array_equal(visible[row], reference.visible_keys(T, *of_row))
        np.testing.assert_array_equal(position[row], reference.positions(T, *of_row))


def test_segments_that_are_neither_sorted_nor_from_zero_are_kept_apart():
    segments = [5, 5, -2, -2, 5, 5, 9]
    visible = ops.visible_keys(T, segment_ids=jnp.array([segments]))
    np.testing.assert_array_equal(visible[0], reference.visible_keys(T, segments=segments))
    np.testing.assert_array_equal(ops.positions(visible)[0], [0, 1, 0, 1, 2, 3, 0])


# Attention


@pytest.mark.parametrize("dtype", ABOVE_FLOAT32)
@pytest.mark.parametrize("visible", ["causal", "given"])
def test_attention_is_the_oracles_head_by_head(dtype, visible):
    with jax.enable_x64(dtype == "float64"):
        q, k, v = (draw(2, T, 3, 5, dtype=dtype, seed=seed) for seed in range(3))
        mask = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0]], bool)
        z = ops.causal_attention(q, k, v, ops.visible_keys(T, jnp.array(mask)) if visible == "given" else None)
        q, k, v = double(q, k, v)
        expected = np.zeros_like(q)
        for b in range(2):
            sees = reference.visible_keys(T, mask[b] if visible == "given" else None)
            for h in range(3):
                expected[b, :, h], _, _ = reference.attention(q[b, :, h], k[b, :, h], v[b, :, h], sees)
        assert_close(z, expected, dtype)


def test_attention_of_bfloat16_has_float32_scores_and_pattern():
    seen = {}
    q, k, v = (draw(2, T, 3, 5, dtype=jnp.bfloat16, seed=seed) for seed in range(3))
    z = ops.causal_attention(q, k, v, tap=lambda site, value: seen.setdefault(site, value))
    assert z.dtype == jnp.bfloat16
    assert {site: (x.shape, x.dtype.name) for site, x in seen.items()} == {
        "attn_scores": ((2, 3, T, T), "float32"),
        "pattern": ((2, 3, T, T), "float32"),
    }
    q, k, v = (x[1, :, 2] for x in double(q, k, v))
    _, scores, pattern = reference.attention(q, k, v, reference.visible_keys(T))
    np.testing.assert_allclose(seen["attn_scores"][1, 2], scores, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(seen["pattern"][1, 2], pattern, rtol=1e-5, atol=1e-5)


def test_fewer_queries_than_keys_need_to_be_told_who_sees_whom():
    q, k = draw(2, 3, 3, 5), draw(2, 7, 3, 5)
    with pytest.raises(ValueError, match="3 queries and 7 keys"):
        ops.causal_attention(q, k, k)
    visible = jnp.tri(3, 7, 4, dtype=bool)[None]  # the last 3 of 7 positions
    whole = ops.causal_attention(jnp.concatenate([draw(2, 4, 3, 5, seed=1), q], 1), k, k)
    np.testing.assert_allclose(ops.causal_attention(q, k, k, visible), whole[:, 4:], rtol=1e-5, atol=1e-5)


def test_softmax_ignores_hidden_scores_and_large_ones_do_not_overflow():
    scores = jnp.array([[1e30, 1e38, 1.0, -1e30], [jnp.inf, 500.0, 501.0, jnp.nan]])
    visible = jnp.array([[True, False, True, True], [False, True, True, False]])
    weights = ops.masked_softmax(scores, visible)
    one = 1 / (1 + math.e)
    np.testing.assert_allclose(weights, [[1, 0, 0, 0], [0, one, 1 - one, 0]], rtol=1e-6)


def test_a_row_that_sees_nothing_is_zero_and_so_is_its_gradient():
    scores, value = draw(3, T), draw(3, T, seed=1)
    visible = jnp.ones((3, T), bool).at[1].set(False)
    weights, vjp = jax.vjp(lambda scores: ops.masked_softmax(scores, visible), scores)
    (grad,) = vjp(value)
    chex.assert_tree_all_finite((weights, grad))
    assert not weights[1].any()
    assert not grad[1].any()
    np.testing.assert_allclose(weights[0], reference.softmax(np.asarray(scores[0], np.float64)), rtol=1e-5)
    assert np.abs(grad[0]).min() > 0


# Dropout


def test_dropout_drops_its_share_and_scales_the_rest():
    n, rate = 200_003, 0.3
    y = ops.dropout(jnp.full(n, 2.0), rate, jax.random.key(0))
    np.testing.assert_allclose(np.unique(y), [0, 2 / 0.7], rtol=1e-6)
    sigma = math.sqrt(rate * (1 - rate) / n)
    assert abs(float((y == 0).mean()) - rate) < 3 * sigma
    assert abs(float(y.mean()) - 2) < 3 * 2 / 0.7 * sigma


def test_dropout_masks_are_independent_over_rows_and_heads():
    b, h, n, rate = 2, 3, 40_009, 0.3
    kept = np.asarray(ops.dropout(jnp.ones((b, h, n)), rate, jax.random.key(0)) > 0).reshape(b * h, n)
    correlation = np.corrcoef(kept) - np.eye(b * h)
    assert np.abs(correlation).max() < 4 / math.sqrt(n)  # 4 sigma: the largest of 15


@pytest.mark.parametrize("axis", [0, 2], ids=["rows", "heads"])
def test_dropout_of_the_pattern_differs_between_rows_and_between_heads(axis):
    """With equal rows and heads going in, only the masks can make the results differ."""
    x = jnp.broadcast_to(draw(1, T, 1, 5), (2, T, 3, 5))
    run = functools.partial(ops.causal_attention, x, x, x, dropout_rate=0.5)
    z = jnp.moveaxis(run(dropout_key=jax.random.key(0)), axis, 0)
    assert np.abs(z[0] - z[1]).max() > 0.1
    np.testing.assert_array_equal(z, jnp.moveaxis(run(dropout_key=jax.random.key(0)), axis, 0))


def test_attention_under_dropout_is_on_average_the_plain_one():
    x, n = draw(1, T, 3, 5), 4001
    keys = jax.random.split(jax.random.key(0), n)
    z = jax.jit(jax.vmap(lambda key: ops.causal_attention(x, x, x, dropout_rate=0.3, dropout_key=key)))(keys)
    error = jnp.abs(z.mean(0) - ops.causal_attention(x, x, x))
    # 105 entries: 4 sigma of each, where one alone would be held to 3.
    assert (error <= 4 * z.std(0) / math.sqrt(n) + 1e-6).all()


def test_dropout_at_rate_zero_is_the_identity_and_needs_no_key():
    x = draw(3, 5)
    np.testing.assert_array_equal(ops.dropout(x, 0.0, None), x)


def test_dropout_keeps_the_dtype():
    assert ops.dropout(draw(3, 5, dtype=jnp.bfloat16), 0.5, jax.random.key(0)).dtype == jnp.bfloat16


@pytest.mark.parametrize("rate", [1.0, -0.1])
def test_a_dropout_rate_out_of_range_is_refused(rate):
    with pytest.raises(ValueError, match=f"got {rate}"):
        ops.dropout(jnp.ones(3), rate, jax.random.key(0))


def test_dropout_without_a_key_is_refused():
    with pytest.raises(ValueError, match=r"rate 0\.5 needs a key"):
        ops.dropout(jnp.ones(3), 0.5, None)


# Cross entropy


@pytest.mark.parametrize("dtype", ABOVE_FLOAT32)
def test_cross_entropy_is_the_oracles(dtype):
    with jax.enable_x64(dtype == "float64"):
        logits, targets = draw(2, 3, 7, dtype=dtype), np.array([[0, 6, 3], [1, 1, 5]])
        (logits64,) = double(logits)
        expected = [[reference.cross_entropy(logits64[b, t], targets[b, t]) for t in range(3)] for b in range(2)]
        assert_close(ops.cross_entropy(logits, jnp.asarray(targets)), expected, dtype)


def test_cross_entropy_of_huge_logits_does_not_overflow():
    loss = ops.cross_entropy(jnp.array([[1e30, 0.0], [0.0, 1e4]]), jnp.array([0, 0]))
    np.testing.assert_array_equal(loss, [0, 1e4])


def test_cross_entropy_of_bfloat16_is_taken_in_float32():
    loss = ops.cross_entropy(jnp.zeros((1, 50257), jnp.bfloat16), jnp.array([3]))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, 10.8249, atol=5e-5)


def test_a_target_outside_the_vocabulary_is_nan_and_does_not_count_from_the_end():
    loss = ops.cross_entropy(draw(4, 7), jnp.array([7, -1, -7, 6]))
    np.testing.assert_array_equal(np.isnan(loss), [True, True, True, False])


def test_a_target_outside_the_vocabulary_that_is_not_selected_leaves_the_gradient_finite():
    logits, targets = draw(3, 7), jnp.array([-1, 6, 7])

    def loss(logits):
        return jnp.where(targets == 6, ops.cross_entropy(logits, targets), 0).sum()

    grad = jax.grad(loss)(logits)
    chex.assert_tree_all_finite(grad)
    assert not grad[np.array([0, 2])].any()
    expected = reference.softmax(np.asarray(logits[1], np.float64)) - np.eye(7)[6]
    np.testing.assert_allclose(grad[1], expected, rtol=1e-5, atol=1e-6)


class TestWithAndWithoutJit(chex.TestCase):
    """What is compiled is what is written."""

    @chex.variants(with_jit=True, without_jit=True)
    def test_ops_are_the_oracles(self):
        x, scale, bias = draw(2, 3, 7), draw(7, seed=1), draw(7, seed=2)
        run = self.variant(lambda *args: ops.gelu(ops.layer_norm(*args)))
        expected = reference.gelu_tanh(reference.layer_norm(*double(x, scale, bias)))
        assert_close(run(x, scale, bias), expected, "float32")
