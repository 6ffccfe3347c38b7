"""The training loss: mean negative log-likelihood of the targets that are scored."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flax_gpt import ops
from flax_gpt.config import GPTConfig
from flax_gpt.data.source import Batch
from flax_gpt.forward import Params, forward

# 256 MB in float32. On a CPU smaller chunks cost time: each reads and writes the gradient of the whole table.
_LOGITS_AT_ONCE = 1 << 26


def next_token_loss(
    config: GPTConfig, params: Params, batch: Batch, *, loss_chunk: int | None = None, **options: Any
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Loss of a batch: sum of -log p(target) over the scored positions, divided by their number, in nats.

    Args:
        config, params: the model.
        batch: tokens, targets and which of them are scored. What a target is where it is not scored does not matter.
        loss_chunk: positions of each sequence whose logits are held at once (see `ops.chunked_cross_entropy`); the
            length of the sequence or more is all of them, the plain way. None is the plain way where the logits have at
            most 2^26 entries, and the largest power of two within that where they have more.
        options: keyword arguments of `flax_gpt.forward`, such as dropout_key or compute_dtype.

    Returns:
        The loss, float32, and {"accuracy": share of the scored targets that have the largest logit, "scored": their
        number}. All are 0 where nothing is scored.
    """
    total, right, count = summed_loss(config, params, batch, loss_chunk=loss_chunk, **options)
    scored = jnp.maximum(count, 1)
    return total / scored, {"accuracy": right / scored, "scored": count}


def summed_loss(
    config: GPTConfig, params: Params, batch: Batch, *, loss_chunk: int | None = None, **options: Any
) -> tuple[Float[Array, ""], Int[Array, ""], Float[Array, ""]]:
    """What `next_token_loss` divides: the sum of -log p(target) over what is scored, how many are right, how many."""
    b, t = batch.tokens.shape
    scored, targets = jnp.asarray(batch.scored), jnp.asarray(batch.targets)
    count = jnp.sum(scored, dtype=jnp.float32)
    if loss_chunk is None:
        loss_chunk = _chunk_size(b, t, config.vocab_size)
    if loss_chunk < t:
        # The logits are not used, and so they are not computed.
        _, acts = forward(config, params, batch.tokens, segment_ids=batch.segment_ids, capture=("ln_f",), **options)
        table = params["wte"] if config.tie_word_embeddings else params["head"]["kernel"].T
        total, right = ops.chunked_cross_entropy(acts["ln_f"], table, targets, scored, loss_chunk)
        return total, right, count
    logits = forward(config, params, batch.tokens, segment_ids=batch.segment_ids, **options)
    losses = jnp.where(scored, ops.cross_entropy(logits, targets), 0)
    return jnp.sum(losses), jnp.sum(scored & ops.is_largest(logits, targets)), count


def _chunk_size(b: int, t: int, v: int) -> int:
    """The largest power of two of positions whose logits are few enough, or all t."""
    if b * t * v <= _LOGITS_AT_ONCE:
        return t
    return 1 << (max(_LOGITS_AT_ONCE // (b * v), 1).bit_length() - 1)
