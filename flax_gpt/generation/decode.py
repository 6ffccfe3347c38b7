"""The compiled part of generation: read the prompts, then write a token to every row until all rows have ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from flax_gpt import ops
from flax_gpt.activations import Edit
from flax_gpt.config import GPTConfig
from flax_gpt.forward import check_tokens
from flax_gpt.generation.cache import (
    Cache,
    Weights,
    init_cache,
    logits_of,
    read,
    with_row_axis,
    without_row_axis,
)
from flax_gpt.generation.sampling import Sampling, sample
from flax_gpt.model import BlockType

Prompts: TypeAlias = Sequence[Sequence[int]] | Sequence[np.ndarray] | np.ndarray | Int[Array, "b t"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a program of generation is compiled for, beside the shapes of what goes in.

    Attributes:
        config, block, compute_dtype: the model.
        new_width: how many tokens there is room for.
        num_samples: continuations of each prompt.
        windows: whether it may have to go on beyond n_positions.
    """

    config: GPTConfig
    block: BlockType
    compute_dtype: Any
    new_width: int
    num_samples: int
    windows: bool


class Inputs(NamedTuple):
    """Prompts and limits.

    Attributes:
        tokens: prompts, padded on the right with zeros.
        lengths: of the prompts.
        seen: which tokens a prompt holds.
        stop_ids: a row ends with the first of these.
        limit: how many tokens to write.
    """

    tokens: Int[Array, "b p"]
    lengths: Int[Array, " b"]
    seen: Bool[Array, "b v"]
    stop_ids: Int[Array, " stop"]
    limit: Int[Array, ""]


class State(NamedTuple):
    """Where a generation stands.

    Attributes:
        step: how many tokens the rows that go on have written.
        cache: of all tokens but the last of each row.
        history: each row's prompt and what it wrote, then zeros.
        log_probs: of what was written.
        lengths: of the prompts.
        counts: how many tokens each row has written.
        done: which rows have ended.
        seen: which tokens each row holds.
        keys: for the draws, one a row.
    """

    step: Int[Array, ""]
    cache: Cache
    history: Int[Array, "b all"]
    log_probs: Float[Array, "b new"]
    lengths: Int[Array, " b"]
    counts: Int[Array, " b"]
    done: Bool[Array, " b"]
    seen: Bool[Array, "b v"]
    keys: Key[Array, " b"]


