"""How good a model is: its loss on held-out batches, and how many questions it answers right."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from flax_gpt.config import GPTConfig
from flax_gpt.data.source import Batch
from flax_gpt.forward import Params, forward
from flax_gpt.training.loss import next_token_loss


def evaluate(config: GPTConfig, params: Params, batches: Iterable[Batch], **options: Any) -> dict[str, float]:
    """Mean loss and accuracy over the scored targets of all batches together, dropout off.

    Args:
        config, params: the model.
        batches: such as a source's `validation_batches`; those of one shape compile once.
        options: keyword arguments of `flax_gpt.forward` (hashable).

    Returns:
        {"loss": nats a token, "accuracy": a share, "scored": the number of targets}.

    Raises:
        ValueError: nothing was scored.
    """
    loss = accuracy = scored = 0.0
    frozen = tuple(sorted(options.items()))
    for batch in batches:
        of_batch = jax.device_get(_evaluate_batch(config, params, batch, frozen))
        loss += float(of_batch["loss"]) * float(of_batch["scored"])
        accuracy += float(of_batch["accuracy"]) * float(of_batch["scored"])
        scored += float(of_batch["scored"])
    if not scored:
        raise ValueError("the batches to evaluate score no target")
    return {"loss": loss / scored, "accuracy": accuracy / scored, "scored": scored}


@functools.partial(jax.jit, static_argnames=("config", "options"))
def _evaluate_batch(
    config: GPTConfig, params: Params, batch: Batch, options: tuple[tuple[str, Any], ...]
) -> dict[str, Array]:
    loss, metrics = next_token_loss(config, params, batch, **dict(options))
    return {"loss": loss, **metrics}


def exam_score(
    config: GPTConfig,
    params: Params,
    prompts: Int[np.ndarray, "n t"],
    answers: Int[np.ndarray, "n answer"],
    **options: Any,
) -> int:
    """How many prompts a model continues, token by token and greedily, with exactly their answers.

    Greedy continuation equals the answer just when every token of it is the most likely one given the prompt and the
    answer so far; so one forward pass over prompt and answer together tells.
    """
    x = np.concatenate([prompts, answers], axis=1)
    logits = forward(config, params, x[:, :-1], **options)
    guesses = jnp.argmax(logits[:, prompts.shape[1] - 1 :], axis=-1)
    return int(jnp.sum(jnp.all(guesses == answers, axis=1)))
