"""Settings to start from, by what is trained on; each field can be changed by its flag.

"sort", "induction" and "markov" come to within 0.01 nats or so of their optimum. "recall" does not: within these steps
its model learns which values are in the context, and not yet which belongs to which key (a third of the answers right).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flax_gpt.config import GPTConfig
from flax_gpt.training.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model, less its vocabulary and length where the data gives them, and how to train it."""

    model: dict[str, Any]
    train: TrainConfig


def _model(n_layer: int, n_head: int, n_embd: int, **others: Any) -> dict[str, Any]:
    return {
        "n_layer": n_layer,
        "n_head": n_head,
        "n_embd": n_embd,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        **others,
    }


_TOY = TrainConfig(lr=1e-3, min_lr=1e-4, warmup_steps=50, batch_size=64, eval_every=100)

# "text" is nanoGPT's setting for a character model on a CPU, at twice its learning rate: on tinyshakespeare that ends
# at 1.824 nats instead of 1.891. "python" is the same for the built-in text, cut short.
_CHARACTERS = _model(4, 4, 128, n_positions=64)

RECIPES: dict[str, Recipe] = {
    "text": Recipe(_CHARACTERS, TrainConfig(lr=2e-3)),
    "python": Recipe(_CHARACTERS, TrainConfig(lr=2e-3, steps=1000)),
    "sort": Recipe(_model(3, 3, 48), dataclasses.replace(_TOY, steps=500)),
    "induction": Recipe(_model(2, 4, 64), dataclasses.replace(_TOY, steps=2000, lr=3e-3, batch_size=32)),
    "recall": Recipe(_model(2, 1, 64, initializer_range=0.125), dataclasses.replace(_TOY, steps=1000, lr=3e-3)),
    "addition": Recipe(
        _model(1, 4, 128), dataclasses.replace(_TOY, steps=4000, batch_size=512, weight_decay=1.0, min_lr=1e-3)
    ),
    "markov": Recipe(_model(2, 4, 64), dataclasses.replace(_TOY, steps=600, lr=3e-3)),
}


def make_config(recipe: Recipe, vocab_size: int, t: int, **changes: Any) -> GPTConfig:
    """The recipe's model for data of so many ids and such a length, with fields changed by name."""
    return GPTConfig(**{"vocab_size": vocab_size, "n_positions": t, **recipe.model, **changes})
