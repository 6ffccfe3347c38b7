"""Text as it is written, in pieces that never hold half a character nor the beginning of what will be cut off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int, Key

from flax_gpt.activations import Edit
from flax_gpt.config import GPTConfig
from flax_gpt.data.tokenizer import Tokenizer
from flax_gpt.forward import Params
from flax_gpt.generation.decode import plan_generation
from flax_gpt.generation.generate import Decoder, check_key
from flax_gpt.generation.sampling import PerRow, make_sampling
from flax_gpt.model import Block, BlockType

# How an id is spelt depends on so many before it and no more: as many as a character has bytes.
_CONTEXT = 4
_HALF = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet one


def stream(
    config: GPTConfig,
    params: Params,
    prompt: str | Sequence[int] | Int[np.ndarray, " t"],
    tokenizer: Tokenizer,
    max_new_tokens: int,
    *,
    temperature: PerRow = 1.0,
    top_k: int | None = None,
    top_p: PerRow | None = None,
    min_p: PerRow | None = None,
    repetition_penalty: PerRow | None = None,
    logit_bias: Mapping[int, float] | np.ndarray | Float[Array, "..."] | None = None,
    key: Key[Array, ""] | None = None,
    stop_ids: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    sliding: bool = False,
    edit: Edit | None = None,
    compute_dtype: Any = None,
    block: BlockType = Block,
) -> Stream:
    """The text that continues a prompt, piece by piece as its tokens are drawn: what `generate` writes in its one row.

        for piece in fg.stream(config, params, "Once", tokenizer, 100, key=jax.random.key(0)):
            print(piece, end="", flush=True)

    Args:
        config, params, max_new_tokens, and all that is not named here: as of `generate`.
        prompt: a text, or its ids.
        tokenizer: of the model. Ids beyond its vocabulary, where a model's is larger, are never drawn.
        stop_ids: the text ends before the first of these.
        stop_strings: the text ends before the first of these.

    Returns:
        An iterator of pieces of the text, none of them empty, each as soon as its characters are whole.

    Raises:
        ValueError: as `generate`.
    """
    ids = np.asarray(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    plan, inputs = plan_generation(config, [ids], None, max_new_tokens, 1, stop_ids, sliding, compute_dtype, block)
    sampling = make_sampling(
        1, config.vocab_size, temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, tokenizer.vocab_size
    )
    decoder = Decoder(plan, params, inputs, sampling, check_key(key, temperature), edit)
    return Stream(decoder, TextPieces(tokenizer, ids, stop_strings), max_new_tokens, frozenset(stop_ids))


class Stream(Iterator[str]):
    """What `stream` returns.

    Attributes:
        tokens: the ids drawn so far, a stop id included.
    """

    def __init__(self, decoder: Decoder, pieces: TextPieces, max_new_tokens: int, stop_ids: frozenset[int]) -> None:
        self.tokens: list[int] = []
        self._texts = self._run(decoder, pieces, max_new_tokens, stop_ids)

    def __next__(self) -> str:
        return next(self._texts)

    def _run(
        self, decoder: Decoder, pieces: TextPieces, max_new_tokens: int, stop_ids: frozenset[int]
    ) -> Iterator[str]:
        for until in range(1, max_new_tokens + 1):
            decoder.advance(until)
            self.tokens = decoder.tokens()[0].tolist()
            if self.tokens[-1] in stop_ids:
                break
            if piece := pieces.feed(self.tokens[-1]):
                yield piece
            if pieces.ended:
                return
        if piece := pieces.flush():
            yield piece


class TextPieces:
    """Ids in, one at a time; out come the pieces of their text that no further id can change.

    Args:
        tokenizer: of the ids.
        context: the ids before them, whose text is not given out.
        stop_strings: the text ends before the first of these.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] | np.ndarray, stop_strings: Sequence[str] = ()):
        self._tokenizer, self._stop_strings = tokenizer, tuple(stop_strings)
        self._ids = [int(i) for i in context[-_CONTEXT:]]
        self._read, self._held = len(self._ids), ""
        self.ended = False

    def feed(self, new: int) -> str:
        """Takes an id; returns the text that is now certain, perhaps none."""
        self._ids.append(new)
        return "" if self._text_of_ids().endswith(_HALF) else self._emit(self._unread(), last=False)

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        return self._emit(self._unread(), last=True)

    def _text_of_ids(self) -> str:
        return self._tokenizer.decode(self._ids)

    def _unread(self) -> str:
        """The text after the part that was read; what was read becomes the context of what follows."""
        context = self._tokenizer.decode(self._ids[: self._read]).rstrip(_HALF)
        text = self._text_of_ids()[len(context) :]
        self._ids = self._ids[-_CONTEXT:]
        self._read = len(self._ids)
        return text

    def _emit(self, text: str, last: bool) -> str:
        text, self._held = self._held + text, ""
        places = [place for string in self._stop_strings if (place := text.find(string)) >= 0]
        if places:
            self.ended = True
            return text[: min(places)]
        if last:
            return text
        # The end of the text may be the beginning of a string that will be cut off.
        longest = max((len(string) for string in self._stop_strings), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-n:]) for string in self._stop_strings):
                text, self._held = text[:-n], text[-n:]
                break
        return text
