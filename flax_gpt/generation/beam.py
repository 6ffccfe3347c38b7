"""Beam search: the most likely continuations that a search over a few at a time finds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params
from flax_gpt.generation.cache import Cache, logits_of, prepare, read
from flax_gpt.generation.decode import Inputs, Plan, Prompts, plan_generation, start
from flax_gpt.model import Block, BlockType

# What stands for "not to be chosen"; finite, so that sums of it stay comparable.
_NEVER = -1e9


class Beams(NamedTuple):
    """What `beam_search` found, the best first.

    Attributes:
        tokens: the new tokens of each continuation, 0 after its end.
        lengths: how many they are, the stop id included.
        scores: the sum of their log-probabilities, in nats, divided by length ** length_penalty.
    """

    tokens: Int[Array, "b n new"]
    lengths: Int[Array, "b n"]
    scores: Float[Array, "b n"]


def beam_search(
    config: GPTConfig,
    params: Params,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    num_beams: int,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    lengths: Sequence[int] | np.ndarray | None = None,
    stop_ids: Sequence[int] = (),
    compute_dtype: Any = None,
    block: BlockType = Block,
) -> Beams:
    """Keeps the `num_beams` most likely continuations so far of each prompt, and extends them all by a token a step.

    A continuation is complete with a stop id, or with max_new_tokens. A prompt's search ends when the best that goes
    on could no more come before the worst complete one, as it scores now: a guess that Hugging Face's `generate` makes
    too, and whose results these are.

    Args:
        config, params, prompts, max_new_tokens, lengths, stop_ids, compute_dtype, block: as of `generate`.
        num_beams: how many to keep, n.
        length_penalty: above 0 favours long continuations, below 0 short ones; changing it compiles nothing.
        early_stopping: end as soon as there are num_beams complete ones.

    Raises:
        ValueError: as `generate`; num_beams is below 1 or above the vocabulary's size.
    """
    if not 1 <= num_beams <= config.vocab_size:
        raise ValueError(f"num_beams must be from 1 to the vocabulary's {config.vocab_size}, got {num_beams}")
    plan, inputs = plan_generation(
        config, prompts, lengths, max_new_tokens, num_beams, stop_ids, None, compute_dtype, block
    )
    found = _search(plan, params, inputs, jnp.asarray(length_penalty, jnp.float32), jnp.asarray(early_stopping))
    return found._replace(tokens=found.tokens[..., :max_new_tokens])


class _State(NamedTuple):
    step: Int[Array, ""]
    cache: Cache
    # Those that go on, the best first.
    running: Int[Array, "b n new"]
    running_scores: Float[Array, "b n"]
    # Those that are complete, the best first; `complete` says which of the places are taken.
    found: Beams
    complete: Bool[Array, "b n"]
    improvable: Bool[Array, " b"]


@functools.partial(jax.jit, static_argnames="plan")
def _search(
    plan: Plan, params: Params, inputs: Inputs, length_penalty: Float[Array, ""], early_stopping: Bool[Array, ""]
) -> Beams:
    config, n = plan.config, plan.num_samples
    b = len(inputs.tokens)
    weights = prepare(config, params, plan.compute_dtype, plan.block)
    begun = start(plan, weights, inputs, jax.random.key(0), None)  # which draws nothing

    def gather(x: Array, index: Array) -> Array:
        return jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1)

    def extend(state: _State, logits: Array) -> _State:
        """One token more for each."""
        step, v = state.step, logits.shape[-1]
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32)).reshape(b, n, v)
        totals = (state.running_scores[..., None] + log_probs).reshape(b, n * v)
        # So many that n go on even if each beam's likeliest tokens are the stop ids.
        candidates = min(1 + len(inputs.stop_ids), v) * n
        scores, index = jax.lax.top_k(totals, candidates)
        parents, new = index // v, (index % v).astype(jnp.int32)
        texts = gather(state.running, parents).at[:, :, step].set(new)
        ends = jnp.isin(new, inputs.stop_ids) | (step + 1 >= inputs.limit)

        running_scores, order = jax.lax.top_k(scores + _NEVER * ends, n)
        rows = (jnp.arange(b)[:, None] * n + gather(parents, order)).reshape(-1)
        cache = state.cache._replace(
            keys=tuple(keys[rows] for keys in state.cache.keys),
            values=tuple(values[rows] for values in state.cache.values),
        )

        length = (step + 1).astype(jnp.float32)
        chosen = ends & (jnp.arange(candidates) < n)
        closed = (early_stopping & jnp.all(state.complete, axis=1)) | ~state.improvable
        final = scores / length**length_penalty + _NEVER * closed[:, None] + _NEVER * ~chosen
        found_scores, best = jax.lax.top_k(jnp.concatenate([state.found.scores, final], axis=1), n)
        found = Beams(
            gather(jnp.concatenate([state.found.tokens, texts], axis=1), best),
            gather(jnp.concatenate([state.found.lengths, jnp.full((b, candidates), step + 1)], axis=1), best),
            found_scores,
        )
        complete = gather(jnp.concatenate([state.complete, chosen], axis=1), best)
        worst = jnp.where(complete, jnp.min(found_scores, axis=1, keepdims=True), _NEVER)
        hope = running_scores[:, :1] / length**length_penalty
        return _State(
            step + 1,
            cache,
            gather(texts, order),
            running_scores,
            found,
            complete,
            state.improvable & jnp.any(hope > worst, axis=1),
        )

    def unfinished(state: _State) -> Array:
        open_ = jnp.any(state.improvable) & ~(early_stopping & jnp.all(state.complete))
        return open_ & (state.step < inputs.limit)

    def step(state: _State) -> _State:
        new = state.running.reshape(b * n, -1)[:, state.step - 1]
        last = jnp.where(state.step > 0, new, begun.history[jnp.arange(b * n), begun.lengths - 1])
        x, cache = read(config, weights, last[:, None], jnp.ones((b * n, 1), bool), state.cache, None, plan.block)
        return extend(state._replace(cache=cache), logits_of(config, weights, x, None)[:, 0])

    state = _State(
        step=jnp.zeros((), jnp.int32),
        cache=begun.cache,
        running=jnp.zeros((b, n, plan.new_width), jnp.int32),
        # All begin alike: but one of them would only be drawn n times.
        running_scores=jnp.broadcast_to(jnp.where(jnp.arange(n) == 0, 0.0, _NEVER), (b, n)),
        found=Beams(
            jnp.zeros((b, n, plan.new_width), jnp.int32), jnp.zeros((b, n), jnp.int32), jnp.full((b, n), _NEVER)
        ),
        complete=jnp.zeros((b, n), bool),
        improvable=jnp.ones(b, bool),
    )
    state = jax.lax.while_loop(unfinished, step, state)
    new = jnp.arange(plan.new_width) < state.found.lengths[..., None]
    return state.found._replace(tokens=jnp.where(new, state.found.tokens, 0))
