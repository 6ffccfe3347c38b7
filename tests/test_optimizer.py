"""Schedules, weight decay and the three optimizers, against their equations."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import CONFIG, PARAMS, TRAIN

import flax_gpt as fg
from flax_gpt import data, training


@pytest.fixture(scope="module")
def params():
    return PARAMS


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(7, size=(2, 5, 11))
    return data.Batch(tokens, targets, rng.random((5, 11)) < 0.6)


def test_the_schedule_is_nanogpts():
    schedule = training.learning_rate_schedule(
        training.TrainConfig(steps=600_000, lr=6e-4, min_lr=6e-5, warmup_steps=2000)
    )
    middle = 2000 + 598_000 // 2
    rates = {0: 6e-4 / 2001, 1999: 6e-4 * 2000 / 2001, 2000: 6e-4, middle: 3.3e-4, 600_000: 6e-5, 700_000: 6e-5}
    one_ulp = 6e-4 * 2**-23  # computed in float32, as differences from the peak
    np.testing.assert_allclose([schedule(step) for step in rates], list(rates.values()), rtol=1e-6, atol=one_ulp)


def test_the_other_schedules():
    train = training.TrainConfig(steps=110, lr=1.0, min_lr=0.2, warmup_steps=10, cooldown_steps=40)
    warm = {0: 1 / 11, 9: 10 / 11, 10: 1.0}
    expected = {
        "linear": {**warm, 60: 0.6, 85: 0.4, 110: 0.2, 500: 0.2},
        "trapezoid": {**warm, 69: 1.0, 70: 1.0, 90: 0.6, 110: 0.2, 500: 0.2},
        "constant": {**warm, 60: 1.0, 500: 1.0},
    }
    for name, rates in expected.items():
        schedule = training.learning_rate_schedule(dataclasses.replace(train, schedule=name))
        np.testing.assert_allclose([schedule(step) for step in rates], list(rates.values()), rtol=1e-6)
    fifth = training.learning_rate_schedule(dataclasses.replace(train, schedule="trapezoid", cooldown_steps=None))
    np.testing.assert_allclose([fifth(88), fifth(99)], [1.0, 0.6], rtol=1e-6)
    traced = jax.jit(lambda lr: training.learning_rate_schedule(train, lr, 0.5 * lr)(60))(4.0)
    np.testing.assert_allclose(traced, 3.0, rtol=1e-6)


def test_a_warm_up_of_no_steps_starts_at_the_full_rate():
    schedule = training.learning_rate_schedule(training.TrainConfig(steps=10, lr=0.5, min_lr=0.1, warmup_steps=0))
    np.testing.assert_allclose([schedule(0), schedule(5), schedule(10)], [0.5, 0.3, 0.1], rtol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_decay_is_on_matrices_and_embeddings_alone(tied):
    config = fg.GPTConfig.preset("gpt2", tie_word_embeddings=tied)
    shapes = jax.eval_shape(lambda: fg.init_params(config, jax.random.key(0)))
    decayed = jax.tree_util.tree_leaves_with_path(training.decay_mask(shapes))
    names = {jax.tree_util.keystr(path, simple=True, separator="."): value for path, value in decayed}
    assert {name for name, value in names.items() if value} == {
        "wte", "wpe", "blocks.attn.qkv.kernel", "blocks.attn.out.kernel", "blocks.mlp.up.kernel",
        "blocks.mlp.down.kernel", *([] if tied else ["head.kernel"]),
    }  # fmt: skip
    tensors = {True: 0, False: 0}  # of the published, unstacked kind
    for name, value in names.items():
        tensors[value] += 12 if name.startswith("blocks.") else 1
    assert tensors == {True: 50 if tied else 51, False: 98}


def test_weight_decay_moves_matrices_and_nothing_else(params):
    optimizer = training.make_optimizer(dataclasses.replace(TRAIN, lr=0.1, min_lr=0.1, warmup_steps=0))
    zero = jax.tree.map(jnp.zeros_like, params)
    updates = jax.jit(lambda p: optimizer.update(zero, optimizer.init(p), p)[0])(params)
    expected = jax.tree.map(lambda decays, leaf: -0.1 * 0.1 * leaf * decays, training.decay_mask(params), params)
    chex.assert_trees_all_close(updates, expected, atol=1e-8)


def test_a_step_is_adamw_on_the_clipped_gradient(params, batch):
    """Adam's first step from zero moments is lr * g / (|g| + eps), whatever g's scale."""
    train = dataclasses.replace(TRAIN, lr=0.01, min_lr=0.01, warmup_steps=0, clip_norm=0.05)
    optimizer = training.make_optimizer(train)
    state = training.init_state(params, optimizer)
    state, metrics = jax.jit(lambda state: training.train_step(CONFIG, optimizer, state, batch))(state)
    gradient = jax.jit(jax.grad(lambda p: training.next_token_loss(CONFIG, p, batch)[0]))(params)
    norm = math.sqrt(sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert norm > 0.05

    def update(leaf, g, decays):
        g = np.asarray(g, np.float64) * 0.05 / norm
        return leaf - 0.01 * (g / (np.abs(g) + 1e-8) + 0.1 * leaf * decays)

    expected = jax.tree.map(update, params, gradient, training.decay_mask(params))
    # qkv's key bias has no gradient but rounding: its sign is noise, and so is Adam's step along it
    for tree in (state.params, expected):
        tree["blocks"]["attn"]["qkv"]["bias"] = np.delete(tree["blocks"]["attn"]["qkv"]["bias"], 1, axis=1)
    chex.assert_trees_all_close(state.params, expected, atol=2e-5)
    assert state.step == 1


def test_a_parameter_that_no_rule_names_is_refused_and_can_be_given_one():
    tree = {"blocks": {"attn": {"gain": jnp.ones((2, 3))}}, "wte": jnp.ones((3, 2))}
    with pytest.raises(ValueError, match="parameter blocks.attn.gain; give make_optimizer decay_rules"):
        training.decay_mask(tree)
    rules = (("gain$", True), *training.optimizer.DECAY_RULES)
    assert training.decay_mask(tree, rules) == {"blocks": {"attn": {"gain": True}}, "wte": True}
    optimizer = training.make_optimizer(TRAIN, lr=0.5, min_lr=0.5, weight_decay=1.0, decay_rules=rules)
    update, _ = optimizer.update(jax.tree.map(jnp.zeros_like, tree), optimizer.init(tree), tree)
    chex.assert_trees_all_close(update, jax.tree.map(lambda x: -0.5 / 3 * x, tree), rtol=1e-6)  # warm-up: 1/3 of lr


def _first_update(optimizer_name, params, gradient):
    """At a learning rate of 1, with no decay and no clipping."""
    train = dataclasses.replace(
        TRAIN, optimizer=optimizer_name, lr=1.0, min_lr=1.0, warmup_steps=0, weight_decay=0.0, clip_norm=math.inf
    )
    optimizer = training.make_optimizer(train)
    return jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])(gradient, params)


def test_lion_takes_the_sign(params):
    gradient = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(x.size).normal(size=x.shape), x.dtype), params)
    chex.assert_trees_all_close(_first_update("lion", params, gradient), jax.tree.map(lambda g: -jnp.sign(g), gradient))


def test_muon_makes_each_matrix_of_a_block_orthogonal_and_leaves_the_rest_to_adam(params):
    gradient = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(x.size).normal(size=x.shape), x.dtype), params)
    update = jax.tree.map(np.asarray, _first_update("muon", params, gradient))
    d, f, l = CONFIG.n_embd, CONFIG.mlp_width, CONFIG.n_layer  # noqa: E741
    attn, mlp = update["blocks"]["attn"], update["blocks"]["mlp"]
    qkv = attn["qkv"]["kernel"]
    matrices = [
        *(qkv[layer, :, part].reshape(d, d) for layer in range(l) for part in range(3)),
        *(attn["out"]["kernel"][layer].reshape(d, d) for layer in range(l)),
        *mlp["up"]["kernel"],
        *mlp["down"]["kernel"],
    ]
    assert len(matrices) == 6 * l
    for matrix in matrices:
        # Five steps of Newton and Schulz bring all but small singular values to about 0.7 to 1.2 times one scale.
        values = np.linalg.svd(matrix / (0.2 * math.sqrt(max(matrix.shape))), compute_uv=False)
        assert 0.2 < values.min() <= values.max() < 1.35, values
        assert max(matrix.shape) in (d, f)
    others = {name: update[name] for name in ("wte", "wpe", "ln_f")}
    signs = {name: jax.tree.map(lambda g: -jnp.sign(g), gradient[name]) for name in others}
    chex.assert_trees_all_close(others, signs, atol=1e-5)  # Adam's first step
    chex.assert_trees_all_close(attn["out"]["bias"], -np.sign(gradient["blocks"]["attn"]["out"]["bias"]), atol=1e-5)
