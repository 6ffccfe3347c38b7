"""The array maths of GPT-2 as pure functions: no parameters held, no state, every function usable alone.

Axes carry the same letters everywhere, in annotations, einsums and prose:

    b  batch             t  query position    s  key position      d  model width (n_embd)
    h  attention heads   k  width of a head   f  MLP width         v  vocabulary
    l  layers            n  member of a sweep or an ensemble

Precision: a function computes in the dtype of its first argument and returns it, except where float32 is needed
whatever comes in: matrix products accumulate in float32, and LayerNorm's statistics, GELU, softmax, attention scores
and the cross entropy are float32 throughout ("float32" always means: or float64, where the operands are float64).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from flax_gpt.activations import Tap, no_tap


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype to accumulate in: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def einsum(equation: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """The matrix product of the package: `jnp.einsum` that accumulates, and returns, in at least float32.

    Every contraction goes through here, so that no product of bfloat16 operands is ever rounded on the way.
    """
    return jnp.einsum(equation, x, y, preferred_element_type=at_least_float32(jnp.result_type(x, y)))


def linear(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    bias: Float[Array, "..."] | None = None,
    *,
    n_in: int = 1,
) -> Float[Array, "..."]:
    """Affine map y = x W + b over the last `n_in` axes of x.

    Args:
        x: [..., *inputs], where `inputs` are `n_in` axes.
        kernel: [*inputs, *outputs]: the kernel of attention's output projection, say, is [h, k, d], with n_in=2.
        bias: [*outputs], or None.
        n_in: how many axes of x are contracted.

    Returns:
        [..., *outputs] in the dtype of x; kernel and bias are cast to it, the sum is taken in at least float32.
    """
    batch, inputs = x.shape[: x.ndim - n_in], x.shape[x.ndim - n_in :]
    if inputs != kernel.shape[:n_in]:
        raise ValueError(f"x of shape {x.shape} does not fit a kernel of shape {kernel.shape} with n_in={n_in}")
    y = jax.lax.dot_general(
        x,
        kernel.astype(x.dtype),
        ((tuple(range(len(batch), x.ndim)), tuple(range(n_in))), ((), ())),
        preferred_element_type=at_least_float32(x.dtype),
    )
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*b d"], scale: Float[Array, " d"], bias: Float[Array, " d"], epsilon: float = 1e-5
) -> Float[Array, "*b d"]:
    """LayerNorm, (x - mean) / sqrt(variance + epsilon) * scale + bias over the last axis.

    Ba, Kiros and Hinton 2016 (arXiv 1607.06450), equation 4. The variance is the population's (divided by d), and is
    taken in a second pass over x - mean: mean(x^2) - mean(x)^2 loses all its digits where the mean is large.
    """
    y = x.astype(at_least_float32(x.dtype))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    return (y * scale.astype(y.dtype) + bias.astype(y.dtype)).astype(x.dtype)


def gelu(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """GPT-2's GELU, the tanh approximation: x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).

    Hendrycks and Gimpel 2016 (arXiv 1606.08415), section 2. It is within 4.7324e-4 of `gelu_exact` everywhere.
    """
    y = x.astype(at_least_float32(x.dtype))
    y = 0.5 * y * (1.0 + jnp.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * y**3)))
    return y.astype(x.dtype)


def gelu_exact(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """GELU itself: x * Phi(x), with Phi the standard normal distribution function (arXiv 1606.08415, section 2)."""
    y = x.astype(at_least_float32(x.dtype))
    # erfc and not 1 + erf: far on the negative side the latter is a difference of equal numbers.
    return (0.5 * y * jax.lax.erfc(-y * math.sqrt(0.5))).astype(x.dtype)


def identity(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Returns x: no non-linearity, to show what a block is without one."""
    return x


# By Hugging Face's names for them.
ACTIVATION_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu_new": gelu,
    "gelu_pytorch_tanh": gelu,
    "gelu": gelu_exact,
    "relu": jax.nn.relu,
    "linear": identity,
}


