"""LayerNorm before each part or after each addition: what it does to gradients at the start, and to training.

    python experiments/pre_ln_post_ln.py

Xiong et al. 2020 (arXiv 2002.04745). First their own setting: attention that averages (W_Q = W_K = 0, one head, no
output matrix), square matrices N(0, 1/d), ReLU, an MLP no wider than the model. The variance of the pre-LN stream after
L layers (between 1 + L/2 and 1 + 3L/2 by their Lemma 2), and the norm of the gradient to the last layer's second MLP
matrix, which falls as 1/sqrt(L) for pre-LN and does not fall for post-LN (Theorem 1). Then the same gradient in GPT-2's
blocks with GPT-2's init. Then training: pre-LN, post-LN and no LN at several learning rates, with warm-up and without.

On two cores of an Intel Xeon at 2.0 GHz, 6 minutes beside another job, five seeds. Stream: 6.93, 14.61 and 30.83 at 6,
12 and 24 layers. Gradient in the paper's setting: slope -0.54 for pre-LN (theory -1/2), +0.02 for post-LN. Under
GPT-2's init neither depends on depth (-0.01 and 0.00): the factor 1/sqrt(2 n_layer) has taken the place of the
stream's growth. Training, 6 layers: at 3e-3 and below all three train with and without warm-up. At 1e-2 post-LN
without warm-up stays at 3.14 nats, with it 2.42; pre-LN reaches 2.90 and 2.34. Without LN 1e-2 stays at 3.2, and 3e-2
is not finite.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import parser, save
from matplotlib.figure import Figure

import flax_gpt as fg
from flax_gpt import data, ops, training
from flax_gpt.cli import keep_freed_memory

BLOCKS = {"pre-LN": fg.Block, "post-LN": fg.PostLNBlock, "no LN": fg.NoLNBlock}
COLORS = {"pre-LN": "tab:blue", "post-LN": "tab:red", "no LN": "tab:gray"}
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


def paper_layers(params: Any, x: jax.Array, pre: bool) -> jax.Array:
    """The paper's stack on [b, t, d]; params: {v, w1, w2 [L, d, d]}."""
    t, d = x.shape[1:]
    average = jnp.tri(t) / jnp.arange(1, t + 1)[:, None]  # a causal softmax of equal scores
    norm = functools.partial(ops.layer_norm, scale=jnp.ones(d), bias=jnp.zeros(d))

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        y = norm(x) if pre else x
        x = x + jnp.einsum("ts,bsd,de->bte", average, y, w["v"])
        x = x if pre else norm(x)
        y = norm(x) if pre else x
        x = x + jax.nn.relu(y @ w["w1"]) @ w["w2"]
        return (x if pre else norm(x)), None

    return jax.lax.scan(layer, x, params)[0]


def paper_params(key: jax.Array, n_layer: int, d: int) -> dict[str, jax.Array]:
    """Matrices of N(0, 1/d)."""
    keys = jax.random.split(key, 3)
    return {
        name: jax.random.normal(key, (n_layer, d, d)) / d**0.5
        for name, key in zip(("v", "w1", "w2"), keys, strict=True)
    }


@functools.partial(jax.jit, static_argnames=("n_layer", "d", "t"))
def paper_stream(key: jax.Array, n_layer: int, d: int, t: int) -> jax.Array:
    """E |x_L|^2 / d of the pre-LN stack for inputs of N(0, 1)."""
    params_key, x_key = jax.random.split(key)
    x = jax.random.normal(x_key, (4, t, d))
    return jnp.mean(jnp.square(paper_layers(paper_params(params_key, n_layer, d), x, True)))


@functools.partial(jax.jit, static_argnames=("n_layer", "d", "t", "v", "pre"))
def paper_gradient(key: jax.Array, n_layer: int, d: int, t: int, v: int, pre: bool) -> jax.Array:
    """Norm of the gradient to the last layer's w2, of the mean loss on random targets."""
    params_key, x_key, target_key, head_key = jax.random.split(key, 4)
    x = jax.random.normal(x_key, (4, t, d))
    targets = jax.random.randint(target_key, (4, t), 0, v)
    head = jax.random.normal(head_key, (d, v)) / d**0.5

    def loss(params: Any) -> jax.Array:
        y = paper_layers(params, x, pre)
        y = ops.layer_norm(y, jnp.ones(d), jnp.zeros(d)) if pre else y
        return jnp.mean(ops.cross_entropy(y @ head, targets))

    return jnp.linalg.norm(jax.grad(loss)(paper_params(params_key, n_layer, d))["w2"][-1])


