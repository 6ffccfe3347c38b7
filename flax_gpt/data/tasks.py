"""Toy tasks: endless sequences from a key, with a best possible loss that is known.

A task is a frozen dataclass, so it can be a static argument of `jax.jit`, and its `batch` is a pure function of
(key, batch_size). Losses are in nats a scored token.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from flax_gpt.data.source import Batch


class Task(abc.ABC):
    """A source of batches with a known optimum."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of ids in its sequences."""

    @property
    @abc.abstractmethod
    def t(self) -> int:
        """Length of its sequences."""

    @property
    def optimum(self) -> float:
        """Expected loss of the best possible predictor; 0 where every scored token can be known for sure."""
        return 0.0

    @abc.abstractmethod
    def batch(self, key: Key[Array, ""], batch_size: int) -> Batch:
        """Sequences to train on."""

    def validation_batch(self, key: Key[Array, ""], batch_size: int) -> Batch:
        """Sequences to validate with: fresh ones, or of a part that `batch` never draws from."""
        return self.batch(key, batch_size)

    def training_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """`batch`, from a key made of seed and step."""
        return _jitted_batch(self, jax.random.key(seed), step, batch_size, validation=False)

    def validation_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """2048 sequences, or `limit` batches of them, the same at every call; never a training run's own keys."""
        n = -(-2048 // batch_size)
        for index in range(n if limit is None else min(limit, n)):
            yield _jitted_batch(self, jax.random.key(0), index, batch_size, validation=True)

    def best_loss(self, batch: Batch) -> float:
        """Loss of the best possible predictor on this very batch; it differs from `optimum` by sampling error."""
        del batch
        return self.optimum

    def exam(self) -> tuple[Int[np.ndarray, "n t"], Int[np.ndarray, "n answer"]] | None:
        """Prompts, and the continuations that a model which has solved the task writes greedily, where it has any."""
        return None


@dataclasses.dataclass(frozen=True)
class Sort(Task):
    """Digits, then the same digits sorted: "2 0 1 0 | 0 0 1 2". Scored from the first sorted one on.

    Attributes:
        length: how many digits.
        digits: how many different ones.
    """

    length: int = 6
    digits: int = 3

    def __post_init__(self) -> None:
        _at_least_one(self)

    @property
    def vocab_size(self) -> int:
        """The digits."""
        return self.digits

    @property
    def t(self) -> int:
        """Both halves, less the last digit, which is only ever a target."""
        return 2 * self.length - 1

    def batch(self, key: Key[Array, ""], batch_size: int) -> Batch:
        """Digits drawn uniformly."""
        x = jax.random.randint(key, (batch_size, self.length), 0, self.digits)
        return _next_token_batch(
            jnp.concatenate([x, jnp.sort(x, axis=1)], axis=1), jnp.arange(self.t) >= self.length - 1
        )

    def exam(self) -> tuple[Int[np.ndarray, "n t"], Int[np.ndarray, "n answer"]]:
        """Every possible input (729 by default) and its digits sorted; a random 4096 of them where there are more."""
        if self.digits**self.length <= 4096:
            x = np.array(list(itertools.product(range(self.digits), repeat=self.length)))
        else:
            x = np.random.default_rng(0).integers(self.digits, size=(4096, self.length))
        return x, np.sort(x, axis=1)


@dataclasses.dataclass(frozen=True)
class Induction(Task):
    """A block of distinct random tokens, repeated; its length is random too, so that position does not give it away.

    Scored from the second token of the first repetition on, where what followed this token before is sure to follow.
    One attention layer cannot do it; two can, by an induction head (Olsson et al. 2022, arXiv 2209.11895).

    Attributes:
        vocab_size: tokens to draw the block from.
        t: length of a sequence.
        shortest, longest: bounds of the block's length, both included.
    """

    vocab_size: int = 64
    t: int = 64
    shortest: int = 8
    longest: int = 31

    def __post_init__(self) -> None:
        _at_least_one(self)
        if not self.shortest <= self.longest < min(self.t, self.vocab_size + 1):
            raise ValueError(
                f"the block's length must be bounded by shortest <= longest <= vocab_size and longest < t, got {self}"
            )

    def batch(self, key: Key[Array, ""], batch_size: int) -> Batch:
        """Blocks and lengths drawn uniformly."""
        block_key, length_key = jax.random.split(key)
        rows = jnp.broadcast_to(jnp.arange(self.vocab_size), (batch_size, self.vocab_size))
        block = jax.random.permutation(block_key, rows, axis=1, independent=True)
        length = jax.random.randint(length_key, (batch_size, 1), self.shortest, self.longest + 1)
        x = jnp.take_along_axis(block, jnp.arange(self.t + 1) % length, axis=1)
        return _next_token_batch(x, jnp.arange(self.t) >= length)


@dataclasses.dataclass(frozen=True)
class AssociativeRecall(Task):
    """Pairs of key and value, then the keys again in another order, each to be answered with its value.

    Arora et al. 2023 (arXiv 2312.04927), section 4 (multi-query associative recall). GPT-2's init of 0.02 does not
    learn it at width 64: give an initializer_range of 1/sqrt(n_embd).

    Attributes:
        vocab_size: keys are drawn, without repetition, from the lower half of the ids, values from the upper.
        pairs: how many of them.
    """

    vocab_size: int = 128
    pairs: int = 8

    def __post_init__(self) -> None:
        _at_least_one(self)
        if self.pairs > self.vocab_size // 2:
            raise ValueError(
                f"{self.pairs} pairs need a vocab_size of at least {2 * self.pairs}, got {self.vocab_size}"
            )

    @property
    def t(self) -> int:
        """Pairs, queries and answers, less the last answer."""
        return 4 * self.pairs - 1

    def batch(self, key: Key[Array, ""], batch_size: int) -> Batch:
        """Pairs and the order of the queries drawn uniformly."""
        half, shape = self.vocab_size // 2, (batch_size, self.pairs)
        key_key, value_key, order_key = jax.random.split(key, 3)
        rows = jnp.broadcast_to(jnp.arange(half), (batch_size, half))
        keys = jax.random.permutation(key_key, rows, axis=1, independent=True)[:, : self.pairs]
        values = jax.random.randint(value_key, shape, half, self.vocab_size)
        order = jax.random.permutation(
            order_key, jnp.broadcast_to(jnp.arange(self.pairs), shape), axis=1, independent=True
        )
        pairs = jnp.stack([keys, values], axis=2)
        asked = jnp.take_along_axis(pairs, order[:, :, None], axis=1)
        x = jnp.concatenate([pairs, asked], axis=1).reshape(batch_size, 4 * self.pairs)
        index = jnp.arange(self.t)
        return _next_token_batch(x, (index >= 2 * self.pairs) & (index % 2 == 0))


@dataclasses.dataclass(frozen=True)
class ModularAddition(Task):
    """a, b, "=" -> (a + b) mod p, learnt from some of the pairs and validated on the others.

    Power et al. 2022 (arXiv 2201.02177): a network that knows the training pairs by heart may find the rule much later.

    Attributes:
        p: the modulus; ids below p are numbers, id p is "=".
        train_fraction: of the p * p pairs to train on.
    """

    p: int = 59
    train_fraction: float = 0.5

    def __post_init__(self) -> None:
        _at_least_one(self)
        if not 1 <= int(self.p**2 * self.train_fraction) < self.p**2:
            raise ValueError(f"train_fraction must leave pairs on both sides of the split, got {self}")

    @property
    def vocab_size(self) -> int:
        """The numbers and "="."""
        return self.p + 1

    @property
    def t(self) -> int:
        """a, b and "="."""
        return 3

    def training_set(self) -> Batch:
        """All pairs to train on."""
        return self._equations(_shuffled(self.p**2)[: self._n_train])

    def validation_set(self) -> Batch:
        """All other pairs."""
        return self._equations(_shuffled(self.p**2)[self._n_train :])

    def batch(self, key: Key[Array, ""], batch_size: int) -> Batch:
        """Equations drawn from the training set."""
        return _draw(key, batch_size, self.training_set())

    def validation_batch(self, key: Key[Array, ""], batch_size: int) -> Batch:
        """Equations drawn from the validation set."""
        return _draw(key, batch_size, self.validation_set())

    def exam(self) -> tuple[Int[np.ndarray, "n t"], Int[np.ndarray, "n answer"]]:
        """The validation set as questions and answers."""
        batch = self.validation_set()
        return np.asarray(batch.tokens), np.asarray(batch.targets[:, -1:])

    @property
    def _n_train(self) -> int:
        return int(self.p**2 * self.train_fraction)

    def _equations(self, pair: np.ndarray) -> Batch:
        a, b = pair // self.p, pair % self.p
        x = np.stack([a, b, np.full_like(a, self.p), (a + b) % self.p], axis=1).astype(np.int32)
        return Batch(x[:, :-1], x[:, 1:], np.broadcast_to(np.arange(self.t) == 2, (len(pair), self.t)))


@dataclasses.dataclass(frozen=True)
class MarkovChain(Task):
    """A random Markov chain: nothing to find out but the probabilities, so the optimum is its entropy rate.

    Attributes:
        states: number of states, the vocabulary.
        t: length of a sequence, which starts in the stationary distribution.
        seed: of the transition matrix: softmax of independent N(0, 1.5) in each row.
    """

    states: int = 16
    t: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least_one(self)

    @property
    def vocab_size(self) -> int:
        """The states."""
        return self.states

    @property
    def transitions(self) -> Float[np.ndarray, "v v"]:
        """Probability of the next state (column) given this one (row), float64."""
        return _markov_chain(self.states, self.seed)[0]

    @property
    def stationary(self) -> Float[np.ndarray, " v"]:
        """The distribution that the chain keeps, float64."""
        return _markov_chain(self.states, self.seed)[1]

    @property
    def optimum(self) -> float:
        """Entropy rate, -sum_i stationary_i sum_j P_ij ln P_ij."""
        return float(-np.sum(self.stationary[:, None] * self.transitions * np.log(self.transitions)))

    def batch(self, key: Key[Array, ""], batch_size: int) -> Batch:
        """Runs of the chain."""
        first_key, walk_key = jax.random.split(key)
        log_p = jnp.log(jnp.asarray(self.transitions, jnp.float32))
        first = jax.random.categorical(
            first_key, jnp.log(jnp.asarray(self.stationary, jnp.float32)), shape=(batch_size,)
        )

        def step(state: Array, key: Array) -> tuple[Array, Array]:
            following = jax.random.categorical(key, log_p[state])
            return following, following

        _, rest = jax.lax.scan(step, first, jax.random.split(walk_key, self.t))
        return _next_token_batch(jnp.concatenate([first[:, None], rest.T], axis=1), jnp.ones(self.t, bool))

    def training_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """`batch`, from a key made of seed and step."""
        return _jitted_batch(self, jax.random.key(seed), step, batch_size, validation=False)

    def validation_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """2048 sequences, or `limit` batches of them, the same at every call; never a training run's own keys."""
        n = -(-2048 // batch_size)
        for index in range(n if limit is None else min(limit, n)):
            yield _jitted_batch(self, jax.random.key(0), index, batch_size, validation=True)

    def best_loss(self, batch: Batch) -> float:
        """Mean of -ln P[token, target] over the batch: what the true probabilities give."""
        nll = -np.log(self.transitions)[np.asarray(batch.tokens), np.asarray(batch.targets)]
        return float(nll[np.asarray(batch.scored)].mean())


# By the names that `flax-gpt train --task` knows.
TASKS: dict[str, type[Task]] = {
    "sort": Sort,
    "induction": Induction,
    "recall": AssociativeRecall,
    "addition": ModularAddition,
    "markov": MarkovChain,
}


@functools.partial(jax.jit, static_argnames=("task", "batch_size", "validation"))
def _jitted_batch(
    task: Task, key: Key[Array, ""], step: Int[Array, ""] | int, batch_size: int, validation: bool
) -> Batch:
    # Two folds, of which the first tells training from validation, whatever the seeds.
    key = jax.random.fold_in(jax.random.fold_in(key, validation), step)
    return (task.validation_batch if validation else task.batch)(key, batch_size)


def _at_least_one(task: Task) -> None:
    for field in dataclasses.fields(task):  # type: ignore[arg-type]
        if field.type == "int" and field.name != "seed" and getattr(task, field.name) < 1:
            raise ValueError(f"{field.name} must be at least 1, got {task}")


def _next_token_batch(x: Int[Array, "b _"], scored: Array) -> Batch:
    """Each token's target is the next one; `scored` broadcasts to the inputs' shape."""
    x = x.astype(jnp.int32)
    return Batch(x[:, :-1], x[:, 1:], jnp.broadcast_to(scored, (x.shape[0], x.shape[1] - 1)))


def _draw(key: Key[Array, ""], batch_size: int, rows: Batch) -> Batch:
    index = jax.random.randint(key, (batch_size,), 0, len(rows.tokens))
    return jax.tree.map(lambda column: jnp.asarray(column)[index], rows)


@functools.lru_cache(maxsize=8)
def _shuffled(n: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(n)


@functools.lru_cache(maxsize=8)
def _markov_chain(states: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    weights = np.exp(np.random.default_rng(seed).normal(0, 1.5, size=(states, states)))
    transitions = weights / weights.sum(axis=1, keepdims=True)
    stationary = np.full(states, 1 / states)
    for _ in range(1000):  # every entry is positive, so this converges geometrically
        stationary = stationary @ transitions
    return transitions, stationary / stationary.sum()
