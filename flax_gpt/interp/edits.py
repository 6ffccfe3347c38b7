"""Ready-made edits, for `forward(..., edit=)`, `generate(..., edit=)` and all that takes one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from flax_gpt.activations import Edit
from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params, check_rows, forward
from flax_gpt.interp.passes import At, OtherTokens, axis_of, check_at, read_at
from flax_gpt.model import Block, BlockType


def silence_heads(heads: Bool[Array, "l h"] | np.ndarray) -> Edit:
    """Sets the output `z` of the chosen heads to zero; [l, h] of bool."""
    chosen = jnp.asarray(heads, bool)

    def edit(site: str, layer: Any, value: Array) -> Array:
        return jnp.where(chosen[layer][:, None], 0, value) if site == "z" else value

    return edit


def replace(site: str, layer: int | Int[Array, ""], new: Array, *, head: int | Int[Array, ""] | None = None) -> Edit:
    """Puts a value in the place of an activation of one layer, or of one of its heads.

    Args:
        site: one of a block's sites, or "embed", "ln_f" or "logits", whose layer is ignored.
        layer: which one.
        new: of the activation's shape, or one that broadcasts to it.
        head: of a site that has heads: change this one alone. `new` still has the shape of all.
    """

    def edit(at: str, of_layer: Any, value: Array) -> Array:
        if at != site:
            return value
        here = jnp.ones((), bool) if of_layer is None else jnp.asarray(of_layer == layer)
        if head is not None:
            axis = axis_of(site, "head")
            here = here & (jnp.arange(value.shape[axis]) == head).reshape(
                [-1 if i == axis else 1 for i in range(value.ndim)]
            )
        return jnp.where(here, new, value)

    return edit


def steer(
    vector: Float[Array, " d"], layer: int | Int[Array, ""], *, site: str = "resid_post", scale: float | Array = 1.0
) -> Edit:
    """Adds scale * vector to an activation of one layer at every position (Turner et al. 2023, arXiv 2308.10248)."""

    def edit(at: str, of_layer: Any, value: Array) -> Array:
        return value + jnp.where(of_layer == layer, scale, 0) * vector if at == site else value

    return edit


def steering_vectors(
    config: GPTConfig,
    params: Params,
    positive: OtherTokens,
    negative: OtherTokens,
    *,
    site: str = "resid_post",
    at: At = -1,
    block: BlockType = Block,
) -> Float[Array, "l d"]:
    """The mean activation over `positive` rows less that over `negative` ones, in every layer: what `steer` adds.

    Rimsky et al. 2023 (arXiv 2312.06681), section 3.

    Args:
        config, params, block: as of `flax_gpt.forward`.
        positive, negative: [b, t] each, of lengths and numbers of their own.
        site: a site [b, t, d] of the block.
        at: the position to read, of both.

    Returns:
        [l, d].

    Raises:
        TypeError, ValueError: as `flax_gpt.forward`; or `at` is outside.
    """

    def mean(tokens: OtherTokens) -> Array:
        ids, _, _ = check_rows(config, tokens, None, None)
        _, acts = forward(config, params, ids, capture=site, block=block)
        where = check_at(at, ids.shape)
        return jnp.mean(jax.vmap(functools.partial(read_at, at=where))(acts[site]), axis=1)

    return mean(positive) - mean(negative)
