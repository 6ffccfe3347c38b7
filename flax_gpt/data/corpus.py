"""A text as training data: read, turned into ids, split, cut into batches."""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from flax_gpt.data.source import Batch
from flax_gpt.data.tokenizer import Tokenizer


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, or of all the files below a folder, in the order of their paths.

    Hidden files and folders are passed over.

    Raises:
        FileNotFoundError: there is nothing at the path, or no file below it.
        ValueError: a file is not UTF-8 (the message says which, and where), or there is no text in it all.
        OSError: a file cannot be read.
    """
    text = "".join(_read_file(file) for file in list_files(path))
    if not text:
        raise ValueError(f"{path} is empty")
    return text


def list_files(path: str | Path) -> list[Path]:
    """The file at a path, or all files below a folder but the hidden ones, in the order of their paths.

    Raises:
        FileNotFoundError: there is nothing at the path, or no file below it.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not files:
            raise FileNotFoundError(f"no files in {path}")
        return files
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}")
    return [path]


def _read_file(path: Path) -> str:
    try:
        # newline="": the text as it is, with no line ending translated.
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {error.start}; "
            "convert it to UTF-8 or leave it out"
        ) from error


def stdlib_text() -> str:
    """A real text that every machine with Python has: the source of its standard library's top-level modules.

    It differs a little from one Python version to the next. The few characters that are not ASCII are left out, so that
    a character vocabulary is about a hundred symbols.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise FileNotFoundError(f"this Python has no source files in {folder}; give a text of your own")
    return "".join(file.read_bytes().decode("ascii", errors="ignore") for file in files)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A text as ids, split into a part to train on and a part to validate with.

    Attributes:
        train: ids of the first part.
        validation: ids of the rest.
        tokenizer: what made them.
        t: length of the windows that are cut from them.
        characters_per_token: of the validation part.

    Raises:
        ValueError: a part is too short for one window of t tokens and the token after it.
    """

    train: Int[np.ndarray, " n"]
    validation: Int[np.ndarray, " m"]
    tokenizer: Tokenizer
    t: int
    characters_per_token: float = 1.0
    optimum: ClassVar[None] = None  # nobody knows the entropy of a text

    def __post_init__(self) -> None:
        for name, part in (("training", self.train), ("validation", self.validation)):
            if len(part) < self.t + 1:
                raise ValueError(
                    f"the {name} part of the text has {len(part)} tokens, too few for a context of {self.t} and the "
                    f"token after it; use a longer text or a shorter context (n_positions)"
                )

    @classmethod
    def of_text(cls, text: str, tokenizer: Tokenizer, t: int, train_fraction: float = 0.9) -> Corpus:
        """Encodes a text; the first `train_fraction` of its characters are to train on, the rest to validate with."""
        split = int(len(text) * train_fraction)
        train, validation = tokenizer.encode(text[:split]), tokenizer.encode(text[split:])
        return cls(train, validation, tokenizer, t, (len(text) - split) / max(len(validation), 1))

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return self.tokenizer.vocab_size

    def training_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """Windows from random places of the training part; a pure function of its arguments."""
        starts = np.random.default_rng((seed, step)).integers(len(self.train) - self.t, size=batch_size)
        return self._windows(self.train, starts)

    def validation_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """The validation part as windows side by side: each token predicted once, but for a tail below one window.

        Args:
            batch_size: of every batch; the last is filled up with windows that are not scored.
            limit: at most so many batches, their windows evenly spread over the part; None is all of it.
        """
        starts = np.arange(0, len(self.validation) - self.t, self.t)
        if limit is not None and limit * batch_size < len(starts):
            starts = starts[np.linspace(0, len(starts) - 1, limit * batch_size).astype(int)]
        for first in range(0, len(starts), batch_size):
            rows = starts[first : first + batch_size]
            batch = self._windows(self.validation, np.pad(rows, (0, batch_size - len(rows))))
            batch.scored[len(rows) :] = False
            yield batch

    def _windows(self, ids: np.ndarray, starts: np.ndarray) -> Batch:
        windows = ids[starts[:, None] + np.arange(self.t + 1)]
        return Batch(windows[:, :-1], windows[:, 1:], np.ones((len(starts), self.t), bool))