def bucket(n: int) -> int:
    """The length that room is made for: 16, 32, 64, 128 and then in steps of 128. All that fit share a compilation."""
    return next((width for width in (16, 32, 64) if n <= width), -(-n // 128) * 128)


def plan_generation(
    config: GPTConfig,
    prompts: Any,
    lengths: Sequence[int] | np.ndarray | None,
    max_new_tokens: int,
    num_samples: int,
    stop_ids: Sequence[int],
    sliding: bool | None,
    compute_dtype: Any,
    block: BlockType,
) -> tuple[Plan, Inputs]:
    """Checks the arguments of `generate` and puts them into the form that the programs take.

    A `sliding` of None is that of a caller which cannot slide.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("num_samples", num_samples)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if outside := [i for i in stop_ids if not 0 <= i < config.vocab_size]:
        raise ValueError(f"stop_ids names the token id {outside[0]}, outside the vocabulary of {config.vocab_size}")
    tokens, row_lengths = pad_prompts(config, prompts, lengths)
    longest = int(row_lengths.max())
    beyond = longest + max_new_tokens > config.n_positions
    if beyond and not sliding:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed n_positions={config.n_positions}; "
            f"ask for fewer{'' if sliding is None else ', or for a sliding context (sliding=True)'}"
        )
    seen = np.zeros((len(tokens), config.vocab_size), bool)
    kept = np.minimum(row_lengths, config.n_positions)
    width = min(bucket(longest), config.n_positions)
    context = np.zeros((len(tokens), width), np.int32)
    for row, (length, keep) in enumerate(zip(row_lengths, kept, strict=True)):
        seen[row, tokens[row, :length]] = True
        context[row, :keep] = tokens[row, length - keep : length]
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    return (
        Plan(config, block, dtype, bucket(max_new_tokens), num_samples, beyond),
        Inputs(
            jnp.asarray(context),
            jnp.asarray(kept, jnp.int32),
            jnp.asarray(seen),
            # In fours, filled up with what is no id, so that more of them seldom compile anything.
            jnp.asarray([*stop_ids, *(-1,) * (-len(stop_ids) % 4 or (0 if stop_ids else 4))], jnp.int32),
            jnp.asarray(max_new_tokens, jnp.int32),
        ),
    )


def pad_prompts(config: GPTConfig, prompts: Any, lengths: Any) -> tuple[np.ndarray, np.ndarray]:
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


def start(plan: Plan, weights: Weights, inputs: Inputs, key: Key[Array, ""], edit: Edit | None) -> State:
    """Reads the prompts, but for the last token of each, which the first step of `advance` reads."""
    b, p = inputs.tokens.shape
    cache = init_cache(plan.config, b, p + plan.new_width, weights.unembed.dtype)
    mask = jnp.arange(p) < (inputs.lengths - 1)[:, None]
    _, cache = read(plan.config, weights, inputs.tokens, mask, cache, edit, plan.block)
    n = plan.num_samples
    rows = jnp.arange(b * n)
    tokens, lengths, seen = (jnp.repeat(x, n, axis=0) for x in (inputs.tokens, inputs.lengths, inputs.seen))
    return State(
        step=jnp.zeros((), jnp.int32),
        cache=repeat_rows(cache, n),
        history=jnp.pad(tokens, ((0, 0), (0, plan.new_width))),
        log_probs=jnp.zeros((b * n, plan.new_width), jnp.float32),
        lengths=lengths,
        counts=jnp.zeros(b * n, jnp.int32),
        done=jnp.zeros(b * n, bool),
        seen=seen,
        keys=jax.vmap(lambda row: jax.random.fold_in(key, row))(rows),
    )


def repeat_rows(cache: Cache, n: int) -> Cache:
    """Each row n times."""
    return cache._replace(
        **{
            name: jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), getattr(cache, name))
            for name in ("keys", "values", "mask")
        }
    )


def advance(
    plan: Plan,
    weights: Weights,
    state: State,
    sampling: Sampling,
    stop_ids: Int[Array, " stop"],
    until: Int[Array, ""],
    edit: Edit | None,
) -> State:
    """Goes on until the rows have `until` tokens, or have all ended."""
    config, rows = plan.config, jnp.arange(len(state.lengths))

    def with_cache(state: State) -> State:
        last = state.history[rows, state.lengths + state.counts - 1]
        # A row that has ended reads padding.
        x, cache = read(config, weights, last[:, None], ~state.done[:, None], state.cache, edit, plan.block)
        logits = logits_of(config, weights, x, edit)[:, 0]
        return _write(state._replace(cache=cache), logits, sampling, stop_ids)

    def with_window(state: State) -> State:
        total, width = state.lengths + state.counts, config.n_positions
        tokens = jax.vmap(lambda row, first: jax.lax.dynamic_slice(row, (first,), (width,)))(
            state.history, jnp.maximum(total - width, 0)
        )
        n = jnp.minimum(total, width)
        empty = init_cache(config, len(rows), width, weights.unembed.dtype)
        x, _ = read(config, weights, tokens, jnp.arange(width) < n[:, None], empty, edit, plan.block)
        logits = logits_of(config, weights, jnp.take_along_axis(x, (n - 1)[:, None, None], axis=1), edit)[:, 0]
        return _write(state, logits, sampling, stop_ids)

    def unfinished(limit: Any) -> Any:
        return lambda state: (state.step < limit) & ~jnp.all(state.done)

    # The token after a context of n_positions is the last that positions, and so keys and values, are good for.
    fits = config.n_positions - jnp.max(state.lengths) + 1
    state = state._replace(cache=without_row_axis(state.cache))
    state = jax.lax.while_loop(unfinished(jnp.minimum(until, fits)), with_cache, state)
    if plan.windows:
        state = jax.lax.while_loop(unfinished(until), with_window, state)
    return state._replace(cache=with_row_axis(state.cache))


def _write(state: State, logits: Float[Array, "b v"], sampling: Sampling, stop_ids: Int[Array, " stop"]) -> State:
    """Draws the next token of each row and writes it down."""
    rows = jnp.arange(len(logits))
    keys = jax.vmap(lambda key: jax.random.fold_in(key, state.step))(state.keys)
    new = sample(logits, keys, sampling, state.seen)
    log_probs = -ops.cross_entropy(logits, new).astype(jnp.float32)
    going = ~state.done
    at = state.lengths + state.counts
    return state._replace(
        step=state.step + 1,
        # A row that has ended writes beyond the end, which is dropped.
        history=state.history.at[rows, jnp.where(going, at, state.history.shape[1])].set(new, mode="drop"),
        log_probs=state.log_probs.at[:, state.step].set(jnp.where(going, log_probs, 0)),
        counts=state.counts + going,
        seen=state.seen.at[rows, new].max(going),
        done=state.done | jnp.isin(new, stop_ids),
    )


def written(plan: Plan, state: State) -> Int[Array, "b new"]:
    """The new tokens, 0 after a row's end."""
    return jax.vmap(lambda row, first: jax.lax.dynamic_slice(row, (first,), (plan.new_width,)))(
        state.history, state.lengths
    )
