"""Optimizers by name: clipping, AdamW or Lion or Muon, decay on matrices alone, a learning rate that warms up."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from optax import contrib

from flax_gpt.forward import Params
from flax_gpt.training.config import TrainConfig

# Which parameters weight decay applies to: the first pattern that is found in the path decides.
DECAY_RULES: tuple[tuple[str, bool], ...] = (
    (r"(^|\.)(bias|scale)$", False),
    (r"(^|\.)(kernel|wte|wpe)$", True),
)

# The kernels of a block that Muon sees as matrices of another form than [l, in, out]: axes in, axes out. The others,
# layers and the three of q, k and v, count different matrices.
_MUON_AXES = {"attn.qkv.kernel": (1, (3, 4)), "attn.out.kernel": ((1, 2), 3)}


def learning_rate_schedule(
    train: TrainConfig, lr: float | Float[Array, ""] | None = None, min_lr: float | Float[Array, ""] | None = None
) -> optax.Schedule:
    """Learning rate as a function of the number of updates done.

    It rises linearly from lr / (warmup_steps + 1) at 0 to lr at warmup_steps, and is min_lr from `steps` on. Between
    these it falls along half a cosine ("cosine"), or along a line ("linear"), or stays at lr but for a line down in the
    last `cooldown_steps` ("trapezoid"), or stays at lr for good ("constant").

    Args:
        train: the run.
        lr, min_lr: instead of the run's; may be traced, as in a sweep over learning rates.
    """
    lr, min_lr = (train.lr if lr is None else lr), (train.min_lr if min_lr is None else min_lr)
    warmup, span = train.warmup_steps, train.steps - train.warmup_steps
    cooldown = min(max(train.steps // 5, 1) if train.cooldown_steps is None else train.cooldown_steps, span)

    def rate(count: Any) -> Any:
        left = jnp.clip((train.steps - count) / span, 0, 1)
        share = {
            "cosine": 0.5 * (1 - jnp.cos(jnp.pi * left)),
            "linear": left,
            "trapezoid": jnp.clip((train.steps - count) / cooldown, 0, 1),
            "constant": jnp.ones_like(left),
        }[train.schedule]
        return jnp.where(count < warmup, lr * (count + 1) / (warmup + 1), min_lr + (lr - min_lr) * share)

    return rate


def decay_mask(params: Params, rules: tuple[tuple[str, bool], ...] = DECAY_RULES) -> PyTree[bool]:
    """Which leaves weight decay applies to: matrices and embeddings, and neither biases nor scales.

    Args:
        params: parameters, or anything of their form.
        rules: pairs of a regular expression, searched in paths such as "blocks.mlp.up.kernel", and whether such a leaf
            decays; the first that is found decides.

    Raises:
        ValueError: a parameter matches no rule.
    """

    def decays(path: tuple[Any, ...], leaf: Any) -> bool:
        name = path_name(path)
        for pattern, value in rules:
            if re.search(pattern, name):
                return value
        raise ValueError(
            f"no rule says whether weight decay applies to the parameter {name}; "
            "give make_optimizer decay_rules with a pattern for it"
        )

    return jax.tree_util.tree_map_with_path(decays, params)


def path_name(path: tuple[Any, ...]) -> str:
    """A leaf's path, such as "blocks.mlp.up.kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def make_optimizer(
    train: TrainConfig,
    *,
    lr: float | Float[Array, ""] | None = None,
    min_lr: float | Float[Array, ""] | None = None,
    weight_decay: float | Float[Array, ""] | None = None,
    decay_rules: tuple[tuple[str, bool], ...] = DECAY_RULES,
) -> optax.GradientTransformation:
    """The optimizer that `train` names: clipping by global norm, its direction, weight decay, the learning rate.

    * adamw: Loshchilov and Hutter, arXiv 1711.05101.
    * lion: the sign of the momentum (Chen et al., arXiv 2302.06675); wants a learning rate 3 to 10 times smaller.
    * muon: the momentum of each matrix in a block made orthogonal (Jordan et al. 2024, "Muon"), scaled to the size of
      AdamW's updates (Liu et al., arXiv 2502.16982), so that AdamW's learning rates are about right; embeddings, head,
      biases and scales go by AdamW.

    Args:
        train: the run.
        lr, min_lr, weight_decay: instead of the run's; may be traced, as in a sweep.
        decay_rules: see `decay_mask`.
    """
    directions = {
        "adamw": lambda: optax.scale_by_adam(train.beta1, train.beta2),
        "lion": lambda: optax.scale_by_lion(train.beta1, train.beta2),
        "muon": lambda: optax.partition(
            {
                # At a learning rate of 1, which optax applies with its sign.
                "muon": optax.chain(
                    contrib.muon(
                        1.0, beta=train.momentum, muon_weight_dimension_numbers=_muon_axes, consistent_rms=0.2
                    ),
                    optax.scale(-1.0),
                ),
                "adam": optax.scale_by_adam(train.beta1, train.beta2),
            },
            _muon_or_adam,
        ),
    }
    return optax.chain(
        optax.clip_by_global_norm(train.clip_norm),
        directions[train.optimizer](),
        optax.add_decayed_weights(
            train.weight_decay if weight_decay is None else weight_decay, lambda params: decay_mask(params, decay_rules)
        ),
        optax.scale_by_learning_rate(learning_rate_schedule(train, lr, min_lr)),
    )


def _axes_in_and_out(path: tuple[Any, ...], leaf: Any) -> contrib.MuonDimensionNumbers | None:
    """Of a kernel in a block; None of every other parameter, and of a kernel of unknown form."""
    name = path_name(path)
    if not (name.startswith("blocks.") and name.endswith(".kernel")):
        return None
    known = _MUON_AXES.get(name.removeprefix("blocks."), (1, 2) if leaf.ndim == 3 else None)
    return None if known is None else contrib.MuonDimensionNumbers(*known)


def _muon_axes(params: Params) -> PyTree[contrib.MuonDimensionNumbers]:
    return jax.tree_util.tree_map_with_path(_axes_in_and_out, params)


def _muon_or_adam(params: Params) -> PyTree[str]:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: "adam" if _axes_in_and_out(path, leaf) is None else "muon", params
    )
