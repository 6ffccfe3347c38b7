"""Activation patching and head ablation: every layer, head or position in turn, as one compiled program.

A member of a sweep differs from the plain run from one layer on, so it starts there, from the stream that the plain run
had: a sweep over the heads of all layers costs half of running the whole model for each. What precedes the patched site
within its layer is computed once for all of the layer's members.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from flax_gpt import ops
from flax_gpt.activations import Tap
from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params, Rows, Tokens, check_rows, forward
from flax_gpt.interp.passes import (
    At,
    Metric,
    OtherTokens,
    axis_of,
    bytes_of_a_pass,
    bytes_of_logits,
    check_at,
    check_over,
    check_pair,
    in_chunks,
    read_at,
    run_block,
    unembed,
)
from flax_gpt.model import Block, BlockType

GIBIBYTE = 2**30


def patch_sweep(
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
    max_bytes: int = GIBIBYTE,
) -> Float[Array, "l ..."]:
    """Runs `tokens` with one activation at a time replaced by what it is in a run of `source`.

    Activation patching (Meng et al. 2022, arXiv 2202.05262; Wang et al. 2022, arXiv 2211.00593). With the corrupted
    prompt as `tokens` and the clean one as `source` it shows where what the corruption took away can be put back
    ("denoising"); the other way round, what is needed ("noising").

    Args:
        config, params: the model.
        tokens: [b, t], the run that is patched.
        source: [b, t], aligned with it: the run that the replacements come from.
        metric: logits [b, t, v] (or [b, v], see `at`) to an array of any shape. Static: define it once, since every new
            function object is compiled anew. It may close over traced values inside a function that you jit yourself.
        site: where, one of a block's sites (`flax_gpt.activations`).
        over: "layer", then any of "head" and "position", in the order of the result's axes. Positions of the sites
            attn_scores and pattern are those of queries.
        at: the position to read logits at, for all rows or one for each: the metric then gets [b, v], and the logits of
            the other positions are not computed.
        mask: [b, t], of both runs; see `flax_gpt.forward`.
        compute_dtype: of activations and products, as of `flax_gpt.forward`.
        block: the module of one layer.
        max_bytes: about how much memory to use at a time for the members of the sweep.

    Returns:
        [l, ...]: the metric of each patched run, axes as in `over`, followed by the metric's own.

    Raises:
        TypeError, ValueError: as `flax_gpt.forward`; tokens and source differ in shape, the site has no such axis, or
            `at` is outside.
    """
    ids, others, rows = check_pair(config, tokens, source, mask)
    axes = check_over(site, over)
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    positions = check_at(at, ids.shape)
    return _patch(config, params, ids, others, rows, positions, metric, site, axes, dtype, block, max_bytes)


def ablate_heads(
    config: GPTConfig,
    params: Params,
    tokens: Tokens,
    metric: Metric,
    *,
    kind: str = "mean",
    reference: OtherTokens | None = None,
    key: Key[Array, ""] | None = None,
    at: At | None = None,
    mask: Rows | None = None,
    compute_dtype: Any = None,
    block: BlockType = Block,
    max_bytes: int = GIBIBYTE,
) -> Float[Array, "l h ..."]:
    """Takes one head at a time out of the model: its `z` is replaced by a value that knows nothing of the row.

    Args:
        config, params, tokens, metric, at, mask, compute_dtype, block, max_bytes: as of `patch_sweep`.
        kind: by "zero"; by the "mean" of the head over all rows and positions of the reference; or "resample": by what
            it is in a random row of the reference, position by position (Chan et al. 2022, causal scrubbing).
        reference: [n, t], the rows to take means and samples from; `tokens` by default.
        key: for "resample", which row of the reference each row gets. A row of `tokens` never gets itself.

    Returns:
        [l, h, ...]: the metric without each head.

    Raises:
        TypeError, ValueError: as `patch_sweep`; the kind is unknown, or "resample" has no key, or no other row.
    """
    ids, mask_rows, _ = check_rows(config, tokens, mask, None)
    rows = None if mask_rows is None else jnp.asarray(mask_rows).astype(bool)
    if kind not in ("zero", "mean", "resample"):
        raise ValueError(f"kind must be zero, mean or resample, got {kind!r}")
    others = None if reference is None else check_rows(config, reference, None, None)[0]
    which = None
    if kind == "resample":
        n = len(ids) if others is None else len(others)
        if key is None:
            raise ValueError("resample needs a key, such as jax.random.key(0)")
        if others is None and n < 2:
            raise ValueError("resample needs another row: give several rows of tokens, or a reference")
        if others is not None and others.shape[1] != ids.shape[1]:
            raise ValueError(f"reference rows have {others.shape[1]} tokens, those of tokens {ids.shape[1]}")
        which = jax.random.randint(key, (len(ids),), 0, n)
        if others is None:  # another row than one's own: 1 to n - 1 further on
            which = (jnp.arange(n) + jax.random.randint(key, (n,), 1, n)) % n
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    positions = check_at(at, ids.shape)
    return _ablate(config, params, ids, rows, kind, others, which, positions, metric, dtype, block, max_bytes)


_STATIC = ("config", "metric", "site", "over", "kind", "dtype", "block", "max_bytes")


@functools.partial(jax.jit, static_argnames=[name for name in _STATIC if name != "kind"])
def _patch(
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
    max_bytes: int,
) -> Array:
    # Both runs as one batch: one layer to compile, and its matrices read once.
    b = len(tokens)
    both = jnp.concatenate([tokens, source])
    rows = None if mask is None else jnp.concatenate([mask, mask])
    _, acts = forward(
        config,
        params,
        both,
        mask=rows,
        capture=tuple({"resid_pre", site}),
        compute_dtype=dtype,
        layers="scan",
        block=block,
    )
    sweep = _Sweep(config, params, acts["resid_pre"][:, :b], acts[site][:, b:], mask, at, metric, site, block)
    return sweep.run(over, max_bytes)


@functools.partial(jax.jit, static_argnames=[name for name in _STATIC if name not in ("site", "over")])
def _ablate(
    config: GPTConfig,
    params: Params,
    tokens: Array,
    mask: Array | None,
    kind: str,
    reference: Array | None,
    which: Array | None,
    at: Array | None,
    metric: Metric,
    dtype: Any,
    block: BlockType,
    max_bytes: int,
) -> Array:
    run = functools.partial(
        forward, config, params, capture=("resid_pre", "z"), compute_dtype=dtype, layers="scan", block=block
    )
    _, acts = run(tokens, mask=mask)
    stream = acts["resid_pre"]
    z, counted = acts["z"], jnp.ones(tokens.shape, bool) if mask is None else mask
    if reference is not None:
        _, acts = run(reference)
        z, counted = acts["z"], jnp.ones(reference.shape, bool)
    if kind == "zero":
        replacement = jnp.zeros_like(z[:, :1, :1])
    elif kind == "mean":
        weights = counted / jnp.sum(counted)
        replacement = jnp.einsum("bt,lbthk->lhk", weights, z)[:, None, None].astype(z.dtype)
    else:
        replacement = z[:, which]
    sweep = _Sweep(config, params, stream, replacement, mask, at, metric, "z", block)
    return sweep.run(("layer", "head"), max_bytes)


class _Sweep:
    """One activation at a time replaced, from the stream of a plain run on.

    Args:
        stream: [l, b, t, d], resid_pre of every layer of the plain run.
        replacement: [l, ...], what goes in at the site of each layer; its other axes broadcast to the activation's.
    """

    def __init__(
        self,
        config: GPTConfig,
        params: Params,
        stream: Float[Array, "l b t d"],
        replacement: Float[Array, "l ..."],
        mask: Bool[Array, "b t"] | None,
        at: Int[Array, " b"] | None,
        metric: Metric,
        site: str,
        block: BlockType,
    ) -> None:
        self.config, self.params, self.block = config, params, block
        self.stream, self.replacement = stream, replacement
        self.visible = None if mask is None else ops.visible_keys(mask.shape[1], mask)
        self.at, self.metric, self.site = at, metric, site

    def run(self, over: tuple[str, ...], max_bytes: int) -> Array:
        """[l, ...], axes as in `over` and then the metric's."""
        l, b, t, d = self.stream.shape  # noqa: E741
        sizes = {"head": self.config.n_head, "position": t}
        within = tuple(sizes[name] for name in over[1:])
        members = dict(zip(over[1:], jnp.unravel_index(jnp.arange(math.prod(within)), within), strict=True))
        members["every"] = jnp.zeros(math.prod(within), jnp.int32)  # where there is but one member a layer
        read = (b,) if self.at is not None else (b, t)

        def chunk(which: dict[str, Array]) -> Array:
            """The metric of some members of every layer, [c, l, ...]."""
            x = self.walk(which)  # [l, c, b, t, d]
            x = jax.vmap(jax.vmap(lambda x: read_at(x, self.at)))(x)
            values = in_chunks(
                jax.vmap(self.measure), x.reshape(-1, *x.shape[2:]), bytes_of_logits(self.config, read), max_bytes
            )
            return jnp.moveaxis(values.reshape(*x.shape[:2], *values.shape[1:]), 0, 1)

        each = bytes_of_a_pass(self.config, (b, t)) + 8 * l * b * t * d
        values = jnp.moveaxis(in_chunks(chunk, members, each, max_bytes), 0, 1)
        return values.reshape(l, *within, *values.shape[2:])

    def walk(self, which: dict[str, Int[Array, " c"]]) -> Float[Array, "l c b t d"]:
        """The streams that leave the last block, each patched in another layer.

        Layer by layer, which takes one copy of a layer's parameters for all members; those that are patched further on
        are not there yet, and cost nothing.
        """
        config, block, l = self.config, self.block, len(self.stream)  # noqa: E741
        c = len(which["every"])

        def layer(streams: Array, of_layer: tuple[Any, Array, Array, Array]) -> tuple[Array, None]:
            params, index, x, new = of_layer

            def on(member: tuple[Array, Array]) -> Array:
                patched_in, xs = member
                through = jax.vmap(lambda x: run_block(config, block, params, x, self.visible))
                return jax.lax.cond(patched_in < index, through, lambda xs: xs, xs)

            streams = jax.lax.map(on, (jnp.arange(l), streams))
            begun = jax.vmap(lambda which: run_block(config, block, params, x, self.visible, self.patch(which, new)))(
                which
            )
            return jax.lax.dynamic_update_index_in_dim(streams, begun, index, 0), None

        start = jnp.zeros((l, c, *self.stream.shape[1:]), self.stream.dtype)
        per_layer = (self.params["blocks"], jnp.arange(l), self.stream, self.replacement)
        return jax.lax.scan(layer, start, per_layer)[0]

    def patch(self, which: dict[str, Int[Array, ""]], new: Array) -> Tap:
        """The tap that puts `new` in at the site: at one head, at one position, or everywhere."""

        def tap(site: str, value: Array) -> Array:
            if site != self.site:
                return value
            chosen = jnp.ones((), bool)
            for name in ("head", "position"):
                if name in which:
                    axis = axis_of(site, name)
                    here = jnp.arange(value.shape[axis]) == which[name]
                    chosen = chosen & here.reshape([-1 if i == axis else 1 for i in range(value.ndim)])
            return jnp.where(chosen, new, value)

        return tap

    def measure(self, x: Float[Array, "b *t d"]) -> Array:
        """The metric of a stream that leaves the last block."""
        return jnp.asarray(self.metric(unembed(self.config, self.params, x, self.block)))
