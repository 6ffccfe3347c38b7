"""Training: loss, optimizer, step and loop, against NumPy and against what must not matter."""

import dataclasses
import math
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_gpt as fg
from flax_gpt import data, training

CONFIG = fg.GPTConfig(
    vocab_size=7, n_positions=11, n_embd=10, n_layer=2, n_head=2, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0
)
DROPOUT = dataclasses.replace(CONFIG, embd_pdrop=0.1, attn_pdrop=0.2, resid_pdrop=0.3)
TRAIN = training.TrainConfig(steps=12, batch_size=5, warmup_steps=2, log_every=4, eval_every=6, eval_batches=1)


class Counting:
    """A source of the task "the next number": any model learns it within a few steps."""

    vocab_size, t, optimum = 7, 11, 0.0

    def training_batch(self, seed, step, batch_size):
        first = np.random.default_rng((seed, step)).integers(7, size=(batch_size, 1))
        x = (first + np.arange(self.t + 1)) % 7
        return data.Batch(x[:, :-1], x[:, 1:], np.ones((batch_size, self.t), bool))

    def validation_batches(self, batch_size, limit=None):
        for step in range(limit or 3):
            yield self.training_batch(99, step, batch_size)


@pytest.fixture(scope="module")
def params():
    return fg.init_params(dataclasses.replace(CONFIG, initializer_range=0.3), jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(7, size=(2, 5, 11))
    return data.Batch(tokens, targets, rng.random((5, 11)) < 0.6)


def test_the_loss_is_the_mean_over_what_is_scored(params, batch):
    loss, metrics = training.next_token_loss(CONFIG, params, batch)
    logits = np.asarray(fg.forward(CONFIG, params, batch.tokens), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    chosen = np.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]
    right = logits.argmax(axis=-1) == batch.targets
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, -chosen[batch.scored].mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], right[batch.scored].mean(), rtol=1e-6)
    assert metrics["scored"] == batch.scored.sum()


@pytest.mark.parametrize("junk", [0, 7, -1, -100])
def test_targets_that_are_not_scored_do_not_matter(params, batch, junk):
    changed = batch._replace(targets=np.where(batch.scored, batch.targets, junk))
    gradient = jax.jit(jax.value_and_grad(lambda p, b: training.next_token_loss(CONFIG, p, b)[0]))
    chex.assert_trees_all_equal(gradient(params, batch), gradient(params, changed))


def test_nothing_scored_is_a_loss_of_zero_with_a_finite_gradient(params, batch):
    nothing = batch._replace(scored=np.zeros_like(batch.scored))
    gradient_of = jax.jit(jax.value_and_grad(lambda p: training.next_token_loss(CONFIG, p, nothing)[0]))
    loss, gradient = gradient_of(params)
    assert loss == 0
    chex.assert_trees_all_equal(gradient, jax.tree.map(jnp.zeros_like, gradient))


def test_uniform_logits_lose_ln_v(params, batch):
    flat = {**params, "ln_f": jax.tree.map(jnp.zeros_like, params["ln_f"])}
    loss, _ = training.next_token_loss(CONFIG, flat, batch)
    np.testing.assert_allclose(loss, math.log(7), rtol=1e-6)


def test_the_schedule_is_nanogpts():
    schedule = training.learning_rate_schedule(
        training.TrainConfig(steps=600_000, lr=6e-4, min_lr=6e-5, warmup_steps=2000)
    )
    middle = 2000 + 598_000 // 2
    rates = {0: 6e-4 / 2001, 1999: 6e-4 * 2000 / 2001, 2000: 6e-4, middle: 3.3e-4, 600_000: 6e-5, 700_000: 6e-5}
    one_ulp = 6e-4 * 2**-23  # computed in float32, as differences from the peak
    np.testing.assert_allclose([schedule(step) for step in rates], list(rates.values()), rtol=1e-6, atol=one_ulp)


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


