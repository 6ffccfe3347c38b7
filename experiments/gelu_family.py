"""GELU, its approximations and ReLU: how far apart, with which slopes, and does it matter to a small model?

    python experiments/gelu_family.py

Hendrycks and Gimpel 2016 (arXiv 1606.08415): GELU is x Phi(x), the mean of x kept with probability Phi(x); GPT-2 has
its tanh approximation. The curves and their derivatives, where the approximations are furthest off (in float64), the
mean of the random version by drawing, and a model of 3 layers, 48 wide, trained on a small task with each as its
activation, and with none, from several seeds.

On two cores of an Intel Xeon at 2.0 GHz, 7 minutes beside another job: the tanh approximation is off by at most
4.7324e-4, at 2.699, the sigmoid one by 2.0335e-2, at 2.270. Sorting, over six seeds, ends at .0078 +- .0018 with GELU,
.0072 +- .0011 with its tanh form, .0084 +- .0012 with ReLU and .0075 +- .0009 with no activation at all: on this task
it does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import parser, save
from matplotlib.figure import Figure

import flax_gpt as fg
from flax_gpt import data, ops, training
from flax_gpt.cli import keep_freed_memory


def gelu_sigmoid(x: jax.Array) -> jax.Array:
    """The paper's other approximation, x sigmoid(1.702 x)."""
    return x * jax.nn.sigmoid(1.702 * x)


FAMILY: dict[str, Callable[[jax.Array], jax.Array]] = {
    "GELU": ops.gelu_exact,
    "GELU, tanh (GPT-2)": ops.gelu,
    "GELU, sigmoid": gelu_sigmoid,
    "ReLU": jax.nn.relu,
}
TRAINED = {"gelu": "GELU", "gelu_new": "GELU, tanh (GPT-2)", "relu": "ReLU", "linear": "none"}


def furthest_off(approximation: Callable[[jax.Array], jax.Array]) -> tuple[float, float]:
    """The largest distance from GELU, and the x >= 0 where that is; float64."""
    with jax.enable_x64(True):
        x = jnp.linspace(0.0, 8.0, 800_001, dtype=jnp.float64)
        error = jnp.abs(approximation(x) - ops.gelu_exact(x))
        at = int(jnp.argmax(error))
        return float(error[at]), float(x[at])


def mean_of_random(x: np.ndarray, draws: int, seed: int = 0) -> np.ndarray:
    """The mean of x m over draws of m, which is 1 with probability Phi(x) and else 0."""
    phi = jax.scipy.stats.norm.cdf(x)
    kept = jax.random.bernoulli(jax.random.key(seed), phi, (draws, len(x)))
    return np.asarray(jnp.mean(kept * x, axis=0))


def trained(activation: str, seeds: int, steps: int) -> tuple[list[float], int]:
    """Of each seed the last validation loss of a model with this activation; how many parameters it has."""
    task = data.Sort()
    config = fg.GPTConfig(
        task.vocab_size, task.t, 48, 3, 3, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        activation_function=activation,
    )  # fmt: skip
    options = training.TrainConfig(
        steps=steps, batch_size=64, lr=1e-3, warmup_steps=steps // 10, eval_every=steps, log_every=steps
    )
    result = training.fit_many(config, options, task, seed=range(seeds))
    return [float(row["val_loss"]) for row in result.table()], fg.count_params(config)


def draw(samples: tuple[np.ndarray, np.ndarray], losses: dict[str, list[float]]) -> Figure:
    """Curves, slopes, distances from GELU, and the losses of the trained models."""
    figure = Figure(figsize=(12.5, 8.4), layout="constrained")
    (curves, slopes), (errors, models) = figure.subplots(2, 2)
    x = jnp.linspace(-4, 4, 801)
    styles = {"GELU": "-", "GELU, tanh (GPT-2)": "--", "GELU, sigmoid": ":", "ReLU": "-."}
    for name, function in FAMILY.items():
        curves.plot(x, function(x), styles[name], label=name)
        slopes.plot(x, jax.vmap(jax.grad(function))(x), styles[name], label=name)
        if name.startswith("GELU,"):
            errors.plot(x, jnp.abs(function(x) - ops.gelu_exact(x)), styles[name], label=name)
    curves.plot(*samples, "k.", markersize=5, label="mean of the random version")
    curves.set(title="GELU is the mean of keeping x with probability Phi(x)", xlabel="x", ylabel="y", ylim=(-0.5, 3))
    slopes.set(title="It bends where ReLU breaks, and slopes down below -0.75", xlabel="x", ylabel="dy/dx")
    errors.set(
        yscale="log", ylim=(1e-7, 0.1), title="tanh is 40 times closer than sigmoid", xlabel="x",
        ylabel="distance from GELU",
    )  # fmt: skip
    for index, values in enumerate(losses.values()):
        models.plot([index] * len(values), values, "o", alpha=0.6)
        models.plot([index - 0.25, index + 0.25], [np.mean(values)] * 2, color="black")
    models.set_xticks(range(len(losses)), [TRAINED[name] for name in losses], fontsize=8)
    models.set(yscale="log", ylabel="validation loss (nats)", title="Sorting, each seed and the mean")
    for axes in (curves, slopes, errors):
        axes.legend(fontsize=8)
    for axes in (curves, slopes, errors, models):
        axes.grid(alpha=0.3)
    return figure


def main(argv: list[str] | None = None) -> None:
    """Computes, trains, prints and writes."""
    arguments = parser(__doc__, "gelu_family")
    arguments.add_argument("--seeds", type=int, default=6)
    arguments.add_argument("--steps", type=int, default=300)
    args = arguments.parse_args(argv)
    keep_freed_memory()
    seeds, steps = (2, 10) if args.smoke else (args.seeds, args.steps)
    off = {name: furthest_off(FAMILY[name]) for name in ("GELU, tanh (GPT-2)", "GELU, sigmoid")}
    for name, (error, at) in off.items():
        print(f"{name:20} furthest from GELU by {error:.4e} at |x| = {at:.3f}")
    x = np.linspace(-3, 3, 25)
    draws = 1000 if args.smoke else 20_000
    means = mean_of_random(x, draws)
    apart = float(np.abs(means - np.asarray(ops.gelu_exact(jnp.asarray(x)))).max())
    print(
        f"mean of {draws} draws of the random version: within {apart:.3f} of GELU ({3 / math.sqrt(draws):.3f} is 2 sd)"
    )
    losses: dict[str, list[float]] = {}
    for activation in TRAINED if not args.smoke else ("gelu_new", "linear"):
        losses[activation], parameters = trained(activation, seeds, steps)
        values = np.array(losses[activation])
        print(f"{TRAINED[activation]:20} loss {values.mean():.4f} +- {values.std():.4f} over {seeds} seeds")
    numbers: dict[str, Any] = {
        "furthest_off": off, "random_apart": apart, "losses": losses, "parameters": parameters, "steps": steps,
    }  # fmt: skip
    save(args.out, "gelu_family", numbers, draw((x, means), losses))


if __name__ == "__main__":
    main()
