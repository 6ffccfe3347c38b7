"""Path patching: which head acts on which later part directly, and not by way of other heads."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params, Rows, Tokens, forward
from flax_gpt.interp.passes import (
    At,
    Metric,
    OtherTokens,
    axis_of,
    bytes_of_a_pass,
    bytes_of_logits,
    check_at,
    check_pair,
    in_chunks,
)
from flax_gpt.interp.patching import GIBIBYTE
from flax_gpt.model import Block, BlockType

Receiver = tuple[str, int, int | None]


def path_patch(
    config: GPTConfig,
    params: Params,
    tokens: Tokens,
    source: OtherTokens,
    metric: Metric,
    receivers: Iterable[Receiver],
    *,
    freeze_mlps: bool = False,
    at: At | None = None,
    mask: Rows | None = None,
    compute_dtype: Any = None,
    block: BlockType = Block,
    max_bytes: int = GIBIBYTE,
) -> Float[Array, "l h ..."]:
    """Runs `tokens` with each head in turn as it is in `source`, felt by the receivers alone.

    Path patching (Wang et al. 2022, arXiv 2211.00593, section 3.1; Goldowsky-Dill et al. 2023, arXiv 2304.05969). A
    first run has the sender's `z` from `source` and every other head's from the plain run of `tokens`, so that nothing
    passes through other heads; what the receivers are in it goes into a second run, in which everything else is free.

    Args:
        config, params, tokens, source, metric, at, mask, compute_dtype, block, max_bytes: as of `patch_sweep`.
        receivers: (site, layer, head) each, such as ("k", 1, 0); the head is None for all of a site. For what the
            logits take from heads directly: ("resid_post", n_layer - 1, None).
        freeze_mlps: hold MLPs at the plain run too, so that nothing passes through them either.

    Returns:
        [l, h, ...]: the metric for each sender. Senders that are not before a receiver give that of the plain run.

    Raises:
        TypeError, ValueError: as `patch_sweep`; or a receiver does not exist.
    """
    ids, others, rows = check_pair(config, tokens, source, mask)
    chosen = tuple(receivers)
    for site, layer, head in chosen:
        if not 0 <= layer < config.n_layer:
            raise ValueError(f"receiver {(site, layer, head)}: the model has layers 0 to {config.n_layer - 1}")
        if head is not None:
            axis_of(site, "head")
            if not 0 <= head < config.n_head:
                raise ValueError(f"receiver {(site, layer, head)}: the model has heads 0 to {config.n_head - 1}")
    if not chosen:
        raise ValueError("path_patch needs at least one receiver")
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    positions = check_at(at, ids.shape)
    return _path_patch(
        config, params, ids, others, rows, positions, metric, chosen, freeze_mlps, dtype, block, max_bytes
    )


_STATIC = ("config", "metric", "receivers", "freeze_mlps", "dtype", "block", "max_bytes")


@functools.partial(jax.jit, static_argnames=_STATIC)
def _path_patch(
    config: GPTConfig,
    params: Params,
    tokens: Array,
    source: Array,
    mask: Array | None,
    at: Array | None,
    metric: Metric,
    receivers: tuple[Receiver, ...],
    freeze_mlps: bool,
    dtype: Any,
    block: BlockType,
    max_bytes: int,
) -> Array:
    run = functools.partial(forward, config, params, mask=mask, compute_dtype=dtype, layers="scan", block=block)
    _, plain = run(tokens, capture=("z", "mlp_out") if freeze_mlps else ("z",))
    _, other = run(source, capture=("z",))
    heads = jnp.arange(config.n_head)[:, None]

    def patched(sender: tuple[Array, Array]) -> Array:
        sender_layer, sender_head = sender

        def send(site: str, layer: Any, value: Array) -> Array:
            if site == "z":
                sent = (layer == sender_layer) & (heads == sender_head)
                return jnp.where(sent, other["z"][layer], plain["z"][layer])
            return plain["mlp_out"][layer] if freeze_mlps and site == "mlp_out" else value

        _, received = run(tokens, edit=send, capture=tuple({site for site, _, _ in receivers}))

        def receive(site: str, layer: Any, value: Array) -> Array:
            for of_site, of_layer, head in receivers:
                if of_site == site:
                    here = layer == of_layer
                    if head is not None:
                        axis = axis_of(site, "head")
                        shape = [-1 if i == axis else 1 for i in range(value.ndim)]
                        here = here & (jnp.arange(config.n_head) == head).reshape(shape)
                    value = jnp.where(here, received[site][of_layer], value)
            return value

        logits = run(tokens, edit=receive)
        return jnp.asarray(metric(logits if at is None else logits[jnp.arange(len(logits)), at]))

    senders = jnp.unravel_index(jnp.arange(config.n_layer * config.n_head), (config.n_layer, config.n_head))
    each = bytes_of_a_pass(config, tokens.shape) + bytes_of_logits(config, tokens.shape)
    results = in_chunks(jax.vmap(patched), senders, each, max_bytes)
    return results.reshape(config.n_layer, config.n_head, *results.shape[1:])
