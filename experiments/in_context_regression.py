"""Does a transformer learn least squares from examples in its context?

    python experiments/in_context_regression.py

Garg et al. 2022 (arXiv 2208.01066), in a short setting: x and the weights w drawn from N(0, I) in 3 dimensions,
sequences x_1, y_1, x_2, y_2, ... with y = w . x, and at every x a prediction of its y. After k examples least squares
errs by max(0, 1 - k / d) of the variance on average. The model: flax_gpt's blocks (3 layers, 64 wide, 4 heads) between
a linear map in and one out.

On two cores of an Intel Xeon at 2.0 GHz, 4 minutes: after 0, 1, 2 and 3 examples the model errs by 1.06, .68, .42 and
.22 (least squares 1.06, .67, .35 and 0), and by .06 after nine. It follows least squares and, in 5000 steps, does not
reach it.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import parser, save
from matplotlib.figure import Figure

import flax_gpt as fg
from flax_gpt.cli import keep_freed_memory
from flax_gpt.model import LayerNorm

D, EXAMPLES, BATCH = 3, 10, 64
EVERY = 100  # steps in one compiled program


class Regressor(nn.Module):
    """GPT-2's blocks on numbers: [b, 2 n, d + 1] -> [b, 2 n]."""

    config: fg.GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """A number at every place; those at the places of x are the predictions."""
        width = self.config.n_embd
        positions = self.param("positions", nn.initializers.normal(0.02), (self.config.n_positions, width))
        y = nn.Dense(width, name="read_in")(x) + positions[: x.shape[1]]
        for layer in range(self.config.n_layer):
            y = fg.Block(self.config, name=f"block_{layer}")(y)
        return nn.Dense(1, name="read_out")(LayerNorm(self.config, name="ln_f")(y))[..., 0]


def sequences(key: jax.Array, batch: int, examples: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the model reads [b, 2 n, d + 1], x [b, n, d], and y [b, n]."""
    x_key, w_key = jax.random.split(key)
    x = jax.random.normal(x_key, (batch, examples, D))
    y = jnp.einsum("bnd,bd->bn", x, jax.random.normal(w_key, (batch, D)))
    questions = jnp.pad(x, ((0, 0), (0, 0), (0, 1)))
    answers = jnp.pad(y[..., None], ((0, 0), (0, 0), (D, 0)))
    return jnp.stack([questions, answers], axis=2).reshape(batch, 2 * examples, D + 1), x, y


def errors(model: Regressor, params: Any, key: jax.Array, batch: int, examples: int) -> jax.Array:
    """Squared error over d after 0, 1, ... examples, [n]."""
    rows, _, y = sequences(key, batch, examples)
    predicted = model.apply({"params": params}, rows)[:, ::2]
    return jnp.mean(jnp.square(predicted - y), axis=0) / D


def least_squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Squared error over d of the shortest least-squares solution after 0, 1, ... examples, [n]; float64."""
    found = np.zeros(y.shape)
    for k in range(y.shape[1]):
        w = np.einsum("bdn,bn->bd", np.linalg.pinv(x[:, :k]), y[:, :k])
        found[:, k] = (y[:, k] - np.einsum("bd,bd->b", x[:, k], w)) ** 2
    return found.mean(axis=0) / x.shape[2]


def train(steps: int, seed: int) -> tuple[Regressor, Any, list[float]]:
    """A model, its parameters, and the mean error every few steps."""
    config = fg.GPTConfig(1, 2 * EXAMPLES, 64, 3, 4, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    model = Regressor(config)
    params = model.init(jax.random.key(seed), jnp.zeros((1, 2 * EXAMPLES, D + 1)))["params"]
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-3, steps // 20, steps, 1e-5))
    state = optimizer.init(params)

    def loss(params: Any, key: jax.Array) -> jax.Array:
        return jnp.mean(errors(model, params, key, BATCH, EXAMPLES))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def several(params: Any, state: Any, keys: jax.Array) -> tuple[Any, Any, jax.Array]:
        def step(carry: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params, key)
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), value

        (params, state), values = jax.lax.scan(step, (params, state), keys)
        return params, state, jnp.mean(values)

    every, means = min(EVERY, steps), []
    for number in range(steps // every):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed + 1), number), every)
        params, state, mean = several(params, state, keys)
        means.append(float(mean))
    return model, params, means


def draw(curve: list[float], every: int, found: np.ndarray, best: np.ndarray) -> Figure:
    """The training curve; the error after k examples beside that of least squares."""
    figure = Figure(figsize=(11.0, 4.3), layout="constrained")
    training, context = figure.subplots(1, 2)
    training.plot(np.arange(1, len(curve) + 1) * every, curve)
    training.axhline(best.mean(), color="gray", linestyle="--", label="least squares")
    training.set(title="Training", xlabel="step", ylabel="squared error / d, mean over the context")
    k = np.arange(len(found))
    context.plot(k, np.maximum(0, 1 - k / D), color="gray", linewidth=4, alpha=0.5, label="max(0, 1 - k/d)")
    context.plot(k, best, "k--", label="least squares, computed")
    context.plot(k, found, "o-", color="tab:orange", label="the model")
    context.set(
        title="The model follows least squares", xlabel="examples in the context, k", ylabel="squared error / d"
    )
    for axes in (training, context):
        axes.legend()
        axes.grid(alpha=0.3)
    return figure


def main(argv: list[str] | None = None) -> None:
    """Trains, compares and writes."""
    arguments = parser(__doc__, "in_context_regression")
    arguments.add_argument("--steps", type=int, default=5000)
    arguments.add_argument("--seed", type=int, default=0)
    args = arguments.parse_args(argv)
    keep_freed_memory()
    steps, rows = (10, 64) if args.smoke else (args.steps, 4096)
    start = time.perf_counter()
    model, params, curve = train(steps, args.seed)
    seconds = time.perf_counter() - start
    key = jax.random.key(args.seed + 2)
    found = np.asarray(errors(model, params, key, rows, EXAMPLES))
    _, x, y = sequences(key, rows, EXAMPLES)
    best = least_squares(np.asarray(x, np.float64), np.asarray(y, np.float64))
    print(f"{steps} steps, {seconds:.0f} s. Squared error / d after k examples:")
    for k, (ours, theirs) in enumerate(zip(found, best, strict=True)):
        print(f"  k = {k}: {ours:.3f}   least squares {theirs:.3f}   max(0, 1 - k/d) = {max(0, 1 - k / D):.3f}")
    numbers = {"errors": found.tolist(), "least_squares": best.tolist(), "steps": steps, "seconds": seconds}
    save(args.out, "in_context_regression", numbers, draw(curve, min(EVERY, steps), found, best))


if __name__ == "__main__":
    main()
