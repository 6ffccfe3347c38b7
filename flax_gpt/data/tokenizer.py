"""Tokenizers that need no download: bytes, characters, and plain numbers for toy tasks; and how one is saved."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        ...

    def encode(self, text: str) -> Int[np.ndarray, " t"]:
        """The ids of a text."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids."""
        ...


def check_ids(ids: Sequence[int] | np.ndarray, vocab_size: int) -> Int[np.ndarray, " t"]:
    """Ids as an array; raises ValueError where one is outside the vocabulary."""
    ids = np.asarray(ids, dtype=np.int64).reshape(-1)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
    return ids


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """The bytes of the text's UTF-8 encoding, ids 0 to 255: encodes everything, needs no vocabulary."""

    vocab_size: int = dataclasses.field(default=256, init=False)

    def encode(self, text: str) -> Int[np.ndarray, " t"]:
        """UTF-8 bytes."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text; bytes that are not UTF-8, as half a character at the end, become U+FFFD."""
        return check_ids(ids, self.vocab_size).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """One id a character of a fixed alphabet.

    Attributes:
        chars: the alphabet; ids are indices into it.
    """

    chars: str

    def __post_init__(self) -> None:
        if len(set(self.chars)) != len(self.chars) or not self.chars:
            raise ValueError(f"the alphabet must be distinct characters, at least one; got {self.chars!r}")

    @classmethod
    def of_text(cls, text: str) -> CharTokenizer:
        """The characters that occur in a text, in code point order."""
        return cls("".join(sorted(set(text))))

    @property
    def vocab_size(self) -> int:
        """Number of characters."""
        return len(self.chars)

    def encode(self, text: str) -> Int[np.ndarray, " t"]:
        """The id of each character.

        Raises:
            ValueError: the text has characters outside the alphabet; the message shows them.
        """
        points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
        ids = _ids_of_points(self.chars).take(points, mode="clip")
        if (ids < 0).any():
            unknown = "".join(sorted(set(text) - set(self.chars)))
            raise ValueError(f"characters outside the model's alphabet of {len(self.chars)}: {unknown[:20]!r}")
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids."""
        return "".join(self.chars[i] for i in check_ids(ids, self.vocab_size))


@functools.lru_cache(maxsize=8)
def _ids_of_points(chars: str) -> Int[np.ndarray, " points"]:
    """The id of every code point, -1 where it has none; the last entry stands for all above the alphabet's.

    Looking them up turns a text of millions of characters at the speed of an array.
    """
    alphabet = np.frombuffer(chars.encode("utf-32-le", errors="surrogatepass"), np.uint32)
    table = np.full(int(alphabet.max()) + 2, -1, np.int32)
    table[alphabet] = np.arange(len(alphabet))
    return table


@dataclasses.dataclass(frozen=True)
class IdTokenizer:
    """Ids written as numbers with spaces between: "2 0 1". The text of the toy tasks.

    Attributes:
        vocab_size: number of ids.
    """

    vocab_size: int

    def encode(self, text: str) -> Int[np.ndarray, " t"]:
        """The numbers in a text.

        Raises:
            ValueError: a word is not a number, or not one below vocab_size.
        """
        try:
            return check_ids([int(word) for word in text.split()], self.vocab_size).astype(np.int32)
        except ValueError as error:
            raise ValueError(f"expected numbers from 0 to {self.vocab_size - 1}, got {text!r} ({error})") from error

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The ids as numbers."""
        return " ".join(str(i) for i in check_ids(ids, self.vocab_size))


FILE_NAME = "flax_gpt_tokenizer.json"


def save_tokenizer(folder: str | Path, tokenizer: Tokenizer) -> None:
    """Writes a tokenizer into a run folder."""
    entries = describe_tokenizer(tokenizer)
    Path(folder, FILE_NAME).write_text(json.dumps(entries, ensure_ascii=True) + "\n", "utf-8")


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, str | int]:
    """What a tokenizer's file says: its kind, and what else it takes to make it again.

    GPT-2's kind is all there is to say of it, since its merges are published; other merges are written out.

    Raises:
        TypeError: it is none of this package's tokenizers.
    """
    from flax_gpt.data.bpe import GPT2Tokenizer  # which takes `check_ids` from here

    match tokenizer:
        case ByteTokenizer():
            return {"kind": "byte"}
        case CharTokenizer(chars):
            return {"kind": "char", "chars": chars}
        case IdTokenizer(vocab_size):
            return {"kind": "id", "vocab_size": vocab_size}
        case GPT2Tokenizer():
            return {"kind": "gpt2"} if tokenizer.is_published else {"kind": "gpt2", "merges": tokenizer.merges}
    raise TypeError(f"only byte, char, id and GPT-2 tokenizers can be saved, got {tokenizer!r}")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Reads the tokenizer of a run folder.

    Raises:
        FileNotFoundError: the folder has none.
        ValueError: the file is not one that `save_tokenizer` wrote, or it is GPT-2's and its merges cannot be found.
    """
    from flax_gpt.data.bpe import GPT2Tokenizer

    path = Path(folder, FILE_NAME)
    try:
        entries = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a tokenizer file: {error}") from error
    try:
        match entries:
            case {"kind": "byte"}:
                return ByteTokenizer()
            case {"kind": "char", "chars": str(chars)}:
                return CharTokenizer(chars)
            case {"kind": "id", "vocab_size": int(vocab_size)}:
                return IdTokenizer(vocab_size)
            case {"kind": "gpt2", "merges": str(merges)}:
                return GPT2Tokenizer(merges)
            case {"kind": "gpt2"}:
                return GPT2Tokenizer()
    except ValueError as error:
        raise ValueError(f"the tokenizer in {path} cannot be made: {error}") from error
    raise ValueError(f"{path} is not a tokenizer file: it describes no byte, char, id or GPT-2 tokenizer")
