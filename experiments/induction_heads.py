"""Two layers of attention learn to copy what came before; one cannot. Which heads do it, and who needs whom?

    python experiments/induction_heads.py

Blocks of distinct random tokens are repeated, with a block length (8 to 31) that position does not give away. Models of
attention alone, 64 wide with 4 heads, learn them from 32 sequences of 64 a step by AdamW at 3e-3. The scores of every
head (`interp.head_scores`) tell which look at the token before and which at what followed the last copy of the present
one, the induction heads of Olsson et al. 2022 (arXiv 2209.11895); `interp.ablate_heads` takes each out in turn.

On two cores of an Intel Xeon at 2.0 GHz, 5 minutes beside another job: two layers end at 0.0000 nats, one at 2.76. All
four heads of layer 1 become induction heads (scores .92 to 1.00); of layer 0 one head looks at the token before (.49 of
its attention, more than twice that of the others), and without it the loss is 1.68, as without no other.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from common import parser, save
from matplotlib.figure import Figure

import flax_gpt as fg
from flax_gpt import data, interp, ops, training
from flax_gpt.activations import no_tap
from flax_gpt.cli import keep_freed_memory
from flax_gpt.model import LayerNorm

TASK = data.Induction()


class AttentionOnlyBlock(nn.Module):
    """A block without an MLP: x + attention(layer_norm(x))."""

    config: fg.GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array, visible: Any = None, tap: Any = no_tap) -> jax.Array:
        """One layer: the residual stream in and out, [b, t, d]."""
        x = tap("resid_pre", x)
        y = tap("ln_1", LayerNorm(self.config, name="ln_1")(x))
        y = fg.Attention(self.config, name="attn")(y, visible, tap)
        return tap("resid_post", x + tap("attn_out", y))


def train(n_layer: int, steps: int, seed: int = 0) -> tuple[fg.GPTConfig, Any, list[dict[str, Any]]]:
    """A model of attention alone: its config, parameters and metrics."""
    config = fg.GPTConfig(
        TASK.vocab_size, TASK.t, 64, n_layer, 4, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        initializer_range=0.125,
    )  # fmt: skip
    options = training.TrainConfig(
        steps=steps, batch_size=32, lr=3e-3, schedule="constant", warmup_steps=min(100, steps // 10), weight_decay=0.0,
        beta2=0.999, seed=seed, log_every=max(1, steps // 60), eval_every=max(1, steps // 10), eval_batches=4,
    )  # fmt: skip
    result = training.fit(config, options, TASK, block=AttentionOnlyBlock)
    return config, result.params, result.metrics


def scored_loss(batch: data.Batch, logits: jax.Array) -> jax.Array:
    """Mean loss over what can be known, nats."""
    return jnp.mean(ops.cross_entropy(logits, batch.targets), where=batch.scored)


def draw(
    metrics: dict[int, list[dict[str, Any]]],
    scores: interp.HeadScores,
    losses: Any,
    pattern: Any,
    named: tuple[str, str],
) -> Figure:
    """Loss curves; scores of every head; the loss without each; the induction head at work."""
    figure = Figure(figsize=(12.5, 8.4), layout="constrained")
    (curves, table), (without, attention) = figure.subplots(2, 2)
    for n_layer, lines in metrics.items():
        seen = [(line["step"], line["train_loss"]) for line in lines if "train_loss" in line]
        curves.plot(*zip(*seen, strict=True), label=f"{n_layer} layer{'s' * (n_layer > 1)}")
    curves.set(title="Two layers learn to copy; one does not", xlabel="step", ylabel="loss on repeats (nats)")
    curves.legend()
    curves.grid(alpha=0.3)

    names = [f"{layer}.{head}" for layer, head in np.ndindex(*losses.shape)]
    grid = np.stack([np.asarray(scores.previous_token).ravel(), np.asarray(scores.induction).ravel()])
    image = table.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        color = "white" if value > 0.6 else "black"
        table.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=9)
    table.set_xticks(range(len(names)), names)
    table.set_yticks([0, 1], ["previous token", "induction"])
    table.set(title="Layer 0 looks one back, layer 1 at what came next", xlabel="layer.head")
    figure.colorbar(image, ax=table, label="share of attention")

    without.bar(names, np.asarray(losses).ravel(), color="tab:red")
    without.axhline(np.log(TASK.vocab_size), color="gray", linestyle="--", label="guessing, ln 64")
    without.set(title=f"Without head {named[0]} nothing is copied", xlabel="head taken out", ylabel="loss (nats)")
    without.legend()

    image = attention.imshow(pattern, cmap="Blues", vmin=0, vmax=1)
    attention.set(title=f"Head {named[1]} on one sequence", xlabel="key position", ylabel="query position")
    figure.colorbar(image, ax=attention, label="attention")
    return figure


def main(argv: list[str] | None = None) -> None:
    """Trains both, looks at the heads of the one with two layers, and writes what was found."""
    arguments = parser(__doc__, "induction_heads")
    arguments.add_argument("--steps", type=int, default=3000)
    arguments.add_argument("--seed", type=int, default=0)
    args = arguments.parse_args(argv)
    keep_freed_memory()
    steps = 20 if args.smoke else args.steps
    metrics = {}
    for n_layer in (1, 2):
        config, params, metrics[n_layer] = train(n_layer, steps, args.seed)
    final = {n: next(x["val_loss"] for x in reversed(lines) if "val_loss" in x) for n, lines in metrics.items()}
    print(f"loss on repeats: one layer {final[1]:.4f} nats, two layers {final[2]:.4f}")

    batch = next(iter(TASK.validation_batches(8 if args.smoke else 64, 1)))
    scores = interp.head_scores(config, params, batch.tokens, block=AttentionOnlyBlock)
    losses = interp.ablate_heads(
        config, params, batch.tokens, functools.partial(scored_loss, batch), kind="zero", block=AttentionOnlyBlock
    )
    layer_0 = np.asarray(scores.previous_token)[0]
    previous, induction = int(np.argmax(np.asarray(losses)[0])), int(np.argmax(np.asarray(scores.induction)[1]))
    named = (f"0.{previous}", f"1.{induction}")
    print(f"previous-token scores of layer 0: {np.round(layer_0, 3)}")
    print(f"induction scores of layer 1: {np.round(np.asarray(scores.induction)[1], 3)}")
    print(f"loss without each head:\n{np.round(np.asarray(losses), 3)}")
    _, acts = fg.forward(config, params, batch.tokens[:1], capture="pattern", block=AttentionOnlyBlock)
    figure = draw(metrics, scores, losses, acts["pattern"][1, 0, induction], named)
    numbers = {
        "loss": final,
        "previous_token": np.asarray(scores.previous_token).tolist(),
        "induction": np.asarray(scores.induction).tolist(),
        "loss_without": np.asarray(losses).tolist(),
        "steps": steps,
    }
    save(args.out, "induction_heads", numbers, figure)


if __name__ == "__main__":
    main()
