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
from flax_gpt.training.loss import summed_loss


class TrainState(NamedTuple):
    """All that changes in a training run, and the key that does not.

    Attributes:
        step: number of batches seen.
        params: of the model.
        opt_state: of the optimizer.
        dropout_key: each step folds its number into it; None trains without dropout.
        skipped: how many steps changed nothing, because their loss or gradient was not finite.
        average: exponential moving average of the parameters, where one is kept.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: PyTree
    dropout_key: Key[Array, ""] | None
    skipped: Int[Array, ""]
    average: Params | None = None

    @property
    def trained(self) -> Params:
        """The parameters to evaluate and to keep: their moving average where there is one."""
        return self.params if self.average is None else self.average


Metrics = dict[str, Array]  # of scalars


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    dropout_key: Key[Array, ""] | None = None,
    average: bool = False,
) -> TrainState:
    """The state before the first update; with `average`, one that keeps a moving average, at first the parameters."""
    zero = jnp.zeros((), jnp.int32)
    copy = jax.tree.map(lambda x: x.copy(), params) if average else None
    return TrainState(zero, params, optimizer.init(params), dropout_key, zero.copy(), copy)


def train_step(
    config: GPTConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Batch,
    *,
    micro_batches: int = 1,
    ema_decay: float | None = None,
    **options: Any,
) -> tuple[TrainState, Metrics]:
    """One update of the parameters: loss, gradient, optimizer. Pure; jit it, vmap it, or use `make_train_step`.

    Args:
        config: the model; its dropout rates apply.
        optimizer: from `make_optimizer`, or any optax transformation.
        state: before the update.
        batch: what to learn from.
        micro_batches: equal parts that the batch is computed in, one after the other. The result is that of the whole
            batch (but for dropout's draws), however unequal the numbers of scored targets.
        ema_decay: of the state's average, where it keeps one.
        options: keyword arguments of `next_token_loss` and `flax_gpt.forward`, such as compute_dtype and block.

    Returns:
        The state after it, and the step's metrics: loss, accuracy, scored (see `next_token_loss`), skipped (see
        `TrainState`), and the global norms grad_norm (before clipping), update_norm (learning rate included) and
        param_norm, each also by group of parameters, as in "grad_norm/attn". All but update_norm and skipped are those
        of the parameters before the update. A step whose loss or gradient is not finite only counts as skipped.

    Raises:
        ValueError: a dropout rate is above 0 and the state has no dropout key; the batch cannot be divided into so many
            parts; there is an average and no ema_decay, or the reverse.
    """
    rates = (config.embd_pdrop, config.attn_pdrop, config.resid_pdrop)
    if state.dropout_key is None and any(rates):
        raise ValueError(
            f"the config's dropout rates are {rates} and the state has no dropout_key: give one to init_state, or set "
            "embd_pdrop, attn_pdrop and resid_pdrop to 0"
        )
    if (state.average is None) != (ema_decay is None):
        raise ValueError(
            f"ema_decay is {ema_decay} and the state keeps {'no' if state.average is None else 'an'} average: give "
            "init_state average=True and the step an ema_decay, or neither"
        )
    key = None if state.dropout_key is None else jax.random.fold_in(state.dropout_key, state.step)
    (loss, metrics), grads = _loss_and_gradient(config, state.params, batch, key, micro_batches, options)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if average is not None and ema_decay is not None:
        average = jax.tree.map(lambda old, new: ema_decay * old + (1 - ema_decay) * new, average, params)

    norms = {
        **norms_by_group("grad_norm", grads),
        **norms_by_group("update_norm", updates),
        **norms_by_group("param_norm", state.params),
    }
    finite = jnp.isfinite(loss) & jnp.isfinite(norms["grad_norm"])
    params, opt_state, average = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (params, opt_state, average),
        (state.params, state.opt_state, state.average),
    )
    skipped = state.skipped + ~finite
    metrics = {"loss": loss, **metrics, "skipped": skipped, **norms}
    return TrainState(state.step + 1, params, opt_state, state.dropout_key, skipped, average), metrics


def _loss_and_gradient(
    config: GPTConfig, params: Params, batch: Batch, key: Array | None, micro_batches: int, options: dict[str, Any]
) -> tuple[tuple[Array, Metrics], Params]:
    """Loss, metrics and gradient of a batch, computed in so many parts."""
    count = jnp.sum(batch.scored, dtype=jnp.float32)
    # Dividing by the whole batch's number makes the parts' losses, and so their gradients, add up to the batch's.
    scored = jnp.maximum(count, 1)

    def part(params: Params, batch: Batch, key: Array | None) -> tuple[Array, Array]:
        total, right, _ = summed_loss(config, params, batch, dropout_key=key, **options)
        return total / scored, right

    gradient_of = jax.value_and_grad(part, has_aux=True)
    if micro_batches == 1:
        (loss, right), grads = gradient_of(params, batch, key)
    else:
        b = batch.tokens.shape[0]
        if micro_batches < 1 or b % micro_batches:
            raise ValueError(f"a batch of {b} sequences cannot be divided into {micro_batches} micro-batches")
        parts = jax.tree.map(lambda x: jnp.reshape(x, (micro_batches, b // micro_batches, *x.shape[1:])), batch)
        keys = None if key is None else jax.random.split(key, micro_batches)

        def add(sums: Any, inputs: tuple[Batch, Array | None]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, gradient_of(params, *inputs)), None

        of_one_part = jax.eval_shape(gradient_of, params, *jax.tree.map(lambda x: x[0], (parts, keys)))
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), of_one_part)
        ((loss, right), grads), _ = jax.lax.scan(add, nothing, (parts, keys))
    return (loss, {"accuracy": right / scored, "scored": count}), grads


def norms_by_group(name: str, tree: Params) -> dict[str, Float[Array, ""]]:
    """{name: the global norm of a tree of parameters' form, name/group: that of each group in it}.

    The groups are the parts of a block, all layers together, as "attn" and "mlp", and what stands beside the blocks,
    as "wte" and "ln_f".
    """
    squares: dict[str, Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = [entry.key for entry in path]
        group = keys[1] if keys[0] == "blocks" else keys[0]
        squares[group] = squares.get(group, jnp.zeros(())) + jnp.sum(jnp.square(leaf))
    return {
        name: jnp.sqrt(sum(squares.values(), jnp.zeros(()))),
        **{f"{name}/{group}": jnp.sqrt(square) for group, square in squares.items()},
    }


def make_train_step(
    config: GPTConfig, optimizer: optax.GradientTransformation, **options: Any
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """`train_step`, compiled. The state that goes in is donated: its arrays become those that come out."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return train_step(config, optimizer, state, batch, **options)

    return jax.jit(step, donate_argnums=0)
