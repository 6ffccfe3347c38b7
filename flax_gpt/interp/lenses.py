"""Reading the residual stream as logits: the logit lens, and which component wrote what of a logit."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_gpt import ops
from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params, Rows, Tokens, check_rows, check_tokens, forward
from flax_gpt.interp.passes import At, OtherTokens, check_at, read_at, unembed
from flax_gpt.model import Block, BlockType


def logit_lens(
    config: GPTConfig,
    params: Params,
    tokens: Tokens,
    *,
    at: At | None = None,
    mask: Rows | None = None,
    compute_dtype: Any = None,
    block: BlockType = Block,
) -> Float[Array, "_ b *t v"]:
    """What the model would say if it stopped after each layer: the final LayerNorm and the unembedding of the stream.

    nostalgebraist 2020, "interpreting GPT: the logit lens".

    Args:
        config, params, tokens, mask, compute_dtype, block: as of `flax_gpt.forward`.
        at: one position, or one for each row, to read: [l + 1, b, v] instead of all of them.

    Returns:
        [l + 1, b, t, v]: entry i after i layers: 0 of the embeddings alone, the last the model's own logits.

    Raises:
        TypeError, ValueError: as `flax_gpt.forward`; or `at` is outside.
    """
    ids, rows, _ = check_rows(config, tokens, mask, None)
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    return _logit_lens(config, params, ids, rows, check_at(at, ids.shape), dtype, block)


@functools.partial(jax.jit, static_argnames=("config", "dtype", "block"))
def _logit_lens(
    config: GPTConfig, params: Params, tokens: Array, mask: Any, at: Array | None, dtype: Any, block: BlockType
) -> Array:
    logits, acts = forward(config, params, tokens, mask=mask, capture=("resid_pre",), compute_dtype=dtype, block=block)
    earlier = jax.lax.map(lambda x: unembed(config, params, read_at(x, at), block), acts["resid_pre"])
    return jnp.concatenate([earlier, read_at(logits, at)[None]])


class LogitParts(NamedTuple):
    """What each component adds to a logit, through the final LayerNorm with the scale that it had in that run.

    Attributes:
        token, position: of the two embeddings.
        heads: of each attention head's z through its part of the output matrix.
        attn_bias: of attention's output bias.
        mlp: of the MLP's hidden layer through its second matrix.
        mlp_bias: of that matrix's bias.
        ln_f_bias: of the final LayerNorm's shift.
    """

    token: Float[Array, "b t"]
    position: Float[Array, "b t"]
    heads: Float[Array, "l h b t"]
    attn_bias: Float[Array, "l b t"]
    mlp: Float[Array, "l b t"]
    mlp_bias: Float[Array, "l b t"]
    ln_f_bias: Float[Array, "b t"]

    def total(self) -> Float[Array, "b t"]:
        """The sum of all parts: the logit."""
        rows = (jnp.sum(x.reshape(-1, *self.token.shape), axis=0) for x in self)
        return sum(rows, jnp.zeros_like(self.token))


def direct_logit_attribution(
    config: GPTConfig,
    params: Params,
    tokens: Tokens,
    targets: OtherTokens,
    *,
    versus: OtherTokens | None = None,
    mask: Rows | None = None,
) -> LogitParts:
    """The logit of a token at each position as a sum over the parts that wrote to the residual stream.

    The stream is the sum of what was written to it, and the final LayerNorm is linear once its standard deviation is
    given (Elhage et al. 2021, "A mathematical framework for transformer circuits"). Of GPT-2's own block, which adds
    to the stream and never changes what is there.

    Args:
        config, params, tokens, mask: as of `flax_gpt.forward`.
        targets: [b, t] or [b, 1]: whose logit, at each position or at all.
        versus: likewise: a token whose logit is subtracted, to ask for a logit difference.

    Returns:
        The parts, which sum to the logit (to 1e-5 in float32).

    Raises:
        TypeError, ValueError: as `flax_gpt.forward`; or targets do not fit the tokens.
    """
    ids, rows, _ = check_rows(config, tokens, mask, None)
    both = []
    for name, given in (("targets", targets), ("versus", versus)):
        if given is None:
            continue
        of_vocabulary = check_tokens(config, given)
        if of_vocabulary.shape not in (ids.shape, (len(ids), 1)):
            raise ValueError(f"{name} has shape {of_vocabulary.shape}, tokens have {ids.shape}")
        both.append(jnp.broadcast_to(of_vocabulary, ids.shape))
    return _attribute(config, params, ids, both[0], both[1] if len(both) > 1 else None, rows)


@functools.partial(jax.jit, static_argnames="config")
def _attribute(
    config: GPTConfig, params: Params, tokens: Array, targets: Array, versus: Array | None, mask: Any
) -> LogitParts:
    _, acts = forward(config, params, tokens, mask=mask, capture=("z", "mlp_out", "resid_post"))
    rows = params["wte"] if config.tie_word_embeddings else params["head"]["kernel"].T
    direction = rows[targets] - (0 if versus is None else rows[versus])  # [b, t, d]
    scaled = direction * params["ln_f"]["scale"]
    last = acts["resid_post"][-1]
    deviation = jnp.sqrt(jnp.var(last, axis=-1, keepdims=True) + config.layer_norm_epsilon)
    # LayerNorm takes the mean off what it reads; taking it off the reader instead comes to the same.
    reader = (scaled - jnp.mean(scaled, axis=-1, keepdims=True)) / deviation

    def read(x: Float[Array, "... d"]) -> Float[Array, "b t"]:
        return jnp.sum(x * reader, axis=-1)

    def layer(of_layer: tuple[Any, Array, Array]) -> tuple[Array, ...]:
        weights, z, mlp_out = of_layer
        out, down = weights["attn"]["out"], weights["mlp"]["down"]
        heads = jnp.einsum("bthk,bthk->hbt", z, jnp.einsum("hkd,btd->bthk", out["kernel"], reader))
        return heads, read(out["bias"]), read(mlp_out - down["bias"]), read(down["bias"])

    heads, attn_bias, mlp, mlp_bias = jax.lax.map(layer, (params["blocks"], acts["z"], acts["mlp_out"]))
    positions = jnp.arange(tokens.shape[1])[None]
    if mask is not None:
        tokens = jnp.where(mask, tokens, 0)
        positions = ops.positions(ops.visible_keys(tokens.shape[1], jnp.asarray(mask).astype(bool)))
    return LogitParts(
        read(params["wte"][tokens]),
        read(params["wpe"][positions]),
        heads,
        attn_bias,
        mlp,
        mlp_bias,
        jnp.sum(direction * params["ln_f"]["bias"], axis=-1),
    )
