"""What heads look at, and what their matrices say."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params, Rows, Tokens, check_rows, forward
from flax_gpt.interp.passes import one_layer
from flax_gpt.model import Block, BlockType


class HeadScores(NamedTuple):
    """How much of its attention each head gives to certain places, from 0 to 1; see `head_scores`."""

    previous_token: Float[Array, "l h"]
    duplicate_token: Float[Array, "l h"]
    induction: Float[Array, "l h"]


def head_scores(
    config: GPTConfig,
    params: Params,
    tokens: Tokens,
    *,
    mask: Rows | None = None,
    compute_dtype: Any = None,
    block: BlockType = Block,
) -> HeadScores:
    """The share of attention that each head gives to the token before, to earlier copies, and to what followed them.

    Olsson et al. 2022 (arXiv 2209.11895): the last is the prefix-matching score. Means over all positions that have
    such a place to look at; sequences that repeat random tokens show most.

    Args: as of `flax_gpt.forward`.

    Returns:
        [l, h] each; NaN where no position has such a place.

    Raises:
        TypeError, ValueError: as `flax_gpt.forward`.
    """
    ids, rows, _ = check_rows(config, tokens, mask, None)
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    return _head_scores(config, params, ids, rows, dtype, block)


@functools.partial(jax.jit, static_argnames=("config", "dtype", "block"))
def _head_scores(
    config: GPTConfig, params: Params, tokens: Array, mask: Any, dtype: Any, block: BlockType
) -> HeadScores:
    _, acts = forward(config, params, tokens, mask=mask, capture="pattern", compute_dtype=dtype, block=block)
    real = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask).astype(bool)

    def share(places: Bool[Array, "b t s"]) -> Float[Array, "l h"]:
        """Attention to the places, over the queries that have any."""
        asked = jnp.any(places, axis=-1)
        return jnp.einsum("lbhts,bts->lh", acts["pattern"], places.astype(jnp.float32)) / jnp.sum(asked)

    return HeadScores(*(share(places) for places in places_to_look_at(tokens, real)))


def places_to_look_at(
    tokens: Int[Array, "b t"], mask: Bool[Array, "b t"]
) -> tuple[Bool[Array, "b t s"], Bool[Array, "b t s"], Bool[Array, "b t s"]]:
    """For each query, the keys that are the token before it, that are earlier copies of it, and that follow those."""
    t = tokens.shape[1]
    pairs = mask[:, :, None] & mask[:, None, :]
    before = jnp.eye(t, k=-1, dtype=bool) & pairs
    copies = (tokens[:, :, None] == tokens[:, None, :]) & jnp.tri(t, k=-1, dtype=bool) & pairs
    # What follows a copy at s is s + 1; of a token right after its own copy that is the token itself, which is no place
    # to look something up.
    follows = jnp.pad(copies[:, :, :-1], ((0, 0), (0, 0), (1, 0))) & jnp.tri(t, k=-1, dtype=bool) & pairs
    return before, copies, follows


def qk_circuit(params: Params, layer: int | Int[Array, ""], head: int | Int[Array, ""]) -> Float[Array, "d d"]:
    """Which directions of the stream (rows: of the query's, columns: of the key's) attend to each other.

    W_Q W_K^T / sqrt(k): a score is x_query (this) x_key^T, where x is what attention reads, the stream after ln_1,
    whose scale `fold_layer_norm` brings in. Biases are left out (Elhage et al. 2021).
    """
    kernel = one_layer(params, layer)["attn"]["qkv"]["kernel"]  # [d, 3, h, k]
    q, k = kernel[:, 0, head], kernel[:, 1, head]
    return q @ k.T / jnp.sqrt(q.shape[-1])


def ov_circuit(params: Params, layer: int | Int[Array, ""], head: int | Int[Array, ""]) -> Float[Array, "d d"]:
    """What a head writes (columns) for what it reads (rows) at the place that it attends to: W_V W_O.

    Elhage et al. 2021. Row vectors: it writes x (this), x being the stream after ln_1. Biases are left out.
    """
    attn = one_layer(params, layer)["attn"]
    return attn["qkv"]["kernel"][:, 2, head] @ attn["out"]["kernel"][head]


@functools.partial(jax.jit, static_argnames="config")
def copying_scores(config: GPTConfig, params: Params) -> Float[Array, "l h"]:
    """How much each head raises the logit of the very token it attends to, from -1 to 1.

    sum(eigenvalues) / sum(|eigenvalues|) of the full circuit from tokens to logits, W_E W_V W_O W_U (Elhage et al.
    2021), computed from the k x k matrix that has the same non-zero eigenvalues. LayerNorms are left out; apply
    `fold_layer_norm` first to have their scales in. It runs where JAX has non-symmetric eigenvalues, on a CPU for sure.
    """
    unembedding = params["wte"].T if config.tie_word_embeddings else params["head"]["kernel"]
    table = unembedding @ params["wte"]  # [d, d]: from the stream to logits and, by the embedding, back
    attn = params["blocks"]["attn"]
    small = jnp.einsum("lhkd,de,lehj->lhkj", attn["out"]["kernel"], table, attn["qkv"]["kernel"][:, :, 2])
    values = jnp.linalg.eigvals(small)
    return jnp.sum(values.real, axis=-1) / jnp.sum(jnp.abs(values), axis=-1)


class Composition(NamedTuple):
    """How much of what an earlier head (first two axes) writes enters a later one (last two); see `composition`."""

    q: Float[Array, "l h l h"]
    k: Float[Array, "l h l h"]
    v: Float[Array, "l h l h"]


@jax.jit
def composition(params: Params) -> Composition:
    """|A B| / (|A| |B|), Frobenius norms, for A what an earlier head writes and B what a later head reads with.

    Elhage et al. 2021, section "Two-layer attention-only transformers": A is the OV circuit of the earlier head, and B
    is the later one's QK circuit (for Q-composition), its transpose (K), or its OV circuit (V). Random matrices give
    about 1 / sqrt(d).

    Returns:
        [l, h, l, h] each: earlier layer and head, later layer and head; 0 where the first is not earlier.
    """
    attn = params["blocks"]["attn"]
    q, k, v = (attn["qkv"]["kernel"][:, :, i] for i in range(3))  # [l, d, h, k]
    out = attn["out"]["kernel"]  # [l, h, k, d]
    gram = {name: jnp.einsum("ldhj,ldhk->lhjk", x, x) for name, x in (("q", q), ("k", k), ("v", v))}
    gram["out"] = jnp.einsum("lhjd,lhkd->lhjk", out, out)

    def norm(left: Array, right: Array) -> Float[Array, "l h"]:
        """|X Y| of each head, from X^T X and Y Y^T."""
        return jnp.sqrt(jnp.einsum("lhjk,lhkj->lh", left, right))

    def composed(reads: Array, onward: Array, size: Array) -> Float[Array, "l h l h"]:
        """|V (O R) S| over both norms, for R what the later head reads with and S S^T = `onward`."""
        between = jnp.einsum("lhjd,mdik->lhmijk", out, reads)
        square = jnp.einsum("lhja,lhmiab,mibc,lhmijc->lhmi", gram["v"], between, onward, between, optimize=True)
        earlier = jnp.arange(len(q))[:, None] < jnp.arange(len(q))[None]
        scores = jnp.sqrt(jnp.maximum(square, 0)) / (norm(gram["v"], gram["out"])[:, :, None, None] * size)
        return jnp.where(earlier[:, None, :, None], scores, 0)

    of_qk, of_ov = norm(gram["q"], gram["k"]), norm(gram["v"], gram["out"])
    return Composition(composed(q, gram["k"], of_qk), composed(k, gram["q"], of_qk), composed(v, gram["out"], of_ov))
