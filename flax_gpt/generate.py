"""Text from a model: sampling, token by token, in one compiled program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params, check_tokens, forward
from flax_gpt.model import Block, BlockType

Prompts: TypeAlias = Sequence[Sequence[int]] | Sequence[np.ndarray] | np.ndarray | Int[Array, "b t"]


class Generation(NamedTuple):
    """What `generate` wrote.

    Attributes:
        tokens: the new tokens, without the prompt; 0 after a row's end.
        lengths: how many of them each row has, the stop id included.
    """

    tokens: Int[Array, "b new"]
    lengths: Int[Array, " b"]


def generate(
    config: GPTConfig,
    params: Params,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    lengths: Sequence[int] | np.ndarray | None = None,
    temperature: float | Float[Array, " b"] = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Key[Array, ""] | None = None,
    stop_ids: Sequence[int] = (),
    sliding: bool = False,
    compute_dtype: Any = None,
    block: BlockType = Block,
) -> Generation:
    """Continues prompts, one token after another, each drawn from softmax(logits / temperature) after filtering.

    It compiles once for a config, a number of prompts, a max_new_tokens and a range of 64 prompt lengths; temperature,
    top_k, top_p and key compile nothing. Row i draws from key and i alone, whatever stands in the other rows.

    Args:
        config, params: the model.
        prompts: lists of ids, of any lengths above 0; or a padded array [b, t] with `lengths`.
        max_new_tokens: how many tokens to write, unless a stop id comes first.
        lengths: of the rows of a padded array; what stands after them does not matter.
        temperature: below 1 sharpens, above 1 flattens; 0 always takes the most likely token. A number, or one a row.
        top_k: draw from the k most likely tokens only; None, 0 or more than there are is no filter.
        top_p: draw from the smallest set of most likely tokens whose probabilities, after temperature and top_k, add up
            to at least p; 1 or None is no filter.
        key: for the draws; may be None where temperature is 0.
        stop_ids: a row ends with the first of these.
        sliding: beyond n_positions, go on with the last n_positions tokens as context, their positions counted anew.
        compute_dtype, block: as of `forward`.

    Returns:
        The new tokens and how many each row has.

    Raises:
        ValueError: an empty prompt, an id out of range, settings out of range, no key at a temperature above 0, or
            prompt and new tokens that exceed n_positions together while `sliding` is off.
    """
    tokens, row_lengths = _pad(config, prompts, lengths)
    _check_settings(max_new_tokens, temperature, top_k, top_p, key)
    b, longest = len(row_lengths), int(row_lengths.max())
    if not sliding and longest + max_new_tokens > config.n_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed n_positions={config.n_positions}; "
            "ask for fewer, or for a sliding context"
        )
    # In steps of 64, so that prompts of many lengths share a compilation.
    width = min(config.n_positions, -(-(longest + max_new_tokens) // 64) * 64)
    window = np.zeros((b, width), np.int32)
    kept = np.minimum(row_lengths, width)
    for row, (length, keep) in enumerate(zip(row_lengths, kept, strict=True)):
        window[row, :keep] = tokens[row, length - keep : length]
    return _generate(
        config,
        params,
        jnp.asarray(window),
        jnp.asarray(kept, jnp.int32),
        jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (b,)),
        jnp.asarray(top_k or config.vocab_size, jnp.int32),
        jnp.asarray(1.0 if top_p is None else top_p, jnp.float32),
        jax.random.key(0) if key is None else key,
        jnp.asarray(list(stop_ids), jnp.int32),
        max_new_tokens,
        None if compute_dtype is None else jnp.dtype(compute_dtype),
        block,
    )


Carry: TypeAlias = tuple[Array, Array, Array, Array, Array, Array]


@functools.partial(jax.jit, static_argnames=("config", "max_new_tokens", "compute_dtype", "block"))
def _generate(
    config: GPTConfig,
    params: Params,
    window: Int[Array, "b p"],
    lengths: Int[Array, " b"],
    temperature: Float[Array, " b"],
    top_k: Int[Array, ""],
    top_p: Float[Array, ""],
    key: Key[Array, ""],
    stop_ids: Int[Array, " stop"],
    max_new_tokens: int,
    compute_dtype: Any,
    block: BlockType,
) -> Generation:
    b, p = window.shape
    rows = jnp.arange(b)
    row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)

    def unfinished(carry: Carry) -> Array:
        step, _, _, _, _, done = carry
        return (step < max_new_tokens) & ~jnp.all(done)

    def write_one(carry: Carry) -> Carry:
        step, window, lengths, written, counts, done = carry
        # Tokens stand at the left of the window; what is right of a row's length is never seen from inside it.
        logits = forward(config, params, window, compute_dtype=compute_dtype, block=block)[rows, lengths - 1]
        step_keys = jax.vmap(lambda key: jax.random.fold_in(key, step))(row_keys)
        new = sample(logits, step_keys, temperature, top_k, top_p)
        new = jnp.where(done, 0, new)
        window = jnp.where((lengths == p)[:, None], jnp.roll(window, -1, axis=1), window)
        lengths = jnp.minimum(lengths + 1, p)
        window = window.at[rows, lengths - 1].set(new)
        written = written.at[:, step].set(new)
        counts = counts + ~done
        return step + 1, window, lengths, written, counts, done | jnp.isin(new, stop_ids)

    carry = (
        jnp.zeros((), jnp.int32),
        window,
        lengths,
        jnp.zeros((b, max_new_tokens), jnp.int32),
        jnp.zeros(b, jnp.int32),
        jnp.zeros(b, bool),
    )
    _, _, _, written, counts, _ = jax.lax.while_loop(unfinished, write_one, carry)
    return Generation(written, counts)


def sample(
    logits: Float[Array, "b v"],
    keys: Key[Array, " b"],
    temperature: Float[Array, " b"],
    top_k: Int[Array, ""] | int,
    top_p: Float[Array, ""] | float,
) -> Int[Array, " b"]:
    """Draws a token a row: temperature, then top-k, then top-p, then the draw; the likeliest where temperature is 0."""
    cold = temperature == 0
    scaled = logits / jnp.where(cold, 1, temperature)[:, None]
    filtered = jnp.where(kept_tokens(scaled, top_k, top_p), scaled, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, filtered)
    return jnp.where(cold, jnp.argmax(logits, axis=-1), drawn)


def kept_tokens(
    logits: Float[Array, "b v"], top_k: Int[Array, ""] | int, top_p: Float[Array, ""] | float
) -> Bool[Array, "b v"]:
    """The tokens that top-k and top-p (Holtzman et al. 2019, arXiv 1904.09751, section 3.1) leave to draw from.

    At least the most likely one always stays; of equally likely ones the lower id stays first.
    """
    order = jnp.argsort(-logits, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    in_order = jnp.take_along_axis(logits, order, axis=-1)
    v = logits.shape[-1]
    among_k = jnp.arange(v) < jnp.where(top_k > 0, top_k, v)
    probabilities = jax.nn.softmax(jnp.where(among_k, in_order, -jnp.inf), axis=-1)
    # A token stays while those before it have not reached p, to within the rounding of their sum.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = among_k & (before < top_p - 1e-6) | (jnp.arange(v) == 0)
    kept = jnp.where(top_p >= 1, among_k, kept)
    return jnp.take_along_axis(kept, rank, axis=-1)


def _pad(config: GPTConfig, prompts: Any, lengths: Any) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as an array padded on the right, with the lengths of its rows; checked."""
    if lengths is None:
        rows = [np.asarray(prompt).reshape(-1) for prompt in prompts]
        lengths = [len(row) for row in rows]
        if not rows or min(lengths) == 0:
            raise ValueError("each prompt needs at least one token, and there must be at least one prompt")
        prompts = np.zeros((len(rows), max(lengths)), np.asarray(rows[0]).dtype)
        for row, ids in enumerate(rows):
            prompts[row, : len(ids)] = ids
    tokens, lengths = np.asarray(prompts), np.asarray(lengths)
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        raise ValueError(f"prompts of shape {tokens.shape} and lengths of shape {lengths.shape} do not fit")
    if lengths.min() < 1 or lengths.max() > tokens.shape[1]:
        raise ValueError(f"lengths must be from 1 to {tokens.shape[1]}, got {lengths.tolist()}")
    check_tokens(config, tokens, np.arange(tokens.shape[1]) < lengths[:, None])
    return tokens, lengths


def _check_settings(max_new_tokens: int, temperature: Any, top_k: int | None, top_p: float | None, key: Any) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not np.all(np.isfinite(temperature)) or np.any(np.asarray(temperature) < 0):
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
    if top_k is not None and top_k < 0:
        raise ValueError(f"top_k must not be negative, got {top_k}")
    if top_p is not None and not 0 <= top_p <= 1:
        raise ValueError(f"top_p must be from 0 to 1, got {top_p}")
    if key is None and np.any(np.asarray(temperature) > 0):
        raise ValueError("drawing at a temperature above 0 needs a key, such as jax.random.key(0)")
