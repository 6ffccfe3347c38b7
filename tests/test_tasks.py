"""Toy tasks: every scored target is what the task says, and the optimum is what it claims."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_gpt import data

BATCH = 17


def batch_of(task, seed=0, size=BATCH):
    return data.Batch(*map(np.asarray, task.batch(jax.random.key(seed), size)))


def scored_pairs(batch, row):
    """(prefix, target) of each scored position of a row."""
    for i in np.flatnonzero(batch.scored[row]):
        yield batch.tokens[row, : i + 1].tolist(), batch.targets[row, i]


@pytest.mark.parametrize("name", data.TASKS)
def test_batches_are_next_token_pairs_within_the_vocabulary_and_a_function_of_the_key(name):
    task = data.TASKS[name]()
    batch = batch_of(task)
    assert batch.tokens.shape == batch.targets.shape == batch.scored.shape == (BATCH, task.t)
    assert batch.scored.dtype == bool
    assert batch.scored.any(axis=1).all()
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert batch.tokens.min() >= 0
    assert max(batch.tokens.max(), batch.targets.max()) < task.vocab_size
    for same, other in zip(batch, batch_of(task), strict=True):
        np.testing.assert_array_equal(same, other)
    assert not np.array_equal(batch.tokens, batch_of(task, seed=1).tokens)


@pytest.mark.parametrize("name", data.TASKS)
def test_a_source_repeats_its_batches_and_validates_on_others(name):
    task = data.TASKS[name]()
    first = task.training_batch(0, 3, BATCH)
    np.testing.assert_array_equal(first.tokens, task.training_batch(0, 3, BATCH).tokens)
    others = [task.training_batch(0, 4, BATCH), task.training_batch(1, 3, BATCH), *task.validation_batches(BATCH, 4)]
    for other in others:
        assert not np.array_equal(first.tokens, other.tokens)
    assert len(others) == 6
    assert sum(len(batch.tokens) for batch in task.validation_batches(64)) == 2048


def test_sort_targets_are_the_sorted_digits():
    task = data.Sort(length=5, digits=7)
    batch = batch_of(task)
    for row in range(BATCH):
        targets = [target for _, target in scored_pairs(batch, row)]
        assert targets == sorted(batch.tokens[row, :5])


def test_sort_exam_is_every_input():
    prompts, answers = data.Sort().exam()
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == 729
    np.testing.assert_array_equal(np.sort(prompts, axis=1), answers)
    assert len(data.Sort(length=11, digits=5).exam()[0]) == 4096


def test_induction_targets_follow_from_the_last_occurrence_of_the_token():
    batch = batch_of(data.Induction())
    periods = set()
    for row in range(BATCH):
        for prefix, target in scored_pairs(batch, row):
            earlier = max(i for i, token in enumerate(prefix[:-1]) if token == prefix[-1])
            assert prefix[earlier + 1] == target
            periods.add(len(prefix) - 1 - earlier)
        # the first token whose follower is known is scored, those before it are not
        assert batch.scored[row].sum() == 64 - (len(prefix) - 1 - earlier)
    assert len(periods) > 5
    assert min(periods) >= 8
    assert max(periods) <= 31


def test_induction_draws_both_ends_of_the_range_of_lengths():
    task = data.Induction(vocab_size=7, t=11, shortest=2, longest=4)
    lengths = task.t - batch_of(task, size=200).scored.sum(axis=1)
    assert set(lengths.tolist()) == {2, 3, 4}


def test_recall_answers_each_key_once_with_its_value():
    task = data.AssociativeRecall(vocab_size=26, pairs=5)
    batch = batch_of(task)
    orders = set()
    for row in range(BATCH):
        pairs = dict(batch.tokens[row, :10].reshape(5, 2).tolist())
        assert len(pairs) == 5
        asked = [(prefix[-1], target) for prefix, target in scored_pairs(batch, row)]
        assert all(pairs[key] == value for key, value in asked)
        assert sorted(key for key, _ in asked) == sorted(pairs)
        assert max(pairs) < 13 <= min(pairs.values())
        orders.add(tuple(list(pairs).index(key) for key, _ in asked))
    assert len(orders) > 5


def test_addition_splits_all_pairs_and_adds_them():
    task = data.ModularAddition(p=7, train_fraction=0.3)
    train, held_out = task.training_set(), task.validation_set()
    pairs = [tuple(row[:2]) for batch in (train, held_out) for row in batch.tokens.tolist()]
    assert len(train.tokens) == 14
    assert sorted(pairs) == [(a, b) for a in range(7) for b in range(7)]
    for batch in (train, held_out, batch_of(task)):
        assert (batch.tokens[:, 2] == 7).all()
        np.testing.assert_array_equal(batch.targets[:, 2], (batch.tokens[:, 0] + batch.tokens[:, 1]) % 7)
        np.testing.assert_array_equal(batch.scored, np.broadcast_to([False, False, True], batch.scored.shape))


def test_addition_never_trains_on_a_held_out_pair():
    task = data.ModularAddition(p=7, train_fraction=0.3)
    allowed = {tuple(row) for row in task.training_set().tokens.tolist()}
    seen = {tuple(row) for row in batch_of(task, size=200).tokens.tolist()}
    assert seen == allowed
    held_out = {tuple(row) for row in np.asarray(task.validation_batch(jax.random.key(0), 200).tokens).tolist()}
    assert not held_out & allowed


def test_markov_chain_is_stationary_and_its_entropy_rate_is_the_long_run_loss():
    task = data.MarkovChain(states=5, t=101)
    np.testing.assert_allclose(task.transitions.sum(axis=1), 1, atol=1e-15)
    np.testing.assert_allclose(task.stationary @ task.transitions, task.stationary, atol=1e-15)
    batch = batch_of(task, size=1000)
    nll = -np.log(task.transitions[batch.tokens, batch.targets])
    error = nll.std() / np.sqrt(nll.size)
    assert abs(task.best_loss(batch) - nll.mean()) < 1e-12
    assert abs(nll.mean() - task.optimum) < 4 * error
    first = np.bincount(batch.tokens[:, 0], minlength=5) / 1000
    np.testing.assert_allclose(first, task.stationary, atol=4 * np.sqrt(0.25 / 1000))


def test_markov_chains_of_other_seeds_differ():
    assert data.MarkovChain(seed=0).optimum != data.MarkovChain(seed=1).optimum
    assert 0 < data.MarkovChain().optimum < np.log(16)


@pytest.mark.parametrize("name", data.TASKS)
def test_every_field_of_a_task_changes_its_batches(name):
    task = data.TASKS[name]()
    changes = {"train_fraction": 0.25, "shortest": 3, "longest": 12, "t": 71, "vocab_size": 67, "seed": 2}
    for field in dataclasses.fields(task):
        value = changes.get(field.name, getattr(task, field.name) + 1)
        changed = dataclasses.replace(task, **{field.name: value})
        before, after = batch_of(task), batch_of(changed)
        assert before.tokens.shape != after.tokens.shape or not np.array_equal(before.tokens, after.tokens), field.name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: data.Sort(length=0), "length must be at least 1"),
        (lambda: data.Induction(longest=64), "shortest <= longest"),
        (lambda: data.Induction(shortest=9, longest=8), "shortest <= longest"),
        (lambda: data.Induction(vocab_size=30), "longest <= vocab_size"),
        (lambda: data.AssociativeRecall(vocab_size=15), "8 pairs need a vocab_size of at least 16, got 15"),
        (lambda: data.ModularAddition(train_fraction=1.0), "train_fraction must leave pairs"),
        (lambda: data.MarkovChain(states=0), "states must be at least 1"),
    ],
)
def test_impossible_tasks_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_batches_trace_under_jit_and_vmap():
    task = data.Sort()
    keys = jax.random.split(jax.random.key(0), 3)
    many = jax.jit(jax.vmap(lambda key: task.batch(key, 5)))(keys)
    for i in range(3):
        np.testing.assert_array_equal(many.tokens[i], task.batch(keys[i], 5).tokens)
    assert many.tokens.dtype == jnp.int32