def dropout(x: Float[Array, "*b"], rate: float, key: Key[Array, ""] | None) -> Float[Array, "*b"]:
    """Sets each entry of x to 0 with probability `rate`, independently, and scales the others by 1 / (1 - rate).

    Srivastava et al. 2014 (JMLR 15), in its inverted form: the expectation of the result is x.

    Raises:
        ValueError: the rate is not in [0, 1), or it is above 0 and there is no key.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"the dropout rate must be at least 0 and below 1, got {rate}")
    if rate == 0:
        return x
    if key is None:
        raise ValueError(f"dropout at rate {rate} needs a key, such as jax.random.key(0); got None")
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def visible_keys(
    t: int, mask: Bool[Array, "b t"] | None = None, segment_ids: Int[Array, "b t"] | None = None
) -> Bool[Array, "#b t t"]:
    """Which keys (last axis) each query may attend to: no later one, no padding, none of another segment.

    Args:
        t: length of the sequence.
        mask: True at tokens, False at padding, which may stand anywhere.
        segment_ids: the document that each position belongs to, where several are packed into a row.

    Returns:
        [b, t, s], or [1, t, s] where neither mask nor segment_ids is given. A padding query sees nothing.
    """
    visible = jnp.tri(t, dtype=bool)[None]
    if mask is not None:
        visible = visible & mask[:, None, :] & mask[:, :, None]
    if segment_ids is not None:
        visible = visible & (segment_ids[:, None, :] == segment_ids[:, :, None])
    return visible


def positions(visible: Bool[Array, "#b t s"]) -> Int[Array, "#b t"]:
    """The position of each token: how many earlier ones it sees.

    That counts from 0 at the first token of a row however it is padded, and anew in each packed segment.
    """
    return jnp.maximum(jnp.sum(visible, axis=-1) - 1, 0)


def masked_softmax(scores: Float[Array, "*b s"], visible: Bool[Array, "*#b s"]) -> Float[Array, "*b s"]:
    """Softmax over the visible entries of the last axis; the others are exactly 0.

    A row with no visible entry is 0 throughout, and so is its gradient, where a plain softmax would give NaN or spread
    the weight over entries that were to be ignored.
    """
    scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    weights = jnp.where(visible, weights, 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def causal_attention(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b s h k"],
    v: Float[Array, "b s h k"],
    visible: Bool[Array, "#b t s"] | None = None,
    *,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    tap: Tap = no_tap,
) -> Float[Array, "b t h k"]:
    """Scaled dot-product attention in each head: softmax(q k^T / sqrt(k)) v over the visible keys.

    Vaswani et al. 2017 (arXiv 1706.03762), equation 1. Scores and pattern are float32.

    Args:
        q, k, v: queries, keys, values.
        visible: which keys each query may attend to (see `visible_keys`); None is plain causality, for t = s.
        dropout_rate, dropout_key: dropout on the pattern, an independent mask for every row, head, query and key.
        tap: called at the sites attn_scores (before masking) and pattern (before dropout), both [b, h, t, s].

    Returns:
        The weighted values z in the dtype of v; 0 for a query that sees no key.
    """
    if visible is None:
        if q.shape[1] != k.shape[1]:
            raise ValueError(f"{q.shape[1]} queries and {k.shape[1]} keys need `visible` to say who sees whom")
        visible = visible_keys(q.shape[1])
    scores = tap("attn_scores", einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1]))
    pattern = tap("pattern", masked_softmax(scores, visible[:, None]))
    if dropout_rate > 0:
        pattern = dropout(pattern, dropout_rate, dropout_key)
    return einsum("bhts,bshk->bthk", pattern.astype(v.dtype), v).astype(v.dtype)


def cross_entropy(logits: Float[Array, "*b v"], targets: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """Negative log-likelihood of each target, -log softmax(logits)[target], in nats; float32 whatever comes in.

    A target outside [0, v) has no likelihood: its entry is NaN, and its gradient is that of the normaliser alone.
    Select the entries that count with `jnp.where` before summing, and neither reaches the sum.
    """
    logits = logits.astype(at_least_float32(logits.dtype))
    return jax.nn.logsumexp(logits, axis=-1) - _take(logits, targets)


def _take(logits: Float[Array, "*b v"], targets: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """Each target's logit; NaN for a target outside [0, v)."""
    targets = jnp.where(targets < 0, logits.shape[-1], targets)  # negative indices would count from the end
    return jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]


def first_largest(logits: Float[Array, "*b v"]) -> Int[Array, "*b"]:
    """The index of the largest entry, of the first of several: argmax, but for NaN, in the presence of which it is 0.

    XLA's argmax on CPU is not vectorised and takes as long as a softmax.
    """
    v = logits.shape[-1]
    index = jnp.arange(v, dtype=jnp.int32)
    first = jnp.min(jnp.where(logits == jnp.max(logits, axis=-1, keepdims=True), index, v), axis=-1)
    return jnp.where(first == v, 0, first)


