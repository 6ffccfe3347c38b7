"""Linear probes: what can be read off an activation by one linear map, layer by layer."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params, Rows, Tokens, check_rows, forward
from flax_gpt.model import Block, BlockType
from flax_gpt.ops import cross_entropy


class Probes(NamedTuple):
    """A linear classifier for each layer: class scores are x kernel + bias."""

    kernel: Float[Array, "l d c"]
    bias: Float[Array, "l c"]


def fit_probes(
    config: GPTConfig,
    params: Params,
    tokens: Tokens,
    labels: Rows,
    n_classes: int,
    *,
    site: str = "resid_post",
    scored: Rows | None = None,
    l2: float = 1e-3,
    steps: int = 200,
    mask: Rows | None = None,
    block: BlockType = Block,
) -> Probes:
    """Fits multinomial logistic regressions from a site's activations to labels, one a layer, all in one program.

    Alain and Bengio 2016 (arXiv 1610.01644). By L-BFGS from zero, on activations brought to mean 0 and deviation 1,
    which the returned kernels undo. Score them by `probe_accuracy` on other rows than they were fitted on.

    Args:
        config, params, tokens, mask, block: as of `flax_gpt.forward`.
        labels: [b, t], the class of each token, 0 to n_classes - 1.
        n_classes: c.
        site: a site [b, t, ...] of the block; axes after the second are taken as one.
        scored: [b, t], which tokens to fit on; all but padding by default.
        l2: penalty on the squared kernel (of the normalised activations).
        steps: of L-BFGS.

    Returns:
        The probes of all layers.

    Raises:
        TypeError, ValueError: as `flax_gpt.forward`; or labels do not fit.
    """
    ids, rows, classes, counted = _check(config, tokens, labels, scored, mask, n_classes)
    return _fit(config, params, ids, rows, classes, counted, n_classes, site, l2, steps, block)


def probe_logits(
    config: GPTConfig,
    params: Params,
    tokens: Tokens,
    probes: Probes,
    *,
    site: str = "resid_post",
    mask: Rows | None = None,
    block: BlockType = Block,
) -> Float[Array, "l b t c"]:
    """The class scores that each layer's probe gives each token; arguments as of `fit_probes`."""
    _, acts = forward(config, params, tokens, mask=mask, capture=site, block=block)
    x = acts[site].reshape(*acts[site].shape[:3], -1)
    return jnp.einsum("lbtd,ldc->lbtc", x, probes.kernel) + probes.bias[:, None, None]


def probe_accuracy(
    config: GPTConfig,
    params: Params,
    tokens: Tokens,
    labels: Rows,
    probes: Probes,
    *,
    site: str = "resid_post",
    scored: Rows | None = None,
    mask: Rows | None = None,
    block: BlockType = Block,
) -> Float[Array, " l"]:
    """The share of scored tokens that each layer's probe labels right; arguments as of `fit_probes`."""
    ids, rows, classes, counted = _check(config, tokens, labels, scored, mask, probes.bias.shape[-1])
    said = jnp.argmax(probe_logits(config, params, ids, probes, site=site, mask=rows, block=block), axis=-1)
    return jnp.sum((said == classes) & counted, axis=(1, 2)) / jnp.sum(counted)


def _check(
    config: GPTConfig, tokens: Tokens, labels: Rows, scored: Rows | None, mask: Rows | None, n_classes: int
) -> tuple[Int[Array, "b t"], Any, Int[Array, "b t"], Bool[Array, "b t"]]:
    ids, rows, classes = check_rows(config, tokens, mask, labels)
    _, counted, _ = check_rows(config, ids, rows if scored is None else scored, None)
    counted = jnp.ones(ids.shape, bool) if counted is None else jnp.asarray(counted).astype(bool)
    outside = (jnp.asarray(classes) < 0) | (jnp.asarray(classes) >= n_classes)
    if not isinstance(outside, jax.core.Tracer) and bool((outside & counted).any()):
        raise ValueError(f"labels must be 0 to {n_classes - 1} where they are scored")
    return ids, rows, jnp.asarray(classes).astype(jnp.int32), counted


@functools.partial(jax.jit, static_argnames=("config", "n_classes", "site", "steps", "block"))
def _fit(
    config: GPTConfig,
    params: Params,
    tokens: Array,
    mask: Any,
    labels: Array,
    counted: Array,
    n_classes: int,
    site: str,
    l2: float | Array,
    steps: int,
    block: BlockType,
) -> Probes:
    _, acts = forward(config, params, tokens, mask=mask, capture=site, block=block)
    weights = counted.reshape(-1) / jnp.sum(counted)
    classes = jnp.where(counted, labels, 0).reshape(-1)

    def layer(x: Float[Array, "b t ..."]) -> Probes:
        x = x.reshape(len(weights), -1).astype(jnp.float32)
        mean = weights @ x
        deviation = jnp.sqrt(weights @ jnp.square(x - mean))
        deviation = jnp.where(deviation > 0, deviation, 1)  # of a constant there is nothing to read
        x = (x - mean) / deviation

        def loss(probe: Probes) -> Array:
            losses = cross_entropy(x @ probe.kernel + probe.bias, classes)
            return jnp.sum(weights * losses) + l2 * jnp.sum(jnp.square(probe.kernel))

        solver = optax.lbfgs()
        probe = Probes(jnp.zeros((x.shape[1], n_classes)), jnp.zeros(n_classes))
        value_and_gradient = optax.value_and_grad_from_state(loss)

        def step(state: tuple[Probes, Any], _: None) -> tuple[tuple[Probes, Any], None]:
            probe, inner = state
            value, gradient = value_and_gradient(probe, state=inner)
            updates, inner = solver.update(gradient, inner, probe, value=value, grad=gradient, value_fn=loss)
            return (optax.apply_updates(probe, updates), inner), None

        (probe, _), _ = jax.lax.scan(step, (probe, solver.init(probe)), length=steps)
        kernel = probe.kernel / deviation[:, None]
        return Probes(kernel, probe.bias - mean @ kernel)

    return jax.lax.map(layer, acts[site])
