"""The training step: parts of a batch, moving average, norms, steps that are not finite."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import CONFIG, PARAMS, TRAIN

from flax_gpt import data, ops, training

DROPOUT = dataclasses.replace(CONFIG, embd_pdrop=0.1, attn_pdrop=0.2, resid_pdrop=0.3)


@pytest.fixture(scope="module")
def params():
    return PARAMS


@pytest.fixture(scope="module")
def six():
    """Six rows, in each another number of scored targets, in one of them none."""
    rng = np.random.default_rng(1)
    tokens, targets = rng.integers(7, size=(2, 6, 11))
    return data.Batch(tokens, targets, np.arange(11) < np.array([11, 3, 0, 7, 1, 2])[:, None])


def gradient_step(config, params, batch, key=None, **options):
    """One step of gradient descent at a rate of 1: the change of the parameters is the gradient."""
    optimizer = optax.sgd(1.0)
    state = training.init_state(params, optimizer, key)
    return jax.jit(lambda s, b: training.train_step(config, optimizer, s, b, **options))(state, batch)


def test_parts_of_a_batch_add_up_to_it_however_unequal(params, six):
    whole, metrics = gradient_step(CONFIG, params, six)
    state, others = gradient_step(CONFIG, params, six, micro_batches=3)
    chex.assert_trees_all_close((state.params, others), (whole.params, metrics), rtol=1e-6, atol=1e-6)
    mean_of_means = np.mean([
        training.next_token_loss(CONFIG, params, jax.tree.map(lambda x, i=i: x[i : i + 2], six))[0] for i in (0, 2, 4)
    ])  # fmt: skip
    assert abs(metrics["loss"] - mean_of_means) > 1e-3  # what a mean over the parts would give


@pytest.mark.slow
def test_each_part_has_its_own_dropout(params):
    row = data.Batch(*np.random.default_rng(1).integers(7, size=(2, 1, 11)), np.ones((1, 11), bool))
    twice = jax.tree.map(lambda x: np.concatenate([x, x]), row)
    key = jax.random.key(5)
    _, metrics = gradient_step(DROPOUT, params, twice, key, micro_batches=2)
    keys = jax.random.split(jax.random.fold_in(key, 0))
    losses = [float(training.next_token_loss(DROPOUT, params, row, dropout_key=k)[0]) for k in keys]
    assert losses[0] != losses[1]
    np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-6)


def test_a_batch_that_cannot_be_divided_is_refused(params, six):
    with pytest.raises(ValueError, match="a batch of 6 sequences cannot be divided into 4 micro-batches"):
        gradient_step(CONFIG, params, six, micro_batches=4)


def test_the_average_follows_the_parameters(params, six):
    optimizer = optax.sgd(0.5)
    state = training.init_state(params, optimizer, average=True)
    step = jax.jit(lambda s: training.train_step(CONFIG, optimizer, s, six, ema_decay=0.75)[0])
    first, second = step(state), step(step(state))
    expected = jax.tree.map(
        lambda a, b, c: 0.75 * (0.75 * a + 0.25 * b) + 0.25 * c, params, first.params, second.params
    )
    chex.assert_trees_all_close(second.average, expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="ema_decay is None and the state keeps an average"):
        training.train_step(CONFIG, optimizer, state, six)
    with pytest.raises(ValueError, match="ema_decay is 0.5 and the state keeps no average"):
        training.train_step(CONFIG, optimizer, state._replace(average=None), six, ema_decay=0.5)


def test_norms_are_by_group(params, six):
    state, metrics = gradient_step(CONFIG, params, six)
    change = jax.tree.map(lambda new, old: np.asarray(new, np.float64) - np.asarray(old), state.params, params)
    for name, tree in (("grad_norm", change), ("update_norm", change), ("param_norm", params)):
        parts = {
            "wte": tree["wte"],
            "ln_f": tree["ln_f"],
            "attn": tree["blocks"]["attn"],
            "ln_2": tree["blocks"]["ln_2"],
        }
        for group, part in parts.items():
            norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(part)))
            np.testing.assert_allclose(metrics[f"{name}/{group}"], norm, rtol=1e-4, atol=1e-6)
        total = np.sqrt(sum(metrics[key] ** 2 for key in metrics if key.startswith(f"{name}/")))
        np.testing.assert_allclose(metrics[name], total, rtol=1e-6)


def test_a_step_that_is_not_finite_changes_nothing_but_its_count(params, six):
    optimizer = training.make_optimizer(TRAIN)
    state = training.init_state(params, optimizer, jax.random.key(0), average=True)
    step = jax.jit(lambda s, b: training.train_step(DROPOUT, optimizer, s, b, ema_decay=0.5))
    state, _ = step(state, six)
    after, metrics = step(state, six._replace(targets=six.targets + 7))
    assert np.isnan(metrics["loss"])
    assert metrics["skipped"] == after.skipped == 1
    assert after.step == 2
    chex.assert_trees_all_equal(
        (after.params, after.opt_state, after.average), (state.params, state.opt_state, state.average)
    )
    again, metrics = step(after, six)
    assert metrics["skipped"] == again.skipped == 1
    assert not np.array_equal(again.params["wte"], state.params["wte"])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_cross_entropy_in_chunks_is_the_plain_one(dtype):
    rng = np.random.default_rng(3)
    x, table = jnp.asarray(rng.normal(size=(3, 11, 5)), dtype), jnp.asarray(rng.normal(size=(7, 5)), jnp.float32)
    scored = jnp.asarray(rng.random((3, 11)) < 0.7)
    targets = jnp.where(scored, rng.integers(7, size=(3, 11)), -100)

    def plain(x, table):
        logits = ops.einsum("btd,vd->btv", x, table.astype(x.dtype))
        right = jnp.sum(scored & (jnp.argmax(logits, axis=-1) == targets))
        return 2 * jnp.sum(jnp.where(scored, ops.cross_entropy(logits, targets), 0)), right

    def chunked(x, table, chunk):
        total, right = ops.chunked_cross_entropy(x, table, targets, scored, chunk)
        return 2 * total, right

    (expected, right), gradient = jax.value_and_grad(plain, (0, 1), has_aux=True)(x, table)
    for chunk in (4, 10):  # of 11
        (loss, also_right), others = jax.jit(
            jax.value_and_grad(chunked, (0, 1), has_aux=True), static_argnums=2
        )(x, table, chunk)  # fmt: skip
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        np.testing.assert_allclose(chunked(x, table, chunk)[0], expected, rtol=1e-6)  # without a gradient
        assert also_right == right
        # bfloat16 has 8 bits: a product's operands are rounded by up to 2^-9 of the largest.
        chex.assert_trees_all_close(others, gradient, atol=3e-6 if dtype == jnp.float32 else 2**-7 * 4)
        assert others[0].dtype == dtype
        assert others[1].dtype == jnp.float32


def test_the_first_of_equal_logits_is_the_largest():
    logits = jnp.asarray([[0.0, 2.0, 2.0], [2.0, 2.0, 1.0], [1.0, 0.0, 3.0]])
    expected = np.array([[False, True, False], [True, False, False], [False, False, True]])
    for target in range(3):
        np.testing.assert_array_equal(ops.is_largest(logits, jnp.full(3, target)), expected[:, target])


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_loss_of_a_model_can_be_taken_in_chunks(params, six, tied):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    if not tied:
        params = {**params, "head": {"kernel": params["wte"].T * 1.1}}
    six = six._replace(targets=np.where(six.scored, six.targets, -100))
    plain, chunked = (
        jax.jit(
            jax.value_and_grad(
                lambda p, chunk=chunk: training.next_token_loss(config, p, six, loss_chunk=chunk), has_aux=True
            )
        )(params)
        for chunk in (11, 4)
    )
    chex.assert_trees_all_close(chunked, plain, rtol=1e-6, atol=1e-6)


def test_the_chunked_loss_holds_no_logits_of_the_whole_batch():
    """At GPT-2's sizes, from the compiler's own account; nothing is run."""
    b, t, v, d = 8, 1024, 50257, 32
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((b, t, d), jnp.float32), ((v, d), jnp.float32), ((b, t), jnp.int32), ((b, t), jnp.bool_))
    ]

    def plain(x, table, targets, scored):
        losses = ops.cross_entropy(ops.einsum("btd,vd->btv", x, table), targets)
        return jnp.sum(jnp.where(scored, losses, 0))

    def chunked(x, table, targets, scored):
        return ops.chunked_cross_entropy(x, table, targets, scored, training.loss._chunk_size(b, t, v))[0]

    def peak(loss):
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes).compile()
        memory = compiled.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    assert peak(chunked) < peak(plain) / 4


def test_packed_documents_do_not_see_each_other(params):
    rng = np.random.default_rng(2)
    tokens, targets = rng.integers(7, size=(2, 1, 11))
    segments = np.array([[0] * 4 + [1] * 7])
    scored = np.arange(11)[None] != 3
    packed, _ = training.next_token_loss(CONFIG, params, data.Batch(tokens, targets, scored, segments))
    total = 0.0
    for part in (slice(0, 4), slice(4, 11)):
        alone = data.Batch(tokens[:, part], targets[:, part], scored[:, part])
        loss, metrics = training.next_token_loss(CONFIG, params, alone)
        total += float(loss) * float(metrics["scored"])
    np.testing.assert_allclose(packed, total / 10, rtol=1e-6)
