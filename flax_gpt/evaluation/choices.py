"""Questions with answers to choose from, or a last word to guess, read from local files of JSON lines.

Three forms, told apart by the keys of a file's first line:

    {"ctx": "A man sits down.", "endings": ["He eats.", ...], "label": 2}    HellaSwag's own
    {"text": "... and closed the door"}                                      LAMBADA's: the last word is asked for
    {"prompt": "2+2=", "choices": ["3", "4"], "answer": 1}                   any others'; nothing is put between

HellaSwag's endings are joined with a space, and so is LAMBADA's last word. Context and continuation are tokenized
separately, the space being the continuation's first character. GPT-2's tokenizer cuts text before a space, so that this
gives the tokens of the whole text, as evaluations of GPT-2 do; where a context ends in the midst of a word of it, the
two are different, and it is the separate ones that are scored.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from flax_gpt import ops
from flax_gpt.config import GPTConfig
from flax_gpt.data.tokenizer import Tokenizer
from flax_gpt.evaluation.perplexity import Report
from flax_gpt.forward import Params, forward

Pair = tuple[np.ndarray, np.ndarray]  # ids of a context, ids of what follows it

SHORTEST_ROW = 16  # rows are padded to a power of two from here up, so that few shapes compile


@dataclasses.dataclass(frozen=True)
class Question:
    """A context, what may follow it, and what does.

    Attributes:
        context: what is given.
        choices: what may follow, each with the space that joins it, if any. A single one is to be guessed outright.
        answer: the index of the right one.
        place: where it was read, for messages.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    place: str = "the question"


@dataclasses.dataclass(frozen=True)
class ChoiceScore:
    """How often a model finds the right choice more likely than the others (the first of equally likely ones counts).

    Attributes:
        questions: how many were asked.
        accuracy: share answered right by the log-probability of a choice, the sum over its tokens.
        accuracy_per_token: by that sum divided by the number of its tokens, as nanoGPT's descendants score HellaSwag.
        accuracy_per_byte: divided by the choice's length in bytes of UTF-8, without white space at its ends:
            lm-evaluation-harness's `acc_bytes`, and for ASCII its `acc_norm`, which divides by characters.
        truncated: questions that did not fit and lost the beginning of their context.
    """

    questions: int
    accuracy: float
    accuracy_per_token: float
    accuracy_per_byte: float
    truncated: int


@dataclasses.dataclass(frozen=True)
class LastWordScore:
    """How well a model guesses the last word of texts.

    Attributes:
        questions: how many were asked.
        accuracy: share whose every token is the most likely one: greedy generation would write the word.
        perplexity: exp of the mean negative log-likelihood of a word (not of a token).
        truncated: questions that did not fit and lost the beginning of their context.
    """

    questions: int
    accuracy: float
    perplexity: float
    truncated: int


@dataclasses.dataclass(frozen=True)
class ContinuationScores:
    """What a model makes of continuations.

    Attributes:
        log_probs: of each given its context, the sum over its tokens, in nats.
        greedy: whether each of its tokens is the most likely one.
    """

    log_probs: Float[np.ndarray, " n"]
    greedy: Bool[np.ndarray, " n"]


