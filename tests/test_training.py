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
from counting import CONFIG, DROPOUT, TRAIN, Counting

import flax_gpt as fg
from flax_gpt import data, training


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
    groups = ("", "/wte", "/wpe", "/ln_1", "/attn", "/ln_2", "/mlp", "/ln_f")
    assert set(trained[0]) == {
        "step", "train_loss", "learning_rate", "skipped", "tokens_per_second", "flops_per_second", "seconds",
        *(f"{norm}_norm{group}" for norm in ("grad", "update", "param") for group in groups),
    }  # fmt: skip
    for line in trained:
        assert line["skipped"] == 0
        assert line["tokens_per_second"] > 0
        flops = 3 * fg.count_flops(CONFIG, 11) / 11
        np.testing.assert_allclose(line["flops_per_second"], flops * line["tokens_per_second"])
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


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_was_reached_and_the_handlers_come_back(asked):
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def report(line):
        if line.get("step") == 4:
            signal.raise_signal(asked)

    result = training.fit(CONFIG, TRAIN, Counting(), report=report)
    assert result.interrupted == asked
    assert result.step == 5  # the step that was under way
    assert result.metrics[-1]["step"] == 5
    assert {signum: signal.getsignal(signum) for signum in handlers} == handlers
    with training.loop.stop_on_signal() as stopped:
        signal.raise_signal(asked)
        assert stopped.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(asked)


def test_steps_that_are_not_finite_are_skipped_and_too_many_stop_the_run(params):
    class Broken(Counting):
        def training_batch(self, seed, step, batch_size):
            batch = super().training_batch(seed, step, batch_size)
            return batch._replace(targets=batch.targets + 7 * (step in (5, 6, 9)))

    tolerant = dataclasses.replace(TRAIN, max_skipped=3)
    result = training.fit(CONFIG, tolerant, Broken(), params=params)
    lines = [line for line in result.metrics if "train_loss" in line]
    assert [line["skipped"] for line in lines] == [0, 2, 3]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    schedule = training.learning_rate_schedule(tolerant)
    np.testing.assert_allclose(lines[-1]["learning_rate"], schedule(12 - 1 - 3), rtol=1e-6)
    chex.assert_tree_all_finite(result.params)
    strict = dataclasses.replace(TRAIN, max_skipped=1)
    with pytest.raises(
        FloatingPointError, match="2 steps were skipped .* max_skipped=1; the loss is nan .* at step 6; try a learning"
    ):
        training.fit(CONFIG, strict, Broken(), params=params)


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
        ({"micro_batches": 5}, "multiple of micro_batches, got batch_size=12 and micro_batches=5"),
        ({"ema_decay": 1.0}, "ema_decay must be None or between 0 and 1, got 1.0"),
        ({"loss_chunk": 0}, "loss_chunk must be None or at least 1, got 0"),
        ({"max_skipped": -1}, "max_skipped must not be negative, got -1"),
        ({"optimizer": "sgd"}, "optimizer must be one of adamw, lion, muon, got 'sgd'"),
        ({"schedule": "step"}, "schedule must be one of cosine, linear, trapezoid, constant, got 'step'"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        training.TrainConfig(**change)


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": "bfloat16"},
        pytest.param({"remat": True, "layers": "scan", "loss_chunk": 4, "micro_batches": 5}, marks=pytest.mark.slow),
    ],
)
def test_training_options_reach_the_model(options, params):
    train = dataclasses.replace(TRAIN, steps=3, **options)
    plain = training.fit(CONFIG, dataclasses.replace(TRAIN, steps=3), Counting(), params=params)
    result = training.fit(CONFIG, train, Counting(), params=params)
    loss, reference = (r.metrics[-1]["val_loss"] for r in (result, plain))
    assert abs(loss - reference) < 0.02
    assert ("compute_dtype" in options) == (loss != pytest.approx(reference, abs=1e-5))
    chex.assert_tree_all_finite(result.params)
    assert result.params["wte"].dtype == jnp.float32


@pytest.mark.slow
def test_a_moving_average_is_what_is_evaluated_and_returned(params):
    train = dataclasses.replace(TRAIN, ema_decay=0.75, steps=3, lr=0.05)
    plain = training.fit(CONFIG, dataclasses.replace(train, ema_decay=None), Counting(), params=params)
    result = training.fit(CONFIG, train, Counting(), params=params)
    chex.assert_trees_all_close(result.state.params, plain.params, rtol=1e-6)
    assert result.params is result.state.average
    loss = training.evaluate(CONFIG, result.params, Counting().validation_batches(64))["loss"]
    np.testing.assert_allclose(result.metrics[-1]["val_loss"], loss, rtol=1e-6)
    assert not np.allclose(loss, plain.metrics[-1]["val_loss"])
