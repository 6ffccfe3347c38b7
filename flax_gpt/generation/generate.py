"""Text from a model: prompts in, new tokens out, in one compiled program with a key-value cache."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from flax_gpt.activations import Edit
from flax_gpt.config import GPTConfig
from flax_gpt.data.tokenizer import Tokenizer
from flax_gpt.forward import Params
from flax_gpt.generation.cache import Weights, prepare
from flax_gpt.generation.decode import Inputs, Plan, Prompts, advance, plan_generation, start, written
from flax_gpt.generation.sampling import PerRow, Sampling, make_sampling
from flax_gpt.model import Block, BlockType

PIECE = 16  # so many tokens are written before the text is searched for what ends it


class Generation(NamedTuple):
    """What `generate` wrote.

    Attributes:
        tokens: the new tokens, without the prompt; 0 after a row's end.
        lengths: how many of them each row has, the stop id included.
        log_probs: the model's log-probability of each, in nats, whatever the sampling made of it; 0 after a row's end.
    """

    tokens: Int[Array, "b new"]
    lengths: Int[Array, " b"]
    log_probs: Float[Array, "b new"]


def generate(
    config: GPTConfig,
    params: Params,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    lengths: Sequence[int] | np.ndarray | None = None,
    num_samples: int = 1,
    temperature: PerRow = 1.0,
    top_k: int | Sequence[int] | np.ndarray | Int[Array, " b"] | None = None,
    top_p: PerRow | None = None,
    min_p: PerRow | None = None,
    repetition_penalty: PerRow | None = None,
    logit_bias: Mapping[int, float] | np.ndarray | Float[Array, "..."] | None = None,
    key: Key[Array, ""] | None = None,
    stop_ids: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    sliding: bool = False,
    edit: Edit | None = None,
    compute_dtype: Any = None,
    block: BlockType = Block,
) -> Generation:
    """Continues prompts, one token after another, each drawn from softmax(logits / temperature) after filtering.

    It compiles once for a config, a number of rows and each range of lengths that `bucket` knows; no value of the
    sampling compiles anything. What row i draws depends on key and i alone, whatever stands in the other rows.

    Args:
        config, params: the model.
        prompts: lists of ids, of any lengths above 0; or a padded array [b, t] with `lengths`.
        max_new_tokens: how many tokens to write, unless a stop id comes first.
        lengths: of the rows of a padded array; what stands after them does not matter.
        num_samples: continuations of each prompt: those of prompt i are the rows from i * num_samples on. A setting
            with a value a row has one for each of them.
        temperature: below 1 sharpens, above 1 flattens; 0 always takes the most likely token. A number, or one a row,
            as are those that follow.
        top_k: draw from the k most likely tokens only; None, 0 or more than there are is no filter.
        top_p: draw from the smallest set of most likely tokens whose probabilities, after temperature and top_k, add up
            to at least p; 1 or None is no filter.
        min_p: draw from the tokens that are at least min_p times as likely as the likeliest; 0 or None is no filter.
        repetition_penalty: above 1 makes the tokens that a row holds already less likely; 1 or None is none.
        logit_bias: added to the logits: {id: bias}, or an array [v] or [b, v]; -inf bans a token.
        key: for the draws; may be None where temperature is 0.
        stop_ids: a row ends with the first of these.
        stop_strings: a row ends with the token that completes the first of these in the text of its new tokens. They
            are looked for on the host, every few tokens, and need the `tokenizer`.
        tokenizer: what the ids are of. Ids beyond its vocabulary, where a model's is larger, are never drawn.
        sliding: beyond n_positions, go on with the last n_positions tokens as context, their positions counted anew.
            That makes all keys and values anew for each token, and so takes far longer.
        edit: as of `forward`: called for the prompts, which stand at the left of an axis t that is filled up to a
            bucket, and for each new token as it is read, with t = 1. With it, each call compiles; jit around the call
            what is to be called again.
        compute_dtype, block: as of `forward`.

    Returns:
        The new tokens, how many each row has, and their log-probabilities.

    Raises:
        ValueError: an empty prompt, an id out of range, settings out of range, no key at a temperature above 0, or
            prompt and new tokens that exceed n_positions together while `sliding` is off.
    """
    plan, inputs = plan_generation(
        config, prompts, lengths, max_new_tokens, num_samples, stop_ids, sliding, compute_dtype, block
    )
    rows = len(inputs.lengths) * num_samples
    drawable = None if tokenizer is None else tokenizer.vocab_size
    sampling = make_sampling(
        rows, config.vocab_size, temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, drawable
    )
    key = check_key(key, temperature)
    if stop_strings:
        if tokenizer is None:
            raise ValueError("stop_strings need the tokenizer that the ids are of")
        return _until_strings(plan, params, inputs, sampling, key, edit, tokenizer, tuple(stop_strings), max_new_tokens)
    # With an edit, a program of its own: the edit may close over anything.
    run = _run_jit if edit is None else jax.jit(functools.partial(_run, edit=edit), static_argnames="plan")
    # Apart, for XLA on a CPU copies the matrices ten times as fast where they are a program's results.
    weights = prepare(plan.config, params, plan.compute_dtype, plan.block)
    tokens, counts, log_probs = run(plan, weights, inputs, sampling, key)
    return Generation(tokens[:, :max_new_tokens], counts, log_probs[:, :max_new_tokens])


def _run(
    plan: Plan, weights: Weights, inputs: Inputs, sampling: Sampling, key: Key[Array, ""], edit: Edit | None = None
) -> tuple[Array, Array, Array]:
    state = start(plan, weights, inputs, key, edit)
    state = advance(plan, weights, state, sampling, inputs.stop_ids, inputs.limit, edit)
    return written(plan, state), state.counts, state.log_probs


_run_jit = jax.jit(_run, static_argnames=("plan", "edit"))


def _until_strings(
    plan: Plan,
    params: Params,
    inputs: Inputs,
    sampling: Sampling,
    key: Key[Array, ""],
    edit: Edit | None,
    tokenizer: Tokenizer,
    stop_strings: tuple[str, ...],
    max_new_tokens: int,
) -> Generation:
    """Writes some tokens at a time, and looks on the host for what ends a row."""
    decoder = Decoder(plan, params, inputs, sampling, key, edit)
    counts = np.zeros(len(inputs.lengths) * plan.num_samples, np.int32)
    ended = np.zeros(len(counts), bool)
    for until in range(PIECE, max_new_tokens + PIECE, PIECE):
        decoder.advance(min(until, max_new_tokens))
        texts = decoder.tokens()
        for row in np.flatnonzero(~ended):
            counts[row], ended[row] = _end(texts[row], tokenizer, stop_strings)
        decoder.end(ended)
        if decoder.finished:
            break
    tokens = np.zeros((len(counts), max_new_tokens), np.int32)
    for index, count in enumerate(counts):
        tokens[index, :count] = texts[index][:count]
    log_probs = np.asarray(decoder.state.log_probs)[:, :max_new_tokens]
    log_probs = np.where(np.arange(max_new_tokens) < counts[:, None], log_probs, 0)
    return Generation(jnp.asarray(tokens), jnp.asarray(counts), jnp.asarray(log_probs))


def _end(tokens: np.ndarray, tokenizer: Tokenizer, strings: tuple[str, ...]) -> tuple[int, bool]:
    """How many tokens it takes until their text holds one of the strings, and whether it ever does."""
    if not _holds(tokenizer.decode(tokens), strings):
        return len(tokens), False
    return next(n for n in range(1, len(tokens) + 1) if _holds(tokenizer.decode(tokens[:n]), strings)), True


def _holds(text: str, strings: tuple[str, ...]) -> bool:
    return any(string in text for string in strings)


def check_key(key: Key[Array, ""] | None, temperature: Any) -> Key[Array, ""]:
    """The key, or any where nothing is drawn."""
    if key is None and (isinstance(temperature, jax.core.Tracer) or np.any(np.asarray(temperature) > 0)):
        raise ValueError("drawing at a temperature above 0 needs a key, such as jax.random.key(0)")
    return jax.random.key(0) if key is None else key


class Decoder:
    """A generation that is carried on from Python, piece by piece, where what it wrote has to be looked at.

    Attributes:
        state: where it stands.
    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        inputs: Inputs,
        sampling: Sampling,
        key: Key[Array, ""],
        edit: Edit | None = None,
    ) -> None:
        self._plan, self._inputs, self._sampling = plan, inputs, sampling
        self._advance = _advance_jit if edit is None else jax.jit(functools.partial(advance, edit=edit), **_ADVANCE)
        first = _start_jit if edit is None else jax.jit(functools.partial(start, edit=edit), static_argnames="plan")
        self._weights = prepare(plan.config, params, plan.compute_dtype, plan.block)
        self.state = first(plan, self._weights, inputs, key)

    def advance(self, until: int) -> None:
        """Goes on until the rows have so many tokens, or have all ended."""
        stop_ids = self._inputs.stop_ids
        self.state = self._advance(
            self._plan, self._weights, self.state, self._sampling, stop_ids, jnp.asarray(until, jnp.int32)
        )

    def tokens(self) -> list[np.ndarray]:
        """What each row has written so far."""
        history, lengths, counts = map(np.asarray, (self.state.history, self.state.lengths, self.state.counts))
        return [row[n : n + new] for row, n, new in zip(history, lengths, counts, strict=True)]

    def end(self, rows: np.ndarray) -> None:
        """Ends rows, [b] of bool."""
        self.state = self.state._replace(done=self.state.done | rows)

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return bool(jnp.all(self.state.done))


_start_jit = jax.jit(functools.partial(start, edit=None), static_argnames=("plan",))
_ADVANCE: dict[str, Any] = {"static_argnames": ("plan",), "donate_argnames": ("state",)}
_advance_jit = jax.jit(functools.partial(advance, edit=None), **_ADVANCE)