def test_a_compiled_step_is_the_plain_one_and_traces_once(params, batch):
    optimizer = training.make_optimizer(TRAIN)
    chex.clear_trace_counter()
    step = jax.jit(
        chex.assert_max_traces(lambda state, batch: training.train_step(DROPOUT, optimizer, state, batch), n=1)
    )
    state = training.init_state(params, optimizer, jax.random.key(3))
    donated = jax.tree.map(lambda x: x.copy(), state)
    donating = training.make_train_step(DROPOUT, optimizer)
    for _ in range(3):
        state, metrics = step(state, batch)
        donated, others = donating(donated, batch)
    chex.assert_trees_all_close((state.params, metrics), (donated.params, others), rtol=1e-6)
    assert state.step == donated.step == 3


def test_each_step_has_its_own_dropout(params, batch):
    optimizer = optax.sgd(0.0)
    state = training.init_state(params, optimizer, jax.random.key(3))
    step = jax.jit(lambda state: training.train_step(DROPOUT, optimizer, state, batch))
    again, first = step(state)
    _, second = step(again)
    _, repeated = step(state)
    assert first["loss"] == repeated["loss"] != second["loss"]


def test_dropout_without_a_key_is_refused(params, batch):
    optimizer = optax.sgd(0.1)
    with pytest.raises(ValueError, match=r"dropout rates are \(0.1, 0.2, 0.3\) and the state has no dropout_key"):
        training.train_step(DROPOUT, optimizer, training.init_state(params, optimizer), batch)


def test_evaluation_weighs_batches_by_what_they_score(params, batch):
    few = batch._replace(scored=batch.scored & (np.arange(11) < 2))
    result = training.evaluate(CONFIG, params, [batch, few], layers="scan")
    losses = [float(training.next_token_loss(CONFIG, params, b)[0]) for b in (batch, few)]
    counts = [b.scored.sum() for b in (batch, few)]
    np.testing.assert_allclose(result["loss"], np.dot(losses, counts) / sum(counts), rtol=1e-6)
    assert result["scored"] == sum(counts)
    with pytest.raises(ValueError, match="score no target"):
        training.evaluate(CONFIG, params, [batch._replace(scored=np.zeros_like(batch.scored))])


def test_an_exam_is_greedy_generation(params):
    prompts = np.random.default_rng(0).integers(7, size=(13, 4))
    written = fg.generate(CONFIG, params, list(prompts), 3, temperature=0.0)
    answers = np.array(written.tokens)
    assert training.exam_score(CONFIG, params, prompts, answers) == 13
    answers[::2, -1] = (answers[::2, -1] + 1) % 7
    assert training.exam_score(CONFIG, params, prompts, answers) == 6


@pytest.fixture(scope="module")
def fitted():
    lines = []
    result = training.fit(CONFIG, dataclasses.replace(TRAIN, steps=40, lr=0.02), Counting(), report=lines.append)
    return result, lines


def test_fit_learns_and_reports(fitted):
    result, lines = fitted
    assert lines == result.metrics
    assert result.step == 40
    assert not result.interrupted
    validation = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in validation] == [0, 6, 12, 18, 24, 30, 36, 40]
    assert validation[-1]["val_loss"] < 0.5 < validation[0]["val_loss"]
    assert validation[-1]["accuracy"] > 0.9
    trained = [line for line in lines if "train_loss" in line]
    assert [line["step"] for line in trained] == list(range(4, 41, 4))
    assert set(trained[0]) == {"step", "train_loss", "grad_norm", "learning_rate", "tokens_per_second", "seconds"}
    assert all(line["tokens_per_second"] > 0 for line in trained)
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)


def test_fit_is_reproducible_and_its_seed_matters(fitted):
    result, _ = fitted
    again = training.fit(CONFIG, dataclasses.replace(TRAIN, steps=40, lr=0.02), Counting())
    chex.assert_trees_all_equal(result.params, again.params)
    other = training.fit(CONFIG, dataclasses.replace(TRAIN, steps=40, lr=0.02, seed=1), Counting())
    assert not np.allclose(result.params["wte"], other.params["wte"])


