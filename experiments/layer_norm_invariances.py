"""What may change in front of a normalisation without anything changing behind it?

    python experiments/layer_norm_invariances.py

Table 1 of Ba, Kiros and Hinton 2016 (arXiv 1607.06450), by computation: y = norm(x W) for LayerNorm, batch norm and
weight norm in float64 with epsilon 0, before and after re-scaling or re-centring the weights or the data. A change
below 1e-12 is none. And what epsilon does: with 1e-5, x scaled by a gives 1 / sqrt(1 + epsilon / (a^2 variance)) of the
full size, so that LayerNorm forgets the scale of its input only where that is well above sqrt(epsilon).

It takes 5 s. LayerNorm's output does not change with a re-scaled weight matrix or data set, a re-centred weight matrix,
or a single re-scaled case (below 2e-15); it does with one re-scaled weight vector or a re-centred data set: the paper's
table, cell by cell. The formula for epsilon holds to 2e-16.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from common import parser, save
from matplotlib.figure import Figure

from flax_gpt import ops

N, D_IN, D_OUT = 32, 24, 16  # cases, inputs, neurons

Norm = Callable[[jax.Array, jax.Array], jax.Array]


def layer_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    """Each case by the mean and deviation over its neurons."""
    d = w.shape[1]
    return ops.layer_norm(x @ w, jnp.ones(d, x.dtype), jnp.zeros(d, x.dtype), 0.0)


def batch_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    """Each neuron by its mean and deviation over the cases."""
    a = x @ w
    return (a - a.mean(0)) / a.std(0)


def weight_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    """Each neuron by the length of its weight vector."""
    return x @ (w / jnp.linalg.norm(w, axis=0))


NORMS: dict[str, Norm] = {"batch norm": batch_norm, "weight norm": weight_norm, "layer norm": layer_norm}

# (x, w) -> (x, w); a case is a row of x, a neuron's weight vector a column of w.
CHANGES: dict[str, Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]] = {
    "weight matrix re-scaled": lambda x, w: (x, 3.0 * w),
    "weight matrix re-centred": lambda x, w: (x, w + jnp.linspace(-1.0, 2.0, w.shape[0])[:, None]),
    "one weight vector re-scaled": lambda x, w: (x, w.at[:, 0].multiply(3.0)),
    "data set re-scaled": lambda x, w: (3.0 * x, w),
    "data set re-centred": lambda x, w: (x + jnp.linspace(-1.0, 2.0, x.shape[1]), w),
    "one case re-scaled": lambda x, w: (x.at[0].multiply(3.0), w),
}


def table(seed: int = 0) -> dict[str, dict[str, float]]:
    """The largest change of any output, by norm and by what was changed; float64."""
    keys = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(keys[0], (N, D_IN), jnp.float64) + 0.5
    w = jax.random.normal(keys[1], (D_IN, D_OUT), jnp.float64)
    return {
        name: {what: float(jnp.abs(norm(*change(x, w)) - norm(x, w)).max()) for what, change in CHANGES.items()}
        for name, norm in NORMS.items()
    }


def sizes_with_epsilon(scales: np.ndarray, epsilon: float = 1e-5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The deviation of LayerNorm's output for an input of variance 1 times each scale: measured, and by the formula."""
    x = jax.random.normal(jax.random.key(seed), (768,), jnp.float64)
    x = (x - x.mean()) / x.std()
    rows = jnp.asarray(scales)[:, None] * x
    measured = ops.layer_norm(rows, jnp.ones(768, x.dtype), jnp.zeros(768, x.dtype), epsilon).std(-1)
    return np.asarray(measured), 1 / np.sqrt(1 + epsilon / scales**2)


def draw(changes: dict[str, dict[str, float]], scales: np.ndarray, sizes: tuple[np.ndarray, np.ndarray]) -> Figure:
    """The table as a map, and the share of the full size against the scale of the input."""
    figure = Figure(figsize=(12.5, 4.6), layout="constrained")
    grid_axes, size_axes = figure.subplots(1, 2, width_ratios=(1.5, 1))
    grid = np.array([[changes[norm][what] for norm in NORMS] for what in CHANGES])
    grid_axes.imshow(grid > 1e-12, cmap="RdYlGn_r", vmin=-0.4, vmax=1.4, aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        text = f"no change\n{value:.0e}" if value < 1e-12 else f"changes\n{value:.2g}"
        grid_axes.text(column, row, text, ha="center", va="center", fontsize=9)
    grid_axes.set_xticks(range(len(NORMS)), list(NORMS))
    grid_axes.set_yticks(range(len(CHANGES)), list(CHANGES))
    grid_axes.set_title("LayerNorm forgets the scale of any one case; no other does")
    size_axes.plot(scales, sizes[1], color="gray", linewidth=4, alpha=0.5, label=r"$1/\sqrt{1+\epsilon/a^2}$")
    size_axes.plot(scales, sizes[0], "o", markersize=4, label="measured")
    size_axes.axvline(np.sqrt(1e-5), color="tab:red", linestyle=":", label=r"$\sqrt{\epsilon}$")
    size_axes.set(
        xscale="log", title="Below sqrt(epsilon) the scale comes through", xlabel="deviation of the input, a",
        ylabel="deviation of the output",
    )  # fmt: skip
    size_axes.legend()
    size_axes.grid(alpha=0.3)
    return figure


def main(argv: list[str] | None = None) -> None:
    """Computes the table and the sizes, prints and writes them."""
    args = parser(__doc__, "layer_norm_invariances").parse_args(argv)
    with jax.enable_x64(True):
        changes = table()
        scales = np.logspace(-5, 1, 13 if args.smoke else 49)
        sizes = sizes_with_epsilon(scales)
    print(f"{'largest change of an output':30}" + "".join(f"{norm:>14}" for norm in NORMS))
    for what in CHANGES:
        print(f"{what:30}" + "".join(f"{changes[norm][what]:14.1e}" for norm in NORMS))
    apart = float(np.abs(sizes[0] - sizes[1]).max())
    print(f"with epsilon 1e-5: output deviation apart from the formula by at most {apart:.1e}")
    numbers = {"changes": changes, "scales": scales.tolist(), "sizes": sizes[0].tolist(), "apart": apart}
    save(args.out, "layer_norm_invariances", numbers, draw(changes, scales, sizes))


if __name__ == "__main__":
    main()
