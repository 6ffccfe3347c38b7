"""Attribution patching: all of a patch sweep at once, to first order, from one gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params, Rows, Tokens, forward
from flax_gpt.interp.passes import At, Metric, OtherTokens, axis_of, check_at, check_over, check_pair
from flax_gpt.model import Block, BlockType


def attribution_patch(
    config: GPTConfig,
    params: Params,
    tokens: Tokens,
    source: OtherTokens,
    metric: Metric,
    *,
    site: str = "z",
    over: Sequence[str] = ("layer", "head"),
    at: At | None = None,
    mask: Rows | None = None,
    compute_dtype: Any = None,
    block: BlockType = Block,
) -> Float[Array, "l ..."]:
    """By how much each patch would change the metric, to first order: (source - tokens) times the metric's gradient.

    Nanda 2023, "Attribution patching"; Syed et al. 2023 (arXiv 2310.10348). Two forward passes and a backward pass for
    each number of the metric, whatever the number of patches. Where an activation is far from linear in the metric
    (attention patterns, whole streams) it misleads: check what it finds with `patch_sweep`.

    Args: as of `patch_sweep`. A site's activations of all layers are held at once.

    Returns:
        [l, ...]: an estimate of `patch_sweep(...) - metric(forward(config, params, tokens))`, with its axes.

    Raises:
        TypeError, ValueError: as `patch_sweep`.
    """
    ids, others, rows = check_pair(config, tokens, source, mask)
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    positions = check_at(at, ids.shape)
    return _attribute(config, params, ids, others, rows, positions, metric, site, check_over(site, over), dtype, block)


@functools.partial(jax.jit, static_argnames=("config", "metric", "site", "over", "dtype", "block"))
def _attribute(
    config: GPTConfig,
    params: Params,
    tokens: Array,
    source: Array,
    mask: Array | None,
    at: Array | None,
    metric: Metric,
    site: str,
    over: tuple[str, ...],
    dtype: Any,
    block: BlockType,
) -> Array:
    run = functools.partial(forward, config, params, mask=mask, compute_dtype=dtype, block=block)
    _, there = run(source, capture=site)

    def measured(change: Array) -> tuple[Array, Array]:
        logits, here = run(
            tokens, capture=site, edit=lambda at, layer, value: value + change[layer] if at == site else value
        )
        value = metric(logits if at is None else logits[jnp.arange(len(logits)), at])
        return jnp.asarray(value), here[site]

    # A change of nothing: its gradient is that of the metric to the activation.
    gradient, here = jax.jacrev(measured, has_aux=True)(jnp.zeros_like(there[site]))
    products = (there[site] - here) * gradient  # [*metric, l, b, ...]
    metric_axes = products.ndim - here.ndim
    kept = [metric_axes, *(metric_axes + 1 + axis_of(site, name) for name in over[1:])]
    summed = [axis for axis in range(metric_axes, products.ndim) if axis not in kept]
    result = jnp.sum(products, axis=tuple(summed))  # the kept axes in the order they have in the activation
    order = sorted(kept)
    return jnp.moveaxis(result, [metric_axes + order.index(axis) for axis in kept], range(len(kept)))
