"""AdamW as GPT-2's were trained: warm-up and cosine, clipping, decay on matrices alone."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jaxtyping import PyTree

from flax_gpt.forward import Params
from flax_gpt.training.config import TrainConfig


def learning_rate_schedule(train: TrainConfig) -> optax.Schedule:
    """Learning rate as a function of the number of updates done.

    It rises linearly from lr / (warmup_steps + 1) at 0 to lr at warmup_steps, falls along half a cosine to min_lr at
    `steps`, and stays there.
    """
    return optax.warmup_cosine_decay_schedule(
        init_value=train.lr / (train.warmup_steps + 1),
        peak_value=train.lr,
        warmup_steps=train.warmup_steps,
        decay_steps=train.steps,
        end_value=train.min_lr,
    )


def decay_mask(params: Params) -> PyTree[bool]:
    """Which leaves weight decay applies to: those that are matrices within a layer, and neither bias nor scale."""

    def decays(path: tuple[Any, ...], leaf: Any) -> bool:
        keys = [entry.key for entry in path]
        axes = leaf.ndim - (keys[0] == "blocks")  # blocks are stacked on a leading axis of layers
        return axes >= 2 and keys[-1] not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(train: TrainConfig) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW (Loshchilov and Hutter, arXiv 1711.05101) on `learning_rate_schedule`."""
    return optax.chain(
        optax.clip_by_global_norm(train.clip_norm),
        optax.adamw(
            learning_rate_schedule(train),
            b1=train.beta1,
            b2=train.beta2,
            weight_decay=train.weight_decay,
            mask=decay_mask,
        ),
    )