def read_questions(path: str | Path) -> list[Question]:
    """Reads a file of JSON lines in one of the three forms; empty lines are passed over.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not JSON or not of the form of the first; the message names file, line and what is amiss.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    questions: list[Question] = []
    form: str | None = None
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                entries = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{place}: not a JSON object ({error})") from error
            if not isinstance(entries, dict):
                raise ValueError(f"{place}: not a JSON object")
            form = form or _form(entries, place)
            questions.append(_question(form, entries, place))
    if not questions:
        raise ValueError(f"{path} holds no question")
    return questions


def _form(entries: dict[str, Any], place: str) -> str:
    """The key that tells the form of a file."""
    for key in ("endings", "choices", "text"):
        if key in entries:
            return key
    raise ValueError(
        f"{place}: expected the keys ctx, endings, label (HellaSwag), text (LAMBADA) or prompt, choices, answer; "
        f"got {', '.join(entries) or 'none'}"
    )


def _question(form: str, entries: dict[str, Any], place: str) -> Question:
    """A line of a file of this form, checked."""
    keys = {"endings": ("ctx", "endings", "label"), "choices": ("prompt", "choices", "answer"), "text": ("text",)}[form]
    if missing := [key for key in keys if key not in entries]:
        raise ValueError(f"{place}: {', '.join(map(repr, missing))} is missing")
    if form == "text":
        text = entries["text"]
        context, space, word = text.strip().rpartition(" ") if isinstance(text, str) else ("", "", "")
        if not context:
            raise ValueError(f"{place}: 'text' must hold at least two words with a space between, got {text!r}")
        return Question(context, (space + word,), 0, place)
    context, choices, answer = (entries[key] for key in keys)
    if not isinstance(context, str):
        raise ValueError(f"{place}: {keys[0]!r} must be a string, got {context!r}")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
        raise ValueError(f"{place}: {keys[1]!r} must be a list of at least two strings, none empty; got {choices!r}")
    # HellaSwag's label is a number in its own file, and a string of one in some copies.
    if form == "endings" and isinstance(answer, str) and answer.isdecimal():
        answer = int(answer)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise ValueError(f"{place}: {keys[2]!r} must be an index from 0 to {len(choices) - 1}, got {answer!r}")
    return Question(context, tuple(" " + c if form == "endings" else c for c in choices), answer, place)


def score_questions(
    config: GPTConfig,
    params: Params,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    batch_size: int = 16,
    report: Report | None = None,
    **options: Any,
) -> ChoiceScore | LastWordScore:
    """Asks a model all the questions of a file.

    A question that does not fit n_positions loses the beginning of its context, the same for all its choices, and is
    counted in the result.

    Args:
        config, params: the model.
        tokenizer: the one it was trained with.
        questions: from `read_questions`, or made otherwise: all with several choices, or all with one.
        batch_size, report, options: as of `score_continuations`.

    Raises:
        ValueError: there is no question, or questions of both kinds; a context or a choice has no tokens, or a choice
            alone does not fit; the tokenizer cannot encode one. The message says where the question was read.
    """
    if not questions:
        raise ValueError("there are no questions to ask")
    guessed = len(questions[0].choices) == 1
    pairs, truncated = [], 0
    for question in questions:
        if (len(question.choices) == 1) != guessed:
            raise ValueError(f"{question.place}: questions with choices and words to guess cannot be scored together")
        of_question, was_cut = _encode(config, tokenizer, question)
        pairs.extend(of_question)
        truncated += was_cut
    scores = score_continuations(config, params, pairs, batch_size=batch_size, report=report, **options)
    count = len(questions)
    if guessed:
        mean = float(np.mean(scores.log_probs))
        perplexity = math.inf if mean < -700 else math.exp(-mean)
        return LastWordScore(count, float(np.mean(scores.greedy)), perplexity, truncated)

    tokens = np.array([len(continuation) for _, continuation in pairs])
    n_bytes = np.array([len(choice.strip().encode()) for question in questions for choice in question.choices])
    ends = np.cumsum([len(question.choices) for question in questions])
    answers = np.array([question.answer for question in questions])

    def share_right(values: Float[np.ndarray, " n"]) -> float:
        guesses = np.array([np.argmax(of_question) for of_question in np.split(values, ends[:-1])])
        return float(np.mean(guesses == answers))

    by_sum, by_token, by_byte = (share_right(scores.log_probs / length) for length in (1, tokens, n_bytes))
    return ChoiceScore(count, by_sum, by_token, by_byte, truncated)


def _encode(config: GPTConfig, tokenizer: Tokenizer, question: Question) -> tuple[list[Pair], bool]:
    """Context and continuation of each choice, and whether the context had to be cut to fit."""
    try:
        context = tokenizer.encode(question.context)
        choices = [tokenizer.encode(choice) for choice in question.choices]
    except ValueError as error:
        raise ValueError(f"{question.place}: {error}") from error
    if len(context) == 0:
        raise ValueError(f"{question.place}: the context has no tokens, so there is nothing to predict a choice from")
    for choice, ids in zip(question.choices, choices, strict=True):
        if len(ids) == 0:
            raise ValueError(f"{question.place}: the choice {choice!r} has no tokens")
        if len(ids) > config.n_positions:
            raise ValueError(
                f"{question.place}: a choice alone has {len(ids)} tokens, which does not fit "
                f"n_positions={config.n_positions}"
            )
    room = config.n_positions + 1 - max(len(ids) for ids in choices)  # the last token is not an input
    return [(context[-room:], ids) for ids in choices], len(context) > room


def score_continuations(
    config: GPTConfig,
    params: Params,
    pairs: Sequence[Pair],
    *,
    batch_size: int = 16,
    report: Report | None = None,
    **options: Any,
) -> ContinuationScores:
    """Log-probability of continuations, each given its context.

    Rows are padded on the right to a power of two of tokens (n_positions at most) and scored with others of that
    length, so that no more than log2(n_positions) shapes compile.

    Args:
        config, params: the model.
        pairs: ids of a context and of a continuation, each at least one; at most n_positions + 1 together.
        batch_size: rows at a time.
        report: called after each batch with the number of pairs scored so far, and of all.
        options: keyword arguments of `flax_gpt.forward`, such as compute_dtype, layers and block (hashable).

    Raises:
        ValueError: a pair is too long or lacks one of the two, or an id is outside the vocabulary.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    by_length: dict[int, list[int]] = {}
    for index, (context, continuation) in enumerate(pairs):
        t = len(context) + len(continuation) - 1
        if not len(context) or not len(continuation) or t > config.n_positions:
            raise ValueError(
                f"pair {index} has {len(context)} and {len(continuation)} tokens; each must have at least one, and "
                f"both together at most n_positions + 1 = {config.n_positions + 1}"
            )
        both = np.concatenate([context, continuation])
        if both.min() < 0 or both.max() >= config.vocab_size:
            raise ValueError(f"pair {index} has ids outside the vocabulary of {config.vocab_size}")
        padded = min(max(SHORTEST_ROW, 1 << (t - 1).bit_length()), config.n_positions)
        by_length.setdefault(padded, []).append(index)

    log_probs, greedy = np.zeros(len(pairs)), np.zeros(len(pairs), bool)
    frozen, done = tuple(sorted(options.items())), 0
    for t, indices in sorted(by_length.items()):
        for first in range(0, len(indices), batch_size):
            rows = indices[first : first + batch_size]
            texts, scored = _pad([pairs[index] for index in rows], batch_size, t)
            sums, all_most_likely = _score(config, params, texts, scored, frozen)
            log_probs[rows] = np.asarray(sums)[: len(rows)]
            greedy[rows] = np.asarray(all_most_likely)[: len(rows)]
            done += len(rows)
            if report is not None:
                report(done, len(pairs))
    return ContinuationScores(log_probs, greedy)


