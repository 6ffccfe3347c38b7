"""Perplexity of a text of any length, by windows that slide over it.

A model sees at most n_positions tokens, so a longer text is cut into windows of `window` inputs, each `stride` tokens
further than the one before. A window scores only what none before it has: the first all its targets, each later one its
last `stride`. So every token but the text's first is scored exactly once, and from at least window - stride + 1 tokens
before it where there are that many:

    stride = window    windows side by side, the cheapest: the loss that training reports
    stride = 1         each token from the `window` tokens before it, the dearest: one forward pass a token
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from flax_gpt import ops
from flax_gpt.config import GPTConfig
from flax_gpt.data.tokenizer import Tokenizer
from flax_gpt.forward import Params, forward

Report = Callable[[int, int], None]  # takes how many are done, of how many


@dataclasses.dataclass(frozen=True)
class TextScore:
    """How well a model predicts a text.

    Attributes:
        nats: negative log-likelihood of all that was scored, in nats.
        tokens: how many were scored: all but the text's first.
        characters, bytes: of the scored part, in Unicode code points and in UTF-8; None where only ids were given.
    """

    nats: float
    tokens: int
    characters: int | None = None
    bytes: int | None = None

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss): among how many equally likely tokens the model is as unsure."""
        return math.inf if self.loss > 700 else math.exp(self.loss)  # math.exp raises where a float would overflow

    @property
    def bits_per_token(self) -> float:
        """Bits a token."""
        return self.loss / math.log(2)

    @property
    def bits_per_character(self) -> float | None:
        """Bits a character, which models with different tokenizers can be compared by; None where not known."""
        return self.nats / math.log(2) / self.characters if self.characters else None

    @property
    def bits_per_byte(self) -> float | None:
        """Bits a byte of UTF-8, likewise."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def score_text(
    config: GPTConfig, params: Params, tokenizer: Tokenizer, text: str, *, limit: int | None = None, **options: Any
) -> TextScore:
    """How well a model predicts a text.

    Args:
        config, params: the model.
        tokenizer: the one it was trained with.
        text: at least two tokens of it.
        limit: score no more than the first so many tokens.
        options: as of `score_ids`.

    Raises:
        ValueError: as `score_ids`, or the tokenizer cannot encode the text.
    """
    ids = tokenizer.encode(text)
    if limit is not None and limit < len(ids):
        ids = ids[:limit]
        text = tokenizer.decode(ids)
    score = score_ids(config, params, ids, **options)
    first = tokenizer.decode(ids[:1])
    if not text.startswith(first):
        # The first token is part of a character, a byte of one, whose remaining bytes are scored.
        return dataclasses.replace(score, characters=len(text), bytes=len(text.encode()) - 1)
    return dataclasses.replace(score, characters=len(text) - len(first), bytes=len(text.encode()) - len(first.encode()))


def score_ids(
    config: GPTConfig, params: Params, ids: Integer[np.ndarray, " t"], *, report: Report | None = None, **options: Any
) -> TextScore:
    """How well a model predicts a text given as ids; only its total is kept, so that the text may be of any length.

    Args:
        config, params, ids: as of `window_scores`.
        report: called after each batch with the number of tokens scored so far, and of all there are to score.
        options: window, stride, batch_size and the others of `window_scores`.
    """
    nats, tokens = 0.0, 0
    for scores in window_scores(config, params, ids, **options):
        nats += float(np.sum(scores, dtype=np.float64))
        tokens += len(scores)
        if report is not None:
            report(tokens, len(ids) - 1)
    return TextScore(nats, tokens)


def sliding_window_scores(
    config: GPTConfig, params: Params, ids: Integer[np.ndarray, " t"] | Sequence[int], **options: Any
) -> Float[np.ndarray, " t-1"]:
    """The negative log-likelihood in nats of each token after the first: `window_scores` in one array.

    The mean's exponential is the perplexity.
    """
    return np.concatenate(list(window_scores(config, params, np.asarray(ids), **options)))


def window_scores(
    config: GPTConfig,
    params: Params,
    ids: Integer[np.ndarray, " t"],
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    **options: Any,
) -> Iterator[Float[np.ndarray, " _"]]:
    """The negative log-likelihood in nats of each token after the first, in order, batch by batch.

    All batches have one shape, so that a text compiles once. What takes memory is a batch's logits, [batch_size,
    window, v] in float32; the ids are read a batch at a time and may be a `np.memmap`.

    Args:
        config, params: the model.
        ids: the text.
        window: inputs that the model sees at a time; by default n_positions.
        stride: tokens from one window to the next, in 1..window; by default window, the cheapest.
        batch_size: windows at a time.
        options: keyword arguments of `flax_gpt.forward`, such as compute_dtype, layers and block (hashable).

    Yields:
        The scores of one batch of windows, float32 (float64 for float64 parameters); len(ids) - 1 in all.

    Raises:
        ValueError: window, stride or batch_size is out of range; there are fewer than two ids, or one is outside the
            vocabulary.
    """
    window = config.n_positions if window is None else window
    stride = window if stride is None else stride
    if not 1 <= window <= config.n_positions:
        raise ValueError(f"window must be from 1 to n_positions={config.n_positions}, got {window}")
    if not 1 <= stride <= window:
        raise ValueError(f"stride must be from 1 to window={window}, got {stride}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    targets = len(ids) - 1
    if targets < 1:
        raise ValueError(f"a text to score needs at least 2 tokens, one to predict the next from; got {len(ids)}")
    return _window_scores(config, params, ids, window, stride, batch_size, tuple(sorted(options.items())))


def _window_scores(
    config: GPTConfig, params: Params, ids: np.ndarray, window: int, stride: int, batch_size: int, options: tuple
) -> Iterator[np.ndarray]:
    targets = len(ids) - 1
    count = 1 + max(0, -(-(targets - window) // stride))
    rows = min(batch_size, count)
    dispatched: list[tuple[Array, int]] = []
    for first in range(0, count, rows):
        texts = np.zeros((rows, window + 1), np.int32)  # what stands after the end does not matter: nothing looks ahead
        for row, start in enumerate(range(first * stride, min(first + rows, count) * stride, stride)):
            piece = np.asarray(ids[start : start + window + 1])
            _check_range(config, piece, start)
            texts[row, : len(piece)] = piece
        # One batch is on the device while the scores of the one before are fetched.
        dispatched.append((_score(config, params, texts, options), first))
        if len(dispatched) > 1:
            yield _new_scores(*dispatched.pop(0), count, targets, window, stride)
    yield _new_scores(*dispatched.pop(), count, targets, window, stride)


def _new_scores(
    scores: Float[Array, "b t"], first: int, count: int, targets: int, window: int, stride: int
) -> Float[np.ndarray, " _"]:
    """Of a batch of windows, of which `first` is the first one's index: the scores that no earlier window has given."""
    pieces = []
    for row, index in zip(np.asarray(scores), range(first, count), strict=False):
        start = index * stride
        pieces.append(row[0 if index == 0 else window - stride : targets - start])
    return np.concatenate(pieces)


def _check_range(config: GPTConfig, ids: np.ndarray, start: int) -> None:
    outside = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if outside.size:
        raise ValueError(
            f"token id {ids[outside[0]]} at position {start + outside[0]} of the text is outside the vocabulary of "
            f"{config.vocab_size} (ids 0 to {config.vocab_size - 1})"
        )


@functools.partial(jax.jit, static_argnames=("config", "options"))
def _score(
    config: GPTConfig, params: Params, texts: Int[Array, "b _"], options: tuple[tuple[str, Any], ...]
) -> Float[Array, "b t"]:
    """The negative log-likelihood of each token after a row's first."""
    logits = forward(config, params, texts[:, :-1], **dict(options))
    return ops.cross_entropy(logits, texts[:, 1:])
