"""The training loss: mean negative log-likelihood of the targets that are scored."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_gpt import ops
from flax_gpt.config import GPTConfig
from flax_gpt.data.source import Batch
from flax_gpt.forward import Params, forward


def next_token_loss(
    config: GPTConfig, params: Params, batch: Batch, **options: Any
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Loss of a batch: sum of -log p(target) over the scored positions, divided by their number, in nats.

    Args:
        config, params: the model.
        batch: tokens, targets and which of them are scored. What a target is where it is not scored does not matter.
        options: keyword arguments of `flax_gpt.forward`, such as dropout_key or compute_dtype.

    Returns:
        The loss, float32, and {"accuracy": share of the scored targets that have the largest logit, "scored": their
        number}. All are 0 where nothing is scored.
    """
    logits = forward(config, params, batch.tokens, segment_ids=batch.segment_ids, **options)
    scored = jnp.asarray(batch.scored)
    targets = jnp.asarray(batch.targets)
    count = jnp.sum(scored, dtype=jnp.float32)
    losses = jnp.where(scored, ops.cross_entropy(logits, targets), 0)
    right = scored & (jnp.argmax(logits, axis=-1) == targets)
    total = jnp.maximum(count, 1)
    return jnp.sum(losses) / total, {"accuracy": jnp.sum(right) / total, "scored": count}
