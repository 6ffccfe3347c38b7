"""Does patching find the circuit that a model is known to have?

    python experiments/patching.py

A model of two layers of attention alone learns to continue repeated blocks of random tokens, which takes an induction
head (`induction_heads.py`). Then a prompt and a corrupted one, in which the first copy of the last token is another:
from there nothing can be looked up. Patched with what it is in the intact prompt, which head, which position of the
stream, which path brings the right answer back? The circuit known for this (Elhage et al. 2021; Olsson et al. 2022,
arXiv 2209.11895) is a head of layer 0 that, at the token after the first copy, writes what came before; a head of layer
1 finds this by its keys.

On two cores of an Intel Xeon at 2.0 GHz, 3 minutes: the answer's log-probability is -0.001 intact and -9.351 corrupted.
Head 0.2 alone brings back .99 of that, and it is the previous-token head (score .97); each head of layer 1 a part, the
largest .78 by head 1.1, whose induction score is .97. Of what reaches the keys of 1.1 from layer 0, 0.2 carries .72 and
no other more than .05. The estimate from one gradient finds the same heads, and gives the first .60 instead of .99.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import parser, save
from induction_heads import TASK, AttentionOnlyBlock, train
from matplotlib.figure import Figure

import flax_gpt as fg
from flax_gpt import interp
from flax_gpt.cli import keep_freed_memory

PERIOD, LENGTH = 12, 20  # tokens of a block, and of a prompt: the last repeats number LENGTH - 1 - PERIOD
FIRST = LENGTH - 1 - PERIOD  # where the last token stands for the first time


def prompts(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Intact and corrupted prompts [n, t], and the token [n] that comes next in the intact ones."""
    rng = np.random.default_rng(seed)
    blocks = np.stack([rng.permutation(TASK.vocab_size)[: PERIOD + 1] for _ in range(n)])
    intact = blocks[:, np.arange(LENGTH) % PERIOD]
    corrupted = intact.copy()
    corrupted[:, FIRST] = blocks[:, PERIOD]  # a token that is nowhere else
    return intact, corrupted, intact[:, FIRST + 1]


def mean_log_prob(answers: np.ndarray, logits: jax.Array) -> jax.Array:
    """Of the answers, [n], from the last position's logits [n, v]."""
    return jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(answers)), answers])


def draw(heads: Any, stream: Any, paths: Any, named: tuple[str, str]) -> Figure:
    """Three sweeps as heat maps of the share of the effect that each patch brings back."""
    figure = Figure(figsize=(13.5, 4.6), layout="constrained")
    by_head, by_position, by_path = figure.subplots(1, 3, width_ratios=(1, 2.6, 1))
    for axes, grid, across, title in (
        (by_head, heads, "head", f"Heads {named[0]} and {named[1]} bring it back"),
        (by_position, stream, "position", "The stream carries it from after the first copy to the end"),
        (by_path, paths, "head", f"By the keys of {named[1]}: from {named[0]}"),
    ):
        image = axes.imshow(grid, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", origin="lower")
        axes.set(title=title, xlabel=across, ylabel="layer")
        axes.set_yticks(range(len(grid)))
        axes.set_xticks(range(0, grid.shape[1], 1 if grid.shape[1] < 8 else 2))
        axes.title.set_fontsize(10)
        if grid.shape[1] < 8:
            for (row, column), value in np.ndenumerate(grid):
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=9,
                          color="white" if abs(value) > 0.6 else "black")  # fmt: skip
    by_position.axvline(FIRST + 1, color="gray", linewidth=0.8, linestyle=":")
    figure.colorbar(image, ax=by_path, label="share of the log-probability brought back")
    return figure


def main(argv: list[str] | None = None) -> None:
    """Trains the model, patches it and writes what brings the answer back."""
    arguments = parser(__doc__, "patching")
    arguments.add_argument("--steps", type=int, default=2000)
    arguments.add_argument("--seed", type=int, default=0)
    args = arguments.parse_args(argv)
    keep_freed_memory()
    config, params, _ = train(2, 20 if args.smoke else args.steps, args.seed)
    intact, corrupted, answers = prompts(4 if args.smoke else 64)
    metric = functools.partial(mean_log_prob, answers)

    def plain(tokens: np.ndarray) -> float:
        return float(metric(fg.forward(config, params, tokens, block=AttentionOnlyBlock)[:, -1]))

    best, worst = plain(intact), plain(corrupted)
    print(f"log-probability of the answer: {best:.3f} intact, {worst:.3f} corrupted")

    def share(values: Any) -> np.ndarray:
        return (np.asarray(values) - worst) / (best - worst)

    sweep = functools.partial(
        interp.patch_sweep, config, params, corrupted, intact, metric, at=-1, block=AttentionOnlyBlock
    )
    heads = share(sweep())
    stream = share(sweep(site="resid_post", over=("layer", "position")))
    first, second = int(heads[0].argmax()), int(heads[1].argmax())
    paths = share(
        interp.path_patch(
            config, params, corrupted, intact, metric, [("k", 1, second)], at=-1, block=AttentionOnlyBlock
        )
    )
    estimate = interp.attribution_patch(config, params, corrupted, intact, metric, at=-1, block=AttentionOnlyBlock) / (
        best - worst
    )
    scores = interp.head_scores(config, params, intact, block=AttentionOnlyBlock)
    named = (f"0.{first}", f"1.{second}")
    print(f"brought back by each head (layer x head):\n{np.round(heads, 3)}")
    print(f"by each head through the keys of {named[1]} alone:\n{np.round(paths, 3)}")
    print(f"estimated from one gradient:\n{np.round(np.asarray(estimate), 3)}")
    print(f"previous-token score of {named[0]}: {scores.previous_token[0, first]:.3f}")
    print(f"induction score of {named[1]}: {scores.induction[1, second]:.3f}")
    numbers = {
        "log_prob": {"intact": best, "corrupted": worst},
        "heads": heads.tolist(),
        "positions": stream.tolist(),
        "paths_to_keys": paths.tolist(),
        "estimate": np.asarray(estimate).tolist(),
        "previous_token_score": float(scores.previous_token[0, first]),
        "induction_score": float(scores.induction[1, second]),
    }
    save(args.out, "patching", numbers, draw(heads, stream, paths, named))


if __name__ == "__main__":
    main()