def _pad(pairs: Sequence[Pair], batch_size: int, t: int) -> tuple[Int[np.ndarray, "b _"], Bool[np.ndarray, "b t"]]:
    """Rows of t + 1 tokens, and which of the last t are of a continuation. What is padded does not matter."""
    texts, scored = np.zeros((batch_size, t + 1), np.int32), np.zeros((batch_size, t), bool)
    for row, (context, continuation) in enumerate(pairs):
        end = len(context) + len(continuation)
        texts[row, : len(context)] = context
        texts[row, len(context) : end] = continuation
        scored[row, len(context) - 1 : end - 1] = True
    return texts, scored


@functools.partial(jax.jit, static_argnames=("config", "options"))
def _score(
    config: GPTConfig,
    params: Params,
    texts: Int[Array, "b _"],
    scored: Bool[Array, "b t"],
    options: tuple[tuple[str, Any], ...],
) -> tuple[Float[Array, " b"], Bool[Array, " b"]]:
    """The log-probability of the scored targets of each row, and whether each of them has the largest logit."""
    # No mask: padding stands on the right, where causality hides it.
    logits = forward(config, params, texts[:, :-1], **dict(options))
    targets = texts[:, 1:]
    log_probs = jnp.sum(jnp.where(scored, -ops.cross_entropy(logits, targets), 0), axis=1)
    return log_probs, jnp.all(~scored | ops.is_largest(logits, targets), axis=1)
