"""What the interventions share: forward passes taken apart, and many of them run a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from flax_gpt.activations import Tap, no_tap
from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params, Rows, Tokens, check_rows
from flax_gpt.model import GPT, BlockType

# Logits [b, t, v], or [b, v] where a sweep reads one position of each row, to any array.
Metric: TypeAlias = Callable[[Array], Array]
# The position of each row at which a metric reads the logits.
At: TypeAlias = int | Int[Array, " b"] | np.ndarray | list[int]

# Tokens whose shape need not be that of the run's own.
OtherTokens: TypeAlias = Int[Array, "_ _"] | np.ndarray | Sequence[Sequence[int]]

# Of the sites with heads, the axes of positions and of heads; all other sites are [b, t, ...].
_HEAD_AXIS = {"q": 2, "k": 2, "v": 2, "z": 2, "attn_scores": 1, "pattern": 1}
_POSITION_AXIS = {"attn_scores": 2, "pattern": 2}


def axis_of(site: str, name: str) -> int:
    """Which axis of an activation [b, ...] is that of heads ("head") or of positions ("position": of queries).

    Raises:
        ValueError: the site has no heads, or there is no such axis.
    """
    if name == "position":
        return _POSITION_AXIS.get(site, 1)
    if name != "head":
        raise ValueError(f"a sweep goes over 'layer', 'head' and 'position', got {name!r}")
    if site not in _HEAD_AXIS:
        raise ValueError(f"the site {site!r} has no heads; those that have are {', '.join(_HEAD_AXIS)}")
    return _HEAD_AXIS[site]


def check_pair(
    config: GPTConfig, tokens: Tokens, source: OtherTokens, mask: Rows | None
) -> tuple[Int[Array, "b t"], Int[Array, "b t"], Bool[Array, "b t"] | None]:
    """The tokens of a run and of the run whose activations go into it, and their common mask, as arrays.

    Raises:
        TypeError, ValueError: as `flax_gpt.forward`; or the two differ in shape.
    """
    ids, rows, _ = check_rows(config, tokens, mask, None)
    others, _, _ = check_rows(config, source, rows, None)
    if ids.shape != others.shape:
        raise ValueError(f"tokens have shape {ids.shape} and source has shape {others.shape}; align and pad them")
    return ids, others, None if rows is None else jnp.asarray(rows).astype(bool)


def check_at(at: At | None, shape: tuple[int, ...]) -> Int[Array, " b"] | None:
    """The position at which each row is read, counted from the start.

    Raises:
        ValueError: it is outside the sequence, or there is not one a row.
    """
    if at is None:
        return None
    b, t = shape
    positions = at if isinstance(at, jax.Array) else np.asarray(at)
    if positions.shape not in ((), (b,)):
        raise ValueError(f"at must be one position or one for each of {b} rows, got shape {positions.shape}")
    if not isinstance(positions, jax.Array) and ((positions < -t) | (positions >= t)).any():
        raise ValueError(f"at={at} is outside the {t} positions of a row")
    return jnp.broadcast_to(jnp.where(positions < 0, positions + t, positions), (b,))


def check_over(site: str, over: Sequence[str]) -> tuple[str, ...]:
    """The axes of a sweep.

    Raises:
        ValueError: they do not begin with 'layer', repeat, or the site has no such axis.
    """
    over = tuple(over)
    if not over or over[0] != "layer" or len(set(over)) != len(over):
        raise ValueError(f"over must be 'layer', then any of 'head' and 'position', each once; got {over}")
    for name in over[1:]:
        axis_of(site, name)
    return over


def read_at(x: Float[Array, "b t d"], at: Int[Array, " b"] | None) -> Float[Array, "b ..."]:
    """The rows at their positions, [b, d]; all of them, [b, t, d], for None."""
    return x if at is None else x[jnp.arange(len(x)), at]


def one_layer(params: Params, layer: int | Int[Array, ""]) -> Any:
    """The parameters of one block."""
    return jax.tree.map(lambda x: x[layer], params["blocks"])


def run_block(
    config: GPTConfig,
    block: BlockType,
    params: Any,
    x: Float[Array, "b t d"],
    visible: Bool[Array, "#b t s"] | None,
    tap: Tap = no_tap,
) -> Float[Array, "b t d"]:
    """One block, from its own parameters."""
    module = block(config, parent=None)  # type: ignore[call-arg]  # every linen module takes `parent`
    return module.apply({"params": params}, x, visible, tap)  # type: ignore[return-value]


def unembed(config: GPTConfig, params: Params, x: Float[Array, "b *t d"], block: BlockType) -> Float[Array, "b *t v"]:
    """The logits of a residual stream: what the model makes of the stream that leaves its last block."""
    x3 = x if x.ndim == 3 else x[:, None]
    logits = GPT(config, block).apply({"params": params}, x3, method=lambda model, x: model.unembed(model.ln_f(x)))
    return logits.reshape(*x.shape[:-1], -1)  # type: ignore[union-attr]


def bytes_of_a_pass(config: GPTConfig, shape: tuple[int, ...]) -> int:
    """About how much memory a block takes for one member of a sweep."""
    b, t = shape
    return 4 * (b * t * (3 * config.n_embd + 2 * config.mlp_width) + 2 * b * config.n_head * t * t)


def bytes_of_logits(config: GPTConfig, shape: tuple[int, ...]) -> int:
    """How much the logits of one member take, and what a metric makes of them."""
    return 8 * math.prod(shape) * config.vocab_size


def in_chunks(function: Callable[[Any], Any], members: Any, bytes_each: int, max_bytes: int) -> Any:
    """A function of many members (arrays with a leading axis n), given as many at a time as memory allows.

    The last chunk is filled up with copies of members, so that all are one program, and their results are dropped.

    Args:
        function: of some members to their results, each with the members' leading axis.
        members: all of them.
        bytes_each: what one takes.
        max_bytes: what there is.
    """
    n = len(jax.tree.leaves(members)[0])
    chunks = -(-n // max(1, max_bytes // bytes_each))
    at_once = -(-n // chunks)  # as even as can be
    index = jnp.arange(chunks * at_once).reshape(chunks, at_once) % n
    results = jax.lax.map(lambda rows: function(jax.tree.map(lambda x: x[rows], members)), index)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n], results)
