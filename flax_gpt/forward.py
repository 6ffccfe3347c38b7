"""The entry points: parameters from a key, logits from tokens, log-probabilities of a text. All of them jitted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from flax_gpt import ops
from flax_gpt.activations import Edit
from flax_gpt.config import GPTConfig
from flax_gpt.model import GPT, Block, BlockType, Layers

Params: TypeAlias = dict[str, Any]  # nested, of arrays
Tokens: TypeAlias = Int[Array, "b t"] | np.ndarray | Sequence[Sequence[int]]
Rows: TypeAlias = Int[Array, "b t"] | Bool[Array, "b t"] | np.ndarray | Sequence[Sequence[int]]


def init_params(config: GPTConfig, key: Key[Array, ""], dtype: Any = jnp.float32, block: BlockType = Block) -> Params:
    """Fresh parameters, drawn as GPT-2's were.

    Matrices and token embeddings come from N(0, initializer_range), positions from half that, the two matrices of each
    block that write to the residual stream from initializer_range / sqrt(2 * n_layer); biases are 0 and scales 1.

    Args:
        config: the model.
        key: such as `jax.random.key(0)`; the same key gives the same parameters.
        dtype: of the parameters.
        block: the module of one layer.

    Returns:
        A nested dict of arrays; `flax_gpt.model` lists its leaves and their axes.
    """
    return _init(config, key, jnp.dtype(dtype), block)


@functools.partial(jax.jit, static_argnames=("config", "dtype", "block"))
def _init(config: GPTConfig, key: Key[Array, ""], dtype: jnp.dtype, block: BlockType) -> Params:
    params = GPT(config, block).init(key, jnp.zeros((1, 1), jnp.int32))["params"]
    return jax.tree.map(lambda x: x.astype(dtype), params)


@overload
def forward(
    config: GPTConfig, params: Params, tokens: Tokens, *, capture: tuple[()] = (), **options: Any
) -> Float[Array, "b t v"]: ...


@overload
def forward(
    config: GPTConfig, params: Params, tokens: Tokens, *, capture: str | Sequence[str], **options: Any
) -> tuple[Float[Array, "b t v"], dict[str, Array]]: ...


def forward(  # type: ignore[misc]  # `options` above stands for the keywords below
    config: GPTConfig,
    params: Params,
    tokens: Tokens,
    *,
    mask: Rows | None = None,
    segment_ids: Rows | None = None,
    dropout_key: Key[Array, ""] | None = None,
    capture: str | Sequence[str] = (),
    edit: Edit | None = None,
    compute_dtype: Any = None,
    layers: Layers = "auto",
    remat: bool = False,
    block: BlockType = Block,
) -> Float[Array, "b t v"] | tuple[Float[Array, "b t v"], dict[str, Array]]:
    """Next-token logits of GPT-2.

    It compiles itself, once for each config, shape and choice of the static arguments. Where an `edit` is given it
    traces inline instead, so that the edit may close over traced values and a fresh lambda costs no compilation: jit
    the function around the call.

    Args:
        config: the model; static.
        params: from `init_params` or `load_pretrained`.
        tokens: integer ids [b, t] in [0, vocab_size).
        mask: [b, t], 1 or True at tokens, 0 or False at padding, on either side. Nothing sees padding, and positions
            count tokens only, so that a padded row gives what the row alone gives. The ids at padding do not matter.
        segment_ids: integers [b, t]: of documents packed into a row, each sees itself alone, its positions from 0.
        dropout_key: turns dropout on, at the config's rates.
        capture: names of activations to return (`flax_gpt.activations` lists them); static.
        edit: (site, layer, value) -> value, pure, called at every site. `site` is a string, `layer` an int32 scalar,
            perhaps traced, and None outside the blocks. The result must have the value's shape.
        compute_dtype: dtype of activations and matrix products, such as jnp.bfloat16; None is the parameters'. Static.
        layers: how to walk the layers: "scan", "unroll" or "auto" (`flax_gpt.model.GPT`); static.
        remat: compute activations again in the backward pass instead of keeping them; static.
        block: the module of one layer; static.

    Returns:
        Logits [b, t, v], float32 (float64 for float64 parameters). With `capture`, also a dict from site to activation,
        those of blocks stacked on a leading layer axis l.

    Raises:
        ValueError: t is above n_positions; an id on the host (list or NumPy) is out of range; a shape does not fit; a
            site to capture does not exist. An id out of range in a device array cannot raise without waiting for the
            device: it gives NaN logits throughout its row, or raises under
            `jax.experimental.checkify.checkify(f, errors=checkify.index_checks)`.
        TypeError: tokens, mask or segment_ids are not integers.
    """
    capture = (capture,) if isinstance(capture, str) else tuple(capture)
    ids, mask_rows, segments = check_rows(config, tokens, mask, segment_ids)
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    run = _forward if edit is not None else _forward_jit
    logits, captured = run(
        config, params, ids, mask_rows, segments, dropout_key, capture, edit, dtype, layers, remat, block
    )
    return (logits, captured) if capture else logits


def _forward(
    config: GPTConfig,
    params: Params,
    tokens: Array,
    mask: Array | np.ndarray | None,
    segment_ids: Array | np.ndarray | None,
    dropout_key: Array | None,
    capture: tuple[str, ...],
    edit: Edit | None,
    compute_dtype: jnp.dtype | None,
    layers: Layers,
    remat: bool,
    block: BlockType,
) -> tuple[Array, dict[str, Array]]:
    model = GPT(config, block, layers, remat, compute_dtype)
    logits, captured = model.apply(
        {"params": params},
        tokens,
        None if mask is None else jnp.asarray(mask, bool),
        None if segment_ids is None else jnp.asarray(segment_ids),
        capture,
        edit,
        rngs={} if dropout_key is None else {"dropout": dropout_key},
    )
    return logits, captured  # type: ignore[return-value]  # of a module's result, linen's `apply` says `Any | tuple`


_forward_jit = jax.jit(
    _forward, static_argnames=("config", "capture", "edit", "compute_dtype", "layers", "remat", "block")
)


def token_log_probs(
    config: GPTConfig,
    params: Params,
    tokens: Tokens,
    *,
    mask: Rows | None = None,
    segment_ids: Rows | None = None,
    compute_dtype: Any = None,
    layers: Layers = "auto",
    block: BlockType = Block,
) -> Float[Array, "b _"]:
    """Log-probability, in nats, of each token after the first given those before it.

    Args: as of `forward`.

    Returns:
        [b, t-1], float32: entry i is log p(tokens[i + 1] | tokens[: i + 1]). It is 0 where there is nothing to predict,
        or to predict it from: at padding, and at the first token of a row or of a packed segment. A row's sum is
        therefore the log-probability of its text.
    """
    ids, mask_rows, segments = check_rows(config, tokens, mask, segment_ids)
    logits = forward(
        config,
        params,
        ids,
        mask=mask_rows,
        segment_ids=segments,
        compute_dtype=compute_dtype,
        layers=layers,
        block=block,
    )
    return _scores(logits, ids, mask_rows, segments)


@jax.jit
def _scores(logits: Array, tokens: Array, mask: Array | None, segment_ids: Array | None) -> Array:
    scores = -ops.cross_entropy(logits[:, :-1], tokens[:, 1:])
    if mask is not None:
        scores = jnp.where(mask[:, 1:].astype(bool) & mask[:, :-1].astype(bool), scores, 0)
    if segment_ids is not None:
        scores = jnp.where(segment_ids[:, 1:] == segment_ids[:, :-1], scores, 0)
    return scores


def check_rows(
    config: GPTConfig, tokens: Tokens, mask: Rows | None, segment_ids: Rows | None
) -> tuple[Int[Array, "b t"], Any, Any]:
    """The three as arrays of one shape, mask and segment_ids on the host or the device as they came.

    Raises:
        TypeError, ValueError: as `forward`.
    """
    mask_array = None if mask is None else _rows("mask", mask)
    segments = None if segment_ids is None else _rows("segment_ids", segment_ids)
    ids = check_tokens(config, tokens, mask_array)
    for name, rows in (("mask", mask_array), ("segment_ids", segments)):
        if rows is not None and rows.shape != ids.shape:
            raise ValueError(f"{name} has shape {rows.shape}, tokens have shape {ids.shape}")
    return ids, mask_array, segments


def check_tokens(config: GPTConfig, tokens: Tokens, mask: Any = None) -> Int[Array, "b t"]:
    """Tokens as an int array [b, t] on the device; ids that come from the host are checked against the vocabulary.

    Raises:
        TypeError: the ids are not integers.
        ValueError: the rows differ in length, there is no batch axis, or an id outside padding is out of range.
    """
    on_host = not isinstance(tokens, jax.Array)
    rows = _rows("tokens", tokens)
    if on_host and rows.size:
        ids = np.asarray(rows)
        outside = (ids < 0) | (ids >= config.vocab_size)
        if mask is not None and not isinstance(mask, jax.core.Tracer) and mask.shape == ids.shape:
            outside &= np.asarray(mask).astype(bool)
        if outside.any():
            row, column = np.argwhere(outside)[0]
            raise ValueError(
                f"token id {ids[row, column]} at row {row}, position {column} is outside the vocabulary of "
                f"{config.vocab_size} (ids 0 to {config.vocab_size - 1})"
            )
    return jnp.asarray(rows, jnp.int32)


def _rows(name: str, rows: Rows) -> Any:
    """An integer or boolean array [b, t], on the host or the device as it came."""
    try:
        array = rows if isinstance(rows, jax.Array) else np.asarray(rows)
    except ValueError as error:
        raise ValueError(f"{name}: the rows differ in length; pad them and give a mask") from error
    if not (jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == bool):
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"{name} must have shape [b, t], got shape {array.shape}")
    return array
