"""What the tests of training share: a task that any model learns within a few steps, and a small model for it."""

import dataclasses

import numpy as np
from tiny import NO_DROPOUT, random_params

import flax_gpt as fg
from flax_gpt import data, training

CONFIG = fg.GPTConfig(vocab_size=7, n_positions=11, n_embd=10, n_layer=1, n_head=2, **NO_DROPOUT)
DROPOUT = dataclasses.replace(CONFIG, embd_pdrop=0.1, attn_pdrop=0.2, resid_pdrop=0.3)
TRAIN = training.TrainConfig(steps=12, batch_size=5, warmup_steps=2, log_every=4, eval_every=6, eval_batches=1)

# Random in every leaf: fresh biases are all 0, which hides what is done to them.
PARAMS = random_params(CONFIG)


class Counting:
    """The next number, modulo 7."""

    vocab_size, t, optimum = 7, 11, 0.0

    def training_batch(self, seed, step, batch_size):
        first = np.random.default_rng((seed, step)).integers(7, size=(batch_size, 1))
        x = (first + np.arange(self.t + 1)) % 7
        return data.Batch(x[:, :-1], x[:, 1:], np.ones((batch_size, self.t), bool))

    def validation_batches(self, batch_size, limit=None):
        for step in range(limit or 3):
            yield self.training_batch(99, step, batch_size)
