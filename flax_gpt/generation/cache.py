"""The key-value cache: what a GPT keeps of the tokens it has read, and the forward pass that goes on from there.

A block knows nothing of it. The cache is a tap (`flax_gpt.activations`) that answers the sites "k" and "v" with the
keys and values of all tokens so far, so that any block that passes its own through these sites can be decoded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from flax_gpt import ops
from flax_gpt.activations import Edit, Recorder, Tap, no_tap
from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params, Rows, Tokens, check_rows
from flax_gpt.generation.few_rows import FEW, by_matrices, few_rows, linear_maps, put_matrices, take_matrices
from flax_gpt.model import Block, BlockType, Embedding, LayerNorm, unstack


class Cache(NamedTuple):
    """Keys and values of the tokens read so far, one slot a token; a pytree like any other.

    Attributes:
        keys, values: of each layer, the slots last: attention from one query to all slots then reads memory in order,
            which is up to ten times as fast on a CPU as from [b, s, h, k].
        mask: which slots hold a token; padding takes up a slot too, which nothing sees.
        length: how many slots are taken, the same for every row.
    """

    keys: tuple[Float[Array, "b h k s"], ...]
    values: tuple[Float[Array, "b h k s"], ...]
    mask: Bool[Array, "b s"]
    length: Int[Array, ""]


def init_cache(config: GPTConfig, batch_size: int, length: int, dtype: Any = jnp.float32) -> Cache:
    """An empty cache.

    Args:
        config: the model.
        batch_size: number of rows.
        length: slots a row: tokens and padding that it will ever hold. It may exceed n_positions by the padding.
        dtype: of keys and values: that of the activations.
    """
    shape = (batch_size, config.n_head, config.head_width, length)
    empty = tuple(jnp.zeros(shape, dtype) for _ in range(config.n_layer))
    return Cache(empty, empty, jnp.zeros((batch_size, length), bool), jnp.zeros((), jnp.int32))


class Weights(NamedTuple):
    """Parameters as decoding wants them: made once, outside the loop.

    Attributes:
        embedding: the tables of tokens and positions.
        blocks: the parameters of each layer, without those in `matrices`.
        matrices: of each layer, the kernels of its `Linear` modules by their paths, as [out, in]; empty where they are
            among `blocks`.
        ln_f: of the last LayerNorm.
        unembed: the token embedding, or the head's kernel transposed, in the dtype of the activations.
    """

    embedding: Mapping[str, Array]
    blocks: tuple[Any, ...]
    matrices: tuple[Mapping[str, Float[Array, "out in"]], ...]
    ln_f: Mapping[str, Array]
    unembed: Float[Array, "v d"]


def prepare(
    config: GPTConfig,
    params: Params,
    compute_dtype: Any = None,
    block: BlockType = Block,
    transposed: bool | None = None,
) -> Weights:
    """Takes the stack of layers apart, casts the matrices and turns them round, as each step would do again otherwise.

    Args:
        config, params, compute_dtype, block: as of `forward`.
        transposed: store matrices as [out, in] (`flax_gpt.generation.few_rows`); None does so on a CPU.
    """
    return _prepare(config, params, None if compute_dtype is None else jnp.dtype(compute_dtype), block, transposed)


@functools.partial(jax.jit, static_argnames=("config", "compute_dtype", "block", "transposed"))
def _prepare(
    config: GPTConfig, params: Params, compute_dtype: Any, block: BlockType, transposed: bool | None
) -> Weights:
    dtype = jnp.dtype(compute_dtype or params["wte"].dtype)

    def cast(path: tuple[Any, ...], leaf: Array) -> Array:
        return leaf.astype(dtype) if path[-1].key == "kernel" else leaf  # biases and scales are added in float32

    blocks = unstack(jax.tree_util.tree_map_with_path(cast, params["blocks"]), config.n_layer)
    maps = linear_maps(config, block) if transposed or (transposed is None and jax.default_backend() == "cpu") else {}
    layers = [take_matrices(layer, maps) for layer in blocks]
    return Weights(
        {"wte": params["wte"], "wpe": params["wpe"]},
        tuple(rest for rest, _ in layers),
        tuple(matrices for _, matrices in layers),
        params["ln_f"],
        (params["wte"] if config.tie_word_embeddings else params["head"]["kernel"].T).astype(dtype),
    )


def without_row_axis(cache: Cache) -> Cache:
    """A cache of one row with keys and values [h, k, s], as a loop should carry it.

    XLA on a CPU drops an axis of 1 from attention's products, and then makes the updated cache twice in each turn of
    the loop, a copy included: with 900 tokens of gpt2's shapes a step took 89 ms instead of 45.
    """
    return _with_arrays(cache, lambda x: x[0]) if len(cache.mask) == 1 else cache


def with_row_axis(cache: Cache) -> Cache:
    """The inverse of `without_row_axis`."""
    return _with_arrays(cache, lambda x: x[None]) if len(cache.mask) == 1 else cache


def _with_arrays(cache: Cache, change: Callable[[Array], Array]) -> Cache:
    return cache._replace(keys=tuple(map(change, cache.keys)), values=tuple(map(change, cache.values)))


def forward_cached(
    config: GPTConfig,
    params: Params | Weights,
    tokens: Tokens,
    cache: Cache,
    *,
    mask: Rows | None = None,
    edit: Edit | None = None,
    compute_dtype: Any = None,
    block: BlockType = Block,
) -> tuple[Float[Array, "b t v"], Cache]:
    """Next-token logits of tokens that follow what is in a cache, and the cache with them in it.

    A text may be given in pieces of any lengths: the logits are those of `forward` on the whole of it. It compiles
    itself as `forward` does, once for each number of new tokens and length of the cache.

    Args:
        config, params, compute_dtype, block: as of `forward`. The block must pass its keys and values through the sites
            "k" and "v", and attend by `ops.causal_attention`, as all of this package do. Parameters that `prepare` has
            made ready need not be made ready at every call.
        tokens: the new ones.
        cache: from `init_cache`, or from the last call.
        mask: 1 or True at tokens, 0 or False at padding, on either side or between.
        edit: as of `forward`, called for the new tokens only. Keys and values are kept as it leaves them.

    Returns:
        Logits [b, t, v], in at least float32, and the new cache. Where the cache is full, or a row has more than
        n_positions tokens, the logits are NaN.

    Raises:
        ValueError: an id on the host is out of range, or a shape does not fit.
        TypeError: tokens or mask are not integers.
    """
    ids, mask_rows, _ = check_rows(config, tokens, mask, None)
    b, s = cache.mask.shape
    if ids.shape[0] != b or len(cache.keys) != config.n_layer:
        raise ValueError(
            f"tokens of {ids.shape[0]} rows for {config.n_layer} layers do not fit a cache of {b} rows and "
            f"{len(cache.keys)} layers"
        )
    if not isinstance(cache.length, jax.core.Tracer) and int(cache.length) + ids.shape[1] > s:
        raise ValueError(
            f"{ids.shape[1]} tokens more do not fit a cache of {s} slots, {int(cache.length)} of them taken"
        )
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    run = _forward_cached if edit is not None else _forward_cached_jit
    return run(config, params, ids, cache, mask_rows, edit, dtype, block)


def _forward_cached(
    config: GPTConfig,
    params: Params | Weights,
    tokens: Array,
    cache: Cache,
    mask: Array | None,
    edit: Edit | None,
    compute_dtype: jnp.dtype | None,
    block: BlockType,
) -> tuple[Array, Cache]:
    weights = params if isinstance(params, Weights) else prepare(config, params, compute_dtype, block)
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask.astype(bool)
    x, cache = read(config, weights, tokens, mask, cache, edit, block)
    return logits_of(config, weights, x, edit), cache


_forward_cached_jit = jax.jit(_forward_cached, static_argnames=("config", "edit", "compute_dtype", "block"))


def read(
    config: GPTConfig,
    weights: Weights,
    tokens: Int[Array, "b t"],
    mask: Bool[Array, "b t"],
    cache: Cache,
    edit: Edit | None,
    block: BlockType,
) -> tuple[Float[Array, "b t d"], Cache]:
    """The new tokens through all the blocks: the stream that leaves the last, and the cache with them in it."""
    t, s = tokens.shape[1], cache.mask.shape[1]
    start = cache.length
    before = jnp.sum(cache.mask, axis=1, keepdims=True)
    positions = jnp.maximum(before + jnp.cumsum(mask, axis=1) - 1, 0)
    slots = jax.lax.dynamic_update_slice_in_dim(cache.mask, mask, start, axis=1)
    # A slot is seen from itself and from those after it, the slots of padding neither see nor are seen.
    causal = jnp.arange(s) <= (start + jnp.arange(t))[:, None]
    visible = slots[:, None, :] & causal & mask[:, :, None]

    tap = no_tap if edit is None else Recorder((), edit)
    embedding = Embedding(config)
    tokens = jnp.where(mask, tokens, 0)
    x = tap("embed", _apply(embedding, weights.embedding, tokens, positions, weights.unembed.dtype))
    # dynamic_update_slice would write to the last slots that there are.
    x = jnp.where(start + t > s, jnp.nan, x)
    layer_of = block(config, parent=None)  # type: ignore[call-arg]  # every linen module takes `parent`
    maps = linear_maps(config, block) if weights.matrices[0] else {}
    keys, values = [], []
    layers = zip(weights.blocks, weights.matrices, cache.keys, cache.values, strict=True)
    for index, (params, matrices, k, v) in enumerate(layers):
        slots_tap = _Slots(k, v, start, no_tap if edit is None else Recorder((), edit, np.int32(index)))
        with by_matrices(matrices):
            x = _apply(layer_of, put_matrices(params, matrices, maps), x, visible, slots_tap)
        if slots_tap.missing:
            raise ValueError(
                f"{type(layer_of).__name__} cannot be decoded with a cache: it does not pass its "
                f"{' and '.join(slots_tap.missing)} through the tap"
            )
        keys.append(slots_tap.kept["k"])
        values.append(slots_tap.kept["v"])
    return x, Cache(tuple(keys), tuple(values), slots, start + t)


def logits_of(
    config: GPTConfig, weights: Weights, x: Float[Array, "b t d"], edit: Edit | None
) -> Float[Array, "b t v"]:
    """Final LayerNorm and head of what `read` gave."""
    tap = no_tap if edit is None else Recorder((), edit)
    x = tap("ln_f", _apply(LayerNorm(config), weights.ln_f, x))
    rows = math.prod(x.shape[:-1])
    if weights.matrices[0] and isinstance(rows, int) and rows <= FEW:
        logits = few_rows(x.reshape(rows, -1), weights.unembed).reshape(*x.shape[:-1], -1)
    else:
        logits = ops.einsum("btd,vd->btv", x, weights.unembed)
    return tap("logits", logits)


def _apply(module: nn.Module, params: Any, *args: Any, **options: Any) -> Any:
    return module.apply({"params": params}, *args, **options)


class _Slots:
    """The tap of one layer that writes the new keys and values to their slots and hands on those of all slots."""

    def __init__(self, keys: Array, values: Array, start: Array, tap: Tap) -> None:
        self._cached, self._start, self._tap = {"k": keys, "v": values}, start, tap
        self.kept: dict[str, Array] = {}

    def __call__(self, site: str, value: Array) -> Array:
        value = self._tap(site, value)
        if site not in self._cached:
            return value
        cached = self._cached[site]
        single = cached.ndim == 3  # see `without_row_axis`
        new = jnp.moveaxis(value, 1, 3).astype(cached.dtype)
        kept = jax.lax.dynamic_update_slice_in_dim(cached, new[0] if single else new, self._start, axis=cached.ndim - 1)
        self.kept[site] = kept
        return jnp.moveaxis(kept[None] if single else kept, 3, 1).astype(value.dtype)

    @property
    def missing(self) -> list[str]:
        """Which of keys and values never came by."""
        return [site for site in self._cached if site not in self.kept]