def gpt2_gradient(seed: int, n_layer: int, d: int, name: str) -> float:
    """The same norm in GPT-2's blocks, drawn as GPT-2's are."""
    config = fg.GPTConfig(1000, 32, d, n_layer, 4, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    init, draw = jax.random.split(jax.random.key(seed))
    params = fg.init_params(config, init, block=BLOCKS[name])
    tokens = jax.random.randint(draw, (4, 32), 0, config.vocab_size)

    def loss(params: Any) -> jax.Array:
        return -jnp.mean(fg.token_log_probs(config, params, tokens, block=BLOCKS[name], layers="scan"))

    gradient = jax.jit(jax.grad(loss))(params)
    return float(jnp.linalg.norm(gradient["blocks"]["mlp"]["down"]["kernel"][-1]))


def slope(depths: list[int], norms: np.ndarray) -> float:
    """Of the logarithm of the mean norm against that of the depth, from the second depth on."""
    return float(np.polyfit(np.log(depths[1:]), np.log(norms.mean(1)[1:]), 1)[0])


def sweep(name: str, warm_up: bool, steps: int, rates: tuple[float, ...], n_layer: int) -> dict[str, list[float]]:
    """Final training loss (mean of the last fifth of the steps) and number of skipped steps at each learning rate."""
    text = data.stdlib_text()[:400_000]
    source = data.Corpus.of_text(text, data.CharTokenizer.of_text(text), 32)
    config = fg.GPTConfig(source.vocab_size, 32, 64, n_layer, 4, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    options = training.TrainConfig(
        steps=steps, batch_size=16, schedule="constant", min_lr=0.0, warmup_steps=steps // 4 if warm_up else 0,
        log_every=max(1, steps // 5), eval_every=steps, eval_batches=1, clip_norm=float("inf"), max_skipped=steps,
    )  # fmt: skip
    result = training.fit_many(config, options, source, lr=list(rates), block=BLOCKS[name])
    last = [[line["train_loss"] for line in lines if "train_loss" in line][-1] for lines in result.metrics]
    return {"loss": [float(x) for x in last], "skipped": [float(row["skipped"]) for row in result.table()]}


def draw(stream: Any, gradients: Any, trained: Any, rates: tuple[float, ...], chance: float) -> Figure:
    """Stream, gradients in both settings, and the losses of the sweep."""
    figure = Figure(figsize=(13.0, 8.4), layout="constrained")
    (left, middle), (right, sweeps) = figure.subplots(2, 2)
    depths = np.array(list(stream))
    values = np.array(list(stream.values()))
    left.fill_between(depths, 1 + depths / 2, 1 + 3 * depths / 2, color="lightgray", label="bounds of the paper")
    left.errorbar(depths, values.mean(1), values.std(1), fmt="o", color=COLORS["pre-LN"], label="pre-LN, measured")
    left.set(title="The pre-LN stream grows with depth", xlabel="layers L", ylabel=r"$E|x_L|^2/d$")
    for axes, setting, title in (
        (middle, "paper", "Last layer's gradient, the paper's setting"),
        (right, "gpt2", "The same under GPT-2's init"),
    ):
        for name, of_depth in gradients[setting].items():
            at = list(of_depth)
            norms = np.array(list(of_depth.values()))
            label = f"{name}, slope {slope(at, norms):+.2f}"
            axes.errorbar(at, norms.mean(1), norms.std(1), fmt="o-", capsize=3, color=COLORS[name], label=label)
        axes.set(title=title, xlabel="layers L", ylabel="norm of the gradient", xscale="log", yscale="log")
        axes.set_xticks(at, [str(depth) for depth in at])
        axes.minorticks_off()
    for (name, warm_up), found in trained.items():
        loss = np.where(np.array(found["skipped"]) > 0, np.nan, found["loss"])
        label = f"{name}, {'with' if warm_up else 'no'} warm-up"
        sweeps.plot(rates, loss, "o-" if warm_up else "s--", color=COLORS[name], label=label)
    sweeps.axhline(chance, color="black", linewidth=0.8, linestyle=":")
    sweeps.set(title="Training loss by learning rate", xlabel="learning rate", ylabel="loss (nats)", xscale="log")
    for axes in (left, middle, right, sweeps):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    return figure


def main(argv: list[str] | None = None) -> None:
    """Measures, trains, prints and writes."""
    arguments = parser(__doc__, "pre_ln_post_ln")
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=200)
    args = arguments.parse_args(argv)
    keep_freed_memory()
    small = args.smoke
    seeds, rates = (2, RATES[:2]) if small else (args.seeds, RATES)
    depths, width = ([2, 4, 6], 32) if small else ([2, 4, 8, 16, 32], 256)
    keys = [jax.random.key(seed) for seed in range(seeds)]
    stream = {
        n: [float(paper_stream(key, n, 64 if small else 512, 16)) for key in keys]
        for n in ((6,) if small else (6, 12, 24))
    }
    for n, values in stream.items():
        bounds = f"between {1 + n / 2} and {1 + 1.5 * n} by the paper"
        print(f"E|x_L|^2/d at L = {n}: {np.mean(values):.2f} +- {np.std(values):.2f}, {bounds}")
    gradients: dict[str, Any] = {
        "paper": {
            name: {n: [float(paper_gradient(key, n, width, 32, 1000, pre)) for key in keys] for n in depths}
            for name, pre in (("pre-LN", True), ("post-LN", False))
        },
        "gpt2": {
            name: {n: [gpt2_gradient(seed, n, width, name) for seed in range(seeds)] for n in depths}
            for name in ("pre-LN", "post-LN")
        },
    }
    for setting, by_name in gradients.items():
        for name, of_depth in by_name.items():
            means = "  ".join(f"{n}: {np.mean(values):.4f}" for n, values in of_depth.items())
            print(f"{setting:6} {name:8} slope {slope(depths, np.array(list(of_depth.values()))):+.2f}   {means}")
    steps, n_layer = (10, 2) if small else (args.steps, 6)
    trained = {}
    for name in list(BLOCKS)[: 1 if small else None]:
        for warm_up in (True, False):
            found = trained[name, warm_up] = sweep(name, warm_up, steps, rates, n_layer)
            cells = "  ".join(
                f"{rate:g}: {loss:.2f}{' (not finite)' if skipped else ''}"
                for rate, loss, skipped in zip(rates, found["loss"], found["skipped"], strict=True)
            )
            print(f"{name:8} {'with' if warm_up else 'no  '} warm-up   {cells}")
    numbers = {
        "stream": stream, "gradients": gradients, "rates": rates,
        "trained": {f"{name}, {'with' if warm else 'no'} warm-up": found for (name, warm), found in trained.items()},
    }  # fmt: skip
    save(args.out, "pre_ln_post_ln", numbers, draw(stream, gradients, trained, rates, np.log(100)))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)  # a sweep is spread over them
    main()
