"""Padding, packed documents, and ids or lengths out of range: what other systems got wrong in silence."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.experimental import checkify
from tiny import BATCH, CONFIG, T, random_params, random_tokens, to_float64

from flax_gpt import forward, ops

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
PADS = (0, 1, 2, 3, 8)


@pytest.fixture(scope="module")
def params():
    return random_params()


# Padding


def padded_rows():
    """Rows of one length with each number of pads, on the left and then on the right: tokens and mask [b, t]."""
    tokens = np.asarray(random_tokens(shape=(2 * len(PADS), T)))
    mask = np.ones(tokens.shape, bool)
    for row, pads in enumerate(PADS):
        mask[row, :pads] = False
        mask[len(PADS) + row, T - pads :] = False
    return tokens, mask


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_padded_row_gives_what_the_row_alone_gives(dtype):
    tokens, mask = padded_rows()
    with jax.enable_x64(dtype == "float64"):
        params = random_params(dtype=dtype)
        logits = np.asarray(forward(CONFIG, params, tokens, mask=mask))
    for row in range(len(tokens)):
        alone = reference.forward(to_float64(params), tokens[row : row + 1, mask[row]])["logits"][0]
        np.testing.assert_allclose(logits[row, mask[row]], alone, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_padded_row_gives_what_the_package_gives_for_the_row_alone(params):
    tokens, mask = padded_rows()
    logits = np.asarray(forward(CONFIG, params, tokens, mask=mask))
    for row in (PADS.index(3), len(PADS) + PADS.index(3)):
        alone = forward(CONFIG, params, tokens[row : row + 1, mask[row]])[0]
        np.testing.assert_allclose(logits[row, mask[row]], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("as_given", [lambda x: x, jnp.asarray], ids=["host", "device"])
def test_the_ids_at_padding_do_not_matter_even_out_of_range(params, as_given):
    tokens, mask = padded_rows()
    before = forward(CONFIG, params, tokens, mask=mask)
    for junk in (0, 61, -1, 10**6):
        after = forward(CONFIG, params, as_given(np.where(mask, tokens, junk)), mask=as_given(mask))
        np.testing.assert_array_equal(after, before)


def test_a_mask_may_be_given_as_bools_ints_or_lists(params):
    tokens, mask = padded_rows()
    expected = forward(CONFIG, params, tokens, mask=mask)
    for same in (mask.astype(int), mask.astype(int).tolist(), jnp.asarray(mask), jnp.asarray(mask, jnp.int32)):
        np.testing.assert_array_equal(forward(CONFIG, params, tokens, mask=same), expected)


# Loss and its gradient over packed and padded rows

DOCUMENTS = [np.asarray(random_tokens(shape=(1, n), seed=n))[0] for n in (3, 5, 7, 2)]


def loss(params, tokens, mask, segments):
    """The sum over the tokens that have one of their own document before them."""
    logits = forward(CONFIG, params, tokens, mask=mask, segment_ids=segments)
    counted = mask[:, 1:] & mask[:, :-1] & (segments[:, 1:] == segments[:, :-1])
    return jnp.where(counted, ops.cross_entropy(logits[:, :-1], tokens[:, 1:]), 0).sum(), logits


loss_and_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))


def rows_of(*rows):
    """Documents in rows, padded to [5, 17]: tokens, mask and segments; documents are numbered from the last."""
    tokens, mask, segments = np.zeros((5, 17), np.int32), np.zeros((5, 17), bool), np.zeros((5, 17), np.int32)
    for row, documents in enumerate(rows):
        packed = np.concatenate(documents)
        tokens[row, : len(packed)], mask[row, : len(packed)] = packed, True
        segments[row, : len(packed)] = np.repeat(np.arange(len(documents))[::-1], [len(x) for x in documents])
    return tokens, mask, segments


def test_packed_documents_are_separate_rows_in_logits_and_gradients(params):
    packed, separate = rows_of(DOCUMENTS), rows_of(*[[document] for document in DOCUMENTS])
    (packed_loss, packed_logits), packed_grads = loss_and_gradient(params, *packed)
    (separate_loss, logits), grads = loss_and_gradient(params, *separate)
    np.testing.assert_allclose(packed_logits[0], logits[separate[1]], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(packed_loss, separate_loss, rtol=1e-6)
    for packed_grad, grad in zip(jax.tree.leaves(packed_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(packed_grad, grad, rtol=0, atol=1e-5 * np.abs(grad).max())
    for start, document in zip((0, 3, 8, 15), DOCUMENTS, strict=True):
        alone = reference.forward(to_float64(params), document[None])["logits"][0]
        np.testing.assert_allclose(packed_logits[0, start : start + len(document)], alone, rtol=1e-5, atol=1e-5)


def test_a_row_of_padding_alone_stays_finite_and_adds_nothing(params):
    tokens, mask, segments = rows_of(*[[document] for document in DOCUMENTS])
    assert not mask[4].any()
    (value, logits), grads = loss_and_gradient(params, tokens, mask, segments)
    chex.assert_tree_all_finite((value, logits, grads))
    tokens[4] = 60
    (same_value, _), same_grads = loss_and_gradient(params, tokens, mask, segments)
    chex.assert_trees_all_equal((value, grads), (same_value, same_grads))


# Out of range


def test_a_sequence_that_is_too_long_is_refused_at_trace_time_with_both_numbers(params):
    tokens = random_tokens(shape=(1, 18))
    with pytest.raises(ValueError, match=r"18 tokens.*n_positions=17"):
        jax.eval_shape(lambda params, tokens: forward(CONFIG, params, tokens), params, tokens)
    with pytest.raises(ValueError, match=r"18 tokens.*n_positions=17"):
        forward(CONFIG, params, tokens.tolist())


@pytest.mark.parametrize("as_given", [np.ndarray.tolist, lambda x: x], ids=["list", "numpy"])
@pytest.mark.parametrize("bad", [61, 66, -1])
def test_an_id_on_the_host_that_is_out_of_range_is_refused_with_its_place(params, as_given, bad):
    tokens = np.array(random_tokens())
    tokens[1, 4] = bad
    with pytest.raises(ValueError, match=rf"token id {bad} at row 1, position 4 .* vocabulary of 61"):
        forward(CONFIG, params, as_given(tokens))


@pytest.fixture(scope="module", params=[61, 66, -1])
def logits_of_a_bad_id(request, params):
    """The logits of device ids of which that at row 1, position 4 is out of range."""
    return np.asarray(forward(CONFIG, params, random_tokens().at[1, 4].set(request.param)))


def test_an_id_on_the_device_that_is_out_of_range_makes_its_row_nan(logits_of_a_bad_id):
    assert np.isnan(logits_of_a_bad_id[1]).all()
    assert np.isfinite(logits_of_a_bad_id[0]).all()


def test_an_id_on_the_device_that_is_out_of_range_can_be_made_to_raise(params):
    checked = jax.jit(checkify.checkify(lambda tokens: forward(CONFIG, params, tokens), errors=checkify.index_checks))
    error, logits = checked(random_tokens())
    error.throw()
    assert np.isfinite(logits).all()
    error, _ = checked(random_tokens().at[1, 4].set(61))
    with pytest.raises(checkify.JaxRuntimeError, match="out-of-bounds"):
        error.throw()


def test_rows_of_different_lengths_are_refused(params):
    with pytest.raises(ValueError, match=r"tokens: .*differ in length"):
        forward(CONFIG, params, [[1, 2, 3], [1, 2]])


@pytest.mark.parametrize("name", ["mask", "segment_ids"])
def test_a_mask_or_segments_of_another_shape_are_refused_with_both_shapes(params, name):
    rows = {name: np.ones((BATCH, T + 1), int)}
    with pytest.raises(ValueError, match=rf"{name} has shape \(2, 12\), tokens have shape \(2, 11\)"):
        forward(CONFIG, params, random_tokens(), **rows)


@pytest.mark.parametrize("name", ["tokens", "mask", "segment_ids"])
def test_floats_are_refused(params, name):
    arguments = {"tokens": random_tokens(), name: np.ones((BATCH, T))}
    with pytest.raises(TypeError, match=f"{name} must be integers, got float64"):
        forward(CONFIG, params, **arguments)


def test_tokens_without_a_batch_axis_are_refused(params):
    with pytest.raises(ValueError, match=r"\[b, t\], got shape \(11,\)"):
        forward(CONFIG, params, np.zeros(11, int))


def test_what_the_host_check_lets_through_has_finite_logits():
    """The first and the last id, and a sequence of exactly n_positions."""
    config = dataclasses.replace(CONFIG, n_positions=2)
    assert np.isfinite(forward(config, random_params(config), [[0, 60], [60, 0]])).all()
