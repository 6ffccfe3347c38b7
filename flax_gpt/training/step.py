"""One update as a pure function, and the same compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key, PyTree

from flax_gpt.config import GPTConfig
from flax_gpt.data.source import Batch
from flax_gpt.forward import Params
from flax_gpt.training.loss import next_token_loss


class TrainState(NamedTuple):
    """All that changes in a training run, and the key that does not.

    Attributes:
        step: number of updates done.
        params: of the model.
        opt_state: of the optimizer.
        dropout_key: each step folds its number into it; None trains without dropout.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: PyTree
    dropout_key: Key[Array, ""] | None


Metrics = dict[str, Float[Array, ""]]


def init_state(
    params: Params, optimizer: optax.GradientTransformation, dropout_key: Key[Array, ""] | None = None
) -> TrainState:
    """The state before the first update."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), dropout_key)


def train_step(
    config: GPTConfig, optimizer: optax.GradientTransformation, state: TrainState, batch: Batch, **options: Any
) -> tuple[TrainState, Metrics]:
    """One update of the parameters: loss, gradient, optimizer. Pure; jit it, vmap it, or use `make_train_step`.

    Args:
        config: the model; its dropout rates apply.
        optimizer: from `make_optimizer`, or any optax transformation.
        state: before the update.
        batch: what to learn from.
        options: keyword arguments of `flax_gpt.forward`, such as compute_dtype, layers, remat and block.

    Returns:
        The state after it, and the step's metrics: loss, accuracy, scored (see `next_token_loss`) and grad_norm, the
        global norm of the gradient before clipping. All are those of the parameters before the update.

    Raises:
        ValueError: a dropout rate is above 0 and the state has no dropout key.
    """
    rates = (config.embd_pdrop, config.attn_pdrop, config.resid_pdrop)
    if state.dropout_key is None and any(rates):
        raise ValueError(
            f"the config's dropout rates are {rates} and the state has no dropout_key: give one to init_state, or set "
            "embd_pdrop, attn_pdrop and resid_pdrop to 0"
        )
    key = None if state.dropout_key is None else jax.random.fold_in(state.dropout_key, state.step)

    def loss_of(params: Params) -> tuple[Array, Metrics]:
        return next_token_loss(config, params, batch, dropout_key=key, **options)

    (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss, **metrics, "grad_norm": optax.tree.norm(grads)}
    return TrainState(state.step + 1, params, opt_state, state.dropout_key), metrics


def make_train_step(
    config: GPTConfig, optimizer: optax.GradientTransformation, **options: Any
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """`train_step`, compiled. The state that goes in is donated: its arrays become those that come out."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return train_step(config, optimizer, state, batch, **options)

    return jax.jit(step, donate_argnums=0)