def test_fit_reports_the_mean_of_each_window(params):
    """With a learning rate of 0 the parameters stay, and the losses can be had otherwise."""
    lines = []
    frozen = dataclasses.replace(TRAIN, lr=0.0, min_lr=0.0, steps=6)
    result = training.fit(CONFIG, frozen, Counting(), params=params, report=lines.append)
    chex.assert_trees_all_equal(result.params, params)
    batches = [Counting().training_batch(TRAIN.seed, step, 5) for step in range(6)]
    losses = [float(training.next_token_loss(CONFIG, params, batch)[0]) for batch in batches]
    reported = [line["train_loss"] for line in lines if "train_loss" in line]
    np.testing.assert_allclose(reported, [np.mean(losses[:4]), np.mean(losses[4:])], rtol=1e-5)


def test_fit_leaves_the_parameters_it_is_given_alone(params):
    before = jax.tree.map(np.array, params)
    training.fit(CONFIG, dataclasses.replace(TRAIN, steps=3), Counting(), params=params)
    chex.assert_trees_all_equal(params, before)


def test_ctrl_c_keeps_what_was_reached_and_gives_the_handler_back():
    handler = signal.getsignal(signal.SIGINT)

    def report(line):
        if line.get("step") == 4:
            signal.raise_signal(signal.SIGINT)

    result = training.fit(CONFIG, TRAIN, Counting(), report=report)
    assert result.interrupted
    assert result.step == 5  # the step that was under way
    assert result.metrics[-1]["step"] == 5
    assert signal.getsignal(signal.SIGINT) is handler
    with training.loop.stop_on_interrupt() as stopped:
        signal.raise_signal(signal.SIGINT)
        assert stopped.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_loss_that_is_not_finite_stops_the_run_at_its_step(params):
    class Broken(Counting):
        def training_batch(self, seed, step, batch_size):
            batch = super().training_batch(seed, step, batch_size)
            return batch._replace(targets=batch.targets + 7 * (step == 5))

    with pytest.raises(FloatingPointError, match="the training loss is nan at step 6; try a learning rate below 0.001"):
        training.fit(CONFIG, TRAIN, Broken(), params=params)


def test_a_source_that_does_not_fit_the_model_is_refused():
    with pytest.raises(ValueError, match="7 different ids, more than vocab_size=5"):
        training.fit(dataclasses.replace(CONFIG, vocab_size=5), TRAIN, Counting())
    with pytest.raises(ValueError, match="sequences have 11 tokens, more than n_positions=10"):
        training.fit(dataclasses.replace(CONFIG, n_positions=10), TRAIN, Counting())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch_size": -1}, "batch_size must be at least 1, got -1"),
        ({"lr": -1.0}, "lr must not be negative"),
        ({"warmup_steps": 2000}, "warmup_steps must be below steps, got warmup_steps=2000 and steps=2000"),
        ({"min_lr": 1.0}, "min_lr must not be above lr, got min_lr=1.0 and lr=0.001"),
        ({"beta2": 1.0}, "beta2 must be at least 0 and below 1, got 1.0"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        training.TrainConfig(**change)


@pytest.mark.parametrize("options", [{"compute_dtype": "bfloat16"}, {"remat": True}, {"layers": "scan"}])
def test_training_options_reach_the_model(options, params):
    train = dataclasses.replace(TRAIN, steps=3, **options)
    plain = training.fit(CONFIG, dataclasses.replace(TRAIN, steps=3), Counting(), params=params)
    result = training.fit(CONFIG, train, Counting(), params=params)
    loss, reference = (r.metrics[-1]["val_loss"] for r in (result, plain))
    assert abs(loss - reference) < 0.02
    assert ("compute_dtype" in options) == (loss != pytest.approx(reference, abs=1e-5))
    chex.assert_tree_all_finite(result.params)
    assert result.params["wte"].dtype == jnp.float32
