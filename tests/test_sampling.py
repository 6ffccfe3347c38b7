"""What is drawn: the filters against sorting, the order of the steps, and draws that follow the distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_gpt import ops
from flax_gpt.generation import kept_tokens, make_sampling, sample

filtered = jax.jit(kept_tokens)


def kept(logits, top_k=0, top_p=1.0, min_p=0.0):
    """`kept_tokens` for one row, settings as numbers."""
    row = jnp.asarray(logits, jnp.float32)[None]
    return np.asarray(filtered(row, jnp.int32([top_k]), jnp.float32([top_p]), jnp.float32([min_p]))[0])


def kept_by_sorting(logits, top_k, top_p, min_p):
    """The plain way, in float64."""
    logits = np.asarray(logits, np.float32).astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    order = order[: top_k or None]
    weights = np.exp(logits[order] - logits.max())
    before = np.cumsum(weights) - weights
    order = order[(before < (top_p - 1e-6) * weights.sum()) | (np.arange(len(order)) == 0) | (top_p >= 1)]
    order = order[np.exp(logits[order] - logits.max()) >= min_p]
    return np.isin(np.arange(len(logits)), order)


@pytest.mark.parametrize(
    ("probabilities", "top_p", "count"),
    [
        ([0.5, 0.3, 0.2], 0.3, 1), ([0.5, 0.3, 0.2], 0.5, 1), ([0.5, 0.3, 0.2], 0.6, 2), ([0.5, 0.3, 0.2], 0.8, 2),
        ([0.5, 0.3, 0.2], 1.0, 3), ([0.5, 0.3, 0.2], 0.0, 1), ([0.4, 0.3, 0.2, 0.1], 0.3, 1),
        ([0.4, 0.3, 0.2, 0.1], 0.5, 2), ([0.4, 0.3, 0.2, 0.1], 0.7, 2), ([0.4, 0.3, 0.2, 0.1], 0.8, 3),
    ],
)  # fmt: skip
def test_top_p_keeps_the_smallest_set_that_reaches_p(probabilities, top_p, count):
    order = np.random.default_rng(0).permutation(len(probabilities))
    expected = np.isin(order, np.arange(count))
    np.testing.assert_array_equal(kept(np.log(probabilities)[order], top_p=top_p), expected)


@pytest.mark.parametrize(("top_k", "count"), [(1, 1), (2, 2), (4, 4), (0, 4), (9, 4)])
def test_top_k_keeps_k_or_all(top_k, count):
    kept_ = kept([0.1, 0.4, -0.2, 0.3], top_k)
    assert kept_.sum() == count
    assert kept_[1]


@pytest.mark.parametrize(
    ("min_p", "expected"), [(0.0, "1111"), (0.3, "1110"), (0.5, "1100"), (0.76, "1000"), (1.0, "1000")]
)
def test_min_p_is_a_share_of_the_likeliest(min_p, expected):
    logits = np.log([0.41, 0.3, 0.19, 0.1])
    assert "".join(str(int(x)) for x in kept(logits, min_p=min_p)) == expected


def test_ties_keep_the_lower_ids():
    np.testing.assert_array_equal(kept(np.zeros(5), top_k=2), [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(kept(np.zeros(5), top_p=0.5), [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(kept([0, 1, 0, -0.0, 0], top_k=3), [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(kept([-np.inf, 1, -np.inf, 0], top_k=3), [1, 1, 0, 1])


def test_top_p_counts_what_top_k_leaves():
    """Of [.4 .3 .2 .1] top-k 2 leaves [4/7 3/7]: 0.5 is then reached by the first alone."""
    np.testing.assert_array_equal(kept(np.log([0.4, 0.3, 0.2, 0.1]), 2, 0.5), [1, 0, 0, 0])


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32 - 1),
    v=st.sampled_from([1, 2, 31, 997]),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
    ties=st.booleans(),
)
def test_bisection_keeps_what_sorting_keeps(seed, v, top_k, top_p, min_p, ties):
    rng = np.random.default_rng(seed)
    logits = 3 * rng.normal(size=v)
    logits = np.round(logits * 2) / 2 if ties else logits
    expected = kept_by_sorting(logits, top_k, top_p, min_p)
    found = kept(logits, top_k, top_p, min_p)
    # Which side of p a sum falls on may hang on rounding: then one token more or less is as right.
    assert (found != expected).sum() <= 1
    edges = [
        kept_by_sorting(logits, top_k, top_p + e, min_p * (1 + f)) for e in (-1e-5, 0, 1e-5) for f in (-1e-5, 0, 1e-5)
    ]
    assert any((found == edge).all() for edge in edges)


def settings_for(n, v, **options):
    return make_sampling(n, v, **options), jnp.zeros((n, v), bool)


def test_draws_follow_the_tempered_and_filtered_distribution():
    n = 20_000
    logits = jnp.broadcast_to(jnp.log(jnp.asarray([0.4, 0.3, 0.2, 0.1])), (n, 4))
    keys = jax.random.split(jax.random.key(0), n)
    for options, expected in [
        ({"temperature": 0.5, "top_k": 3}, np.array([0.16, 0.09, 0.04, 0]) / 0.29),
        ({}, np.array([0.4, 0.3, 0.2, 0.1])),
        ({"top_p": 0.6, "min_p": 0.1}, np.array([4, 3, 0, 0]) / 7),
        ({"logit_bias": {0: -np.inf, 3: np.log(2)}}, np.array([0, 3, 2, 2]) / 7),
        ({"drawable": 2}, np.array([4, 3, 0, 0]) / 7),
    ]:
        drawn = jax.jit(sample)(logits, keys, *settings_for(n, 4, **options))
        shares = np.bincount(drawn, minlength=4) / n
        np.testing.assert_allclose(shares, expected, atol=4 * np.sqrt(0.25 / n), err_msg=str(options))
        assert not shares[expected == 0].any()


def test_rows_have_settings_of_their_own():
    logits = jnp.asarray([[0.0, 5.0, 1.0], [0.0, 0.1, 0.2], [0.0, 0.1, 0.2], [0.0, 5.0, 1.0]])
    sampling, seen = settings_for(
        4, 3, temperature=[0.0, 100.0, 100.0, 100.0], top_k=[0, 0, 1, 0], top_p=[1, 1, 1, 0.0]
    )
    keys = jax.random.split(jax.random.key(0), 200)
    drawn = jax.vmap(lambda key: sample(logits, jax.random.split(key, 4), sampling, seen))(keys)
    assert [set(column.tolist()) for column in drawn.T] == [{1}, {0, 1, 2}, {2}, {1}]


def test_the_repetition_penalty_divides_or_multiplies():
    logits = jnp.asarray([[2.0, -1.0, 1.9, -0.9]])
    seen = jnp.asarray([[True, True, False, False]])
    keys = jax.random.split(jax.random.key(0), 1)

    def likeliest(penalty, bias=None):
        return int(sample(logits, keys, make_sampling(1, 4, 0.0, repetition_penalty=penalty, logit_bias=bias), seen)[0])

    assert [likeliest(p) for p in (None, 1.0, 1.1)] == [0, 0, 2]
    # -1 becomes -0.5 where the penalty is a half, and with the bias it is the largest.
    bias = {0: -np.inf, 2: -np.inf}
    assert likeliest(1.0, bias) == 3
    assert likeliest(0.5, bias) == 1


def test_the_first_largest_is_argmax():
    rng = np.random.default_rng(0)
    logits = rng.integers(5, size=(50, 7)).astype(np.float32)
    logits[0] = -np.inf
    np.testing.assert_array_equal(ops.first_largest(jnp.asarray(logits)), logits.argmax(-1))
    assert ops.first_largest(jnp.asarray([0.0, jnp.nan, 1.0])) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and not negative, got -0.1"),
        ({"temperature": np.nan}, "temperature must be finite"),
        ({"temperature": [1.0, 2.0, 3.0]}, r"temperature must be a number or one for each of 2 rows, got shape \(3,\)"),
        ({"top_k": -1}, "top_k must be not negative, got -1"),
        ({"top_p": 1.1}, "top_p must be from 0 to 1, got 1.1"),
        ({"min_p": [0.5, 1.5]}, r"min_p must be from 0 to 1, got \[0.5, 1.5\]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be finite and above 0, got 0.0"),
        ({"logit_bias": {5: 1.0}}, "logit_bias names the token id 5, outside the vocabulary of 5"),
        ({"logit_bias": np.zeros(4)}, r"logit_bias must have shape \(5,\) or \(2, 5\), got \(4,\)"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_sampling(2, 5, **options)