def is_largest(logits: Float[Array, "*b v"], targets: Int[Array, "*b"]) -> Bool[Array, "*b"]:
    """Whether each target has the largest logit, and is the first to have it: argmax(logits) == target.

    XLA's argmax on CPU is not vectorised and takes as long as a softmax.
    """
    top = jnp.max(logits, axis=-1, keepdims=True)
    earlier = jnp.arange(logits.shape[-1]) < targets[..., None]
    return (_take(logits, targets) == top[..., 0]) & ~jnp.any((logits == top) & earlier, axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def chunked_cross_entropy(
    x: Float[Array, "b t d"],
    table: Float[Array, "v d"],
    targets: Int[Array, "b t"],
    scored: Bool[Array, "b t"],
    chunk: int,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Cross entropy of the logits x table^T, summed, without ever holding all of them.

    The logits of `chunk` positions of each sequence at a time are made, and with them, where a gradient is wanted,
    their share of it: the three matrix products of the plain way, and nothing twice. The gradient's products take their
    operands in the dtype of x. Reverse mode only; forward-mode differentiation needs `cross_entropy`.

    Args:
        x: the last hidden states.
        table: the token embedding, or the head's kernel transposed; cast to the dtype of x for the products.
        targets: ids; one outside [0, v) that is scored makes the sum NaN.
        scored: which targets count.
        chunk: positions of a sequence at a time.

    Returns:
        The sum of -log softmax(x table^T)[target] over the scored targets, in nats and at least float32; and how many
        of them have the largest logit.
    """
    total, right, _ = _chunks(x, table, targets, scored, chunk, with_gradient=False)
    return total, right


def _chunks(
    x: Array, table: Array, targets: Array, scored: Array, chunk: int, with_gradient: bool
) -> tuple[Array, Array, tuple[Array, Array] | None]:
    """Sum, number right, and the sum's gradient to x and to the table."""
    b, t, d = x.shape
    dtype, n = at_least_float32(x.dtype), -(-t // chunk)
    words = table.astype(x.dtype)

    def split(rows: Array) -> Array:
        """[b, t, ...] -> [n, b, chunk, ...], the last chunk filled up with zeros, which are not scored."""
        padded = jnp.pad(rows, ((0, 0), (0, n * chunk - t), *((0, 0),) * (rows.ndim - 2)))
        return jnp.moveaxis(padded.reshape(b, n, chunk, *rows.shape[2:]), 1, 0)

    def step(sums: tuple[Array, Array, Array | None], rows: tuple[Array, Array, Array]) -> tuple[Any, Array | None]:
        total, right, table_gradient = sums
        x, targets, scored = rows
        logits = einsum("btd,vd->btv", x, words)
        top = jnp.max(logits, axis=-1, keepdims=True)
        exponentials = jnp.exp(logits - top)
        normaliser = jnp.sum(exponentials, axis=-1, keepdims=True)
        chosen = _take(logits, targets)
        losses = (jnp.log(normaliser) + top)[..., 0] - chosen
        total += jnp.sum(jnp.where(scored, losses, 0))
        right += jnp.sum(scored & is_largest(logits, targets))
        if table_gradient is None:
            return (total, right, None), None
        delta = exponentials / normaliser - (jnp.arange(logits.shape[-1]) == targets[..., None])
        delta = jnp.where(scored[..., None], delta, 0).astype(x.dtype)
        table_gradient += einsum("btv,btd->vd", delta, x)
        return (total, right, table_gradient), einsum("btv,vd->btd", delta, words).astype(x.dtype)

    sums = (jnp.zeros((), dtype), jnp.zeros((), jnp.int32), jnp.zeros(table.shape, dtype) if with_gradient else None)
    (total, right, table_gradient), x_gradient = jax.lax.scan(step, sums, (split(x), split(targets), split(scored)))
    if table_gradient is None or x_gradient is None:
        return total, right, None
    x_gradient = jnp.moveaxis(x_gradient, 0, 1).reshape(b, n * chunk, d)[:, :t]
    return total, right, (x_gradient, table_gradient)


def _chunked_forward(
    x: Array, table: Array, targets: Array, scored: Array, chunk: int
) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
    total, right, gradient = _chunks(x, table, targets, scored, chunk, with_gradient=True)
    assert gradient is not None
    return (total, right), (*gradient, jnp.zeros((), table.dtype))


def _chunked_backward(
    chunk: int, residuals: tuple[Array, Array, Array], cotangents: tuple[Array, Any]
) -> tuple[Array, Array, None, None]:
    x_gradient, table_gradient, of_table_dtype = residuals
    scale = cotangents[0]
    return (
        (scale * x_gradient).astype(x_gradient.dtype),
        (scale * table_gradient).astype(of_table_dtype.dtype),
        None,
        None,
    )


chunked_cross_entropy.defvjp(_chunked_forward, _chunked_backward)
