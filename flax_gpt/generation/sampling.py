"""What is drawn from a model's logits: penalties, temperature, the filters top-k, top-p and min-p, the draw.

The order is Hugging Face's: logit bias, repetition penalty, temperature, top-k, top-p, min-p. Every setting is an array
with an entry a row, so that rows may differ and no change of a value compiles anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from flax_gpt import ops

PerRow: TypeAlias = float | int | Sequence[float | int] | np.ndarray | Float[Array, " b"]


class Sampling(NamedTuple):
    """How to draw in each row; see `make_sampling` for what the settings mean."""

    temperature: Float[Array, " b"]
    top_k: Int[Array, " b"]
    top_p: Float[Array, " b"]
    min_p: Float[Array, " b"]
    repetition_penalty: Float[Array, " b"]
    logit_bias: Float[Array, "b v"]


def make_sampling(
    b: int,
    vocab_size: int,
    temperature: PerRow = 1.0,
    top_k: int | Sequence[int] | np.ndarray | Int[Array, " b"] | None = None,
    top_p: PerRow | None = None,
    min_p: PerRow | None = None,
    repetition_penalty: PerRow | None = None,
    logit_bias: Mapping[int, float] | np.ndarray | Float[Array, "..."] | None = None,
    drawable: int | None = None,
) -> Sampling:
    """Settings, each a number or one a row, for `b` rows.

    Args:
        b: how many rows.
        vocab_size: of the model.
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: draw from the k most likely tokens; None, 0 or more than there are is no filter.
        top_p: draw from the smallest set of most likely tokens whose probabilities add up to at least p (Holtzman et
            al. 2019, arXiv 1904.09751); None or 1 is no filter.
        min_p: draw from the tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024, arXiv
            2407.01082); None or 0 is no filter.
        repetition_penalty: logits of tokens that the row holds, its prompt included, are divided by it where positive,
            multiplied where negative (Keskar et al. 2019, arXiv 1909.05858); None or 1 is none.
        logit_bias: added to the logits: {id: bias}, or an array [v] or [b, v]; -inf bans a token.
        drawable: ids from here on are banned: those of a vocabulary filled up beyond its tokenizer's.

    Raises:
        ValueError: a setting is out of its range, or has another number of entries than there are rows.
    """
    return Sampling(
        _per_row("temperature", temperature, b, lambda x: np.isfinite(x) & (x >= 0), "finite and not negative"),
        _per_row("top_k", 0 if top_k is None else top_k, b, lambda x: x >= 0, "not negative", np.int32),
        _per_row("top_p", 1.0 if top_p is None else top_p, b, lambda x: (x >= 0) & (x <= 1), "from 0 to 1"),
        _per_row("min_p", 0.0 if min_p is None else min_p, b, lambda x: (x >= 0) & (x <= 1), "from 0 to 1"),
        _per_row(
            "repetition_penalty",
            1.0 if repetition_penalty is None else repetition_penalty,
            b,
            lambda x: np.isfinite(x) & (x > 0),
            "finite and above 0",
        ),
        jnp.where(jnp.arange(vocab_size) < (drawable or vocab_size), _bias(logit_bias, b, vocab_size), -jnp.inf),
    )


def _per_row(name: str, value: Any, b: int, valid: Any, rule: str, dtype: Any = np.float32) -> Array:
    if isinstance(value, jax.core.Tracer):  # under vmap, say: its values cannot be seen
        return jnp.broadcast_to(value.astype(dtype), (b,))
    array = np.asarray(value)
    if not np.all(valid(array)):
        raise ValueError(f"{name} must be {rule}, got {value}")
    if array.shape not in ((), (b,)):
        raise ValueError(f"{name} must be a number or one for each of {b} rows, got shape {array.shape}")
    return jnp.asarray(np.broadcast_to(array, (b,)), dtype)


def _bias(logit_bias: Any, b: int, v: int) -> Array:
    if logit_bias is None:
        return jnp.zeros((b, v))
    if isinstance(logit_bias, Mapping):
        if outside := [i for i in logit_bias if not 0 <= i < v]:
            raise ValueError(f"logit_bias names the token id {outside[0]}, outside the vocabulary of {v}")
        bias = np.zeros(v, np.float32)
        bias[list(logit_bias)] = list(logit_bias.values())
        logit_bias = bias
    if logit_bias.shape not in ((v,), (b, v)):
        raise ValueError(f"logit_bias must have shape ({v},) or ({b}, {v}), got {logit_bias.shape}")
    return jnp.broadcast_to(jnp.asarray(logit_bias, jnp.float32), (b, v))


def sample(
    logits: Float[Array, "b v"], keys: Key[Array, " b"], sampling: Sampling, seen: Bool[Array, "b v"]
) -> Int[Array, " b"]:
    """Draws a token a row; the likeliest, of equally likely ones the first, where the temperature is 0.

    Args:
        logits: of the model.
        keys: one a row.
        sampling: the settings.
        seen: which tokens a row holds, for the repetition penalty.
    """
    logits = adjusted_logits(logits, sampling, seen)
    cold = sampling.temperature == 0

    def draw() -> Array:
        # In float32 whatever the model's precision: the filters look at the bits.
        scaled = (logits / jnp.where(cold, 1, sampling.temperature)[:, None]).astype(jnp.float32)
        filtering = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
        kept = jax.lax.cond(
            jnp.any(filtering & ~cold),
            lambda: kept_tokens(scaled, sampling.top_k, sampling.top_p, sampling.min_p),
            lambda: jnp.ones(scaled.shape, bool),
        )
        return jax.vmap(jax.random.categorical)(keys, jnp.where(kept, scaled, -jnp.inf)).astype(jnp.int32)

    likeliest = ops.first_largest(logits)
    return jax.lax.cond(jnp.all(cold), lambda: likeliest, lambda: jnp.where(cold, likeliest, draw()))


def adjusted_logits(logits: Float[Array, "b v"], sampling: Sampling, seen: Bool[Array, "b v"]) -> Float[Array, "b v"]:
    """Logits with bias and repetition penalty."""
    logits = logits + sampling.logit_bias
    penalty = sampling.repetition_penalty[:, None]
    return jnp.where(seen & (penalty != 1), jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def kept_tokens(
    logits: Float[Array, "b v"],
    top_k: Int[Array, " b"],
    top_p: Float[Array, " b"],
    min_p: Float[Array, " b"],
) -> Bool[Array, "b v"]:
    """The tokens that top-k, then top-p of what that leaves, then min-p leave to draw from.

    At least the most likely one always stays; of equally likely ones the lower id stays first. Nothing is sorted, which
    takes longer than all else for a large vocabulary: the least logit that stays is found by bisection over the 2^32
    values that a float32 may have, and then, of the tokens with that very logit, the last id.
    """
    v = logits.shape[-1]
    ranks = _order_preserving(logits)
    everything = jnp.ones(logits.shape, logits.dtype)
    limit = jnp.where(top_k > 0, jnp.minimum(top_k, v), v)
    kept = _until(ranks, everything, limit.astype(logits.dtype) - 0.5)
    probabilities = jax.nn.softmax(jnp.where(kept, logits, -jnp.inf), axis=-1)
    # p is reached to within the rounding of the sum.
    enough = jnp.where(top_p >= 1, jnp.inf, jnp.maximum(top_p - 1e-6, 0))
    kept &= _until(ranks, probabilities, enough)
    least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)[:, None]
    # A share of exactly 1 keeps the likeliest, whose own logit passes no comparison that rounds.
    return kept & ((logits >= least) | (logits == jnp.max(logits, axis=-1, keepdims=True)))


def _order_preserving(x: Float[Array, "b v"]) -> Int[Array, "b v"]:
    """float32 as int32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.int32)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _until(ranks: Int[Array, "b v"], weights: Float[Array, "b v"], enough: Float[Array, " b"]) -> Bool[Array, "b v"]:
    """The first tokens, in falling order of rank and rising order of id, up to the one whose weight brings their sum
    above `enough`; all, where it is never reached.
    """
    least = _bisect(
        lambda rank: jnp.sum(jnp.where(ranks >= rank[:, None], weights, 0), axis=-1) > enough,
        jnp.full(enough.shape, jnp.iinfo(jnp.int32).min),
        jnp.full(enough.shape, jnp.iinfo(jnp.int32).max),
    )
    above, at = ranks > least[:, None], ranks == least[:, None]
    left = enough - jnp.sum(jnp.where(above, weights, 0), axis=-1)
    ids = jnp.arange(ranks.shape[-1])
    # As a rank that falls with the id, so that the same search finds it.
    last = -_bisect(
        lambda negative: jnp.sum(jnp.where(at & (ids <= -negative[:, None]), weights, 0), axis=-1) > left,
        jnp.full(enough.shape, -ids[-1]),
        jnp.zeros(enough.shape, jnp.int32),
    )
    return above | (at & (ids <= last[:, None]))


def _bisect(holds: Any, low: Int[Array, " b"], high: Int[Array, " b"]) -> Int[Array, " b"]:
    """The largest integer from low to high at which `holds` is true, for it holds below any such; low, if nowhere."""

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # The mean, rounded up, of two int32 whose sum may not be one.
        middle = (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)
        yes = holds(middle)
        return jnp.where(yes, middle, low), jnp.where(yes, high, middle - 1)

    return jax.lax.fori_loop(0, 32, halve, (low, high))[0]
