"""Token shards: a corpus of any size as memory-mapped files, and the batches that are cut from it.

A folder that `flax-gpt data` (`prepare`) writes holds

    shards.json                what is there; written last, so that a folder with it is whole
    flax_gpt_tokenizer.json    what made the ids
    train-00000.bin ...        ids, little-endian uint16 where the vocabulary allows, else uint32, one after the other
    train-00000.idx ...        int64: in this shard, where each document ends (one past its last token)
    validation-00000.bin ...   the same of the other part

A document may go on from one shard to the next; then only the shard where it ends has its end. A folder as nanoGPT's
data scripts write it (train.bin and val.bin, uint16) is read as it is.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int, Integer

from flax_gpt.data.bpe import VOCAB_SIZE, GPT2Tokenizer
from flax_gpt.data.shuffle import round_keys, shuffled
from flax_gpt.data.source import Batch
from flax_gpt.data.tokenizer import IdTokenizer, Tokenizer, load_tokenizer

SHARDS_FILE, JOB_FILE, FORMAT = "shards.json", "prepare.json", 1
SPLITS = ("train", "validation")
# Of the whole folder: what takes longer to read through than one wants to wait is checked batch by batch alone.
CHECKED_AT_OPENING = 2 << 30
PAGE = 1024  # so many places of the shuffled order are worked out at once


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStream:
    """The tokens of one part of a corpus, in several files, read as if they were one array.

    Attributes:
        files: of the ids; for messages.
        shards: their ids.
        ends: of each shard, where its documents end; None where nobody knows.
    """

    files: tuple[Path, ...]
    shards: tuple[Integer[np.ndarray, " _"], ...]
    ends: tuple[Int[np.ndarray, " _"], ...] | None

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each shard begins, and after them the number of all tokens."""
        return (0, *itertools.accumulate(len(shard) for shard in self.shards))

    def __len__(self) -> int:
        return self.offsets[-1]

    def read(self, starts: Sequence[int], length: int) -> Int[np.ndarray, "b length"]:
        """The ids from each start on, int32."""
        ids = np.empty((len(starts), length), np.int32)
        for row, start in zip(ids, starts, strict=True):
            shard = bisect.bisect_right(self.offsets, start) - 1
            first = start - self.offsets[shard]
            piece = self.shards[shard][first : first + length]
            row[: len(piece)] = piece
            if len(piece) < length:  # it goes on in the next shard
                row[len(piece) :] = self.read([start + len(piece)], length - len(piece))[0]
        return ids

    def segments(self, starts: Sequence[int], length: int) -> Int[np.ndarray, "b length"]:
        """Which document, counted from 0 in each row, the tokens from each start on belong to, int32."""
        if self.ends is None:
            raise ValueError(f"nobody knows where the documents in {self.files[0].parent} end")
        first_tokens = np.zeros((len(starts), length), np.int32)
        for row, start in zip(first_tokens, starts, strict=True):
            at, shard = 0, bisect.bisect_right(self.offsets, start) - 1
            while at < length:
                # An end is the place of the next document's first token, be it the next shard's first.
                first, ends = start + at - self.offsets[shard], self.ends[shard]
                last = first + length - at
                following = ends[ends.searchsorted(first, "right") : ends.searchsorted(last, "left")]
                row[following - (first - at)] = 1
                shard += 1
                at = self.offsets[shard] - start
        return np.cumsum(first_tokens, axis=1, dtype=np.int32)

    def check(self, vocab_size: int) -> None:
        """Reads everything.

        Raises:
            ValueError: an id is outside the vocabulary, or the ends of documents are not in order; the message names
                the file and the place.
        """
        for file, shard in zip(self.files, self.shards, strict=True):
            if vocab_size <= np.iinfo(shard.dtype).max and (found := _largest(shard)) >= vocab_size:
                place = next(
                    at + int(np.argmax(part >= vocab_size)) for at, part in _parts(shard) if part.max() >= vocab_size
                )
                raise ValueError(_outside(file, place, int(shard[place]), vocab_size, found))
        for file, shard, ends in zip(self.files, self.shards, self.ends or (), strict=False):
            if len(ends) and (ends[0] < 1 or ends[-1] > len(shard) or (ends[1:] <= ends[:-1]).any()):
                raise ValueError(f"{file.with_suffix('.idx')} does not hold where documents end, in order")

    def place(self, position: int) -> tuple[Path, int]:
        """The file that a token of the stream is in, and its place there."""
        shard = bisect.bisect_right(self.offsets, position) - 1
        return self.files[shard], position - self.offsets[shard]


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedCorpus:
    """A corpus in files, as a source of batches; see `open_shards`.

    Every epoch cuts the training part into windows side by side, from a place that is drawn for it on, and visits each
    of them once, in an order that is drawn for it too. Which windows make a batch is a function of seed, step and batch
    size alone: nothing has to be kept to resume, whatever the size of the corpus.

    Attributes:
        train: tokens of the part to train on.
        validation: tokens of the part to validate with.
        tokenizer: what made them.
        t: length of the windows.
        vocab_size: ids are below it.
        packed: say which document each token belongs to, and do not score a document's first token, which the one
            before it has nothing to do with.
        characters_per_token, bytes_per_token: of the validation part (UTF-8), where it is known.
        process_index, process_count: which rows of every batch are this process's own. Those of all processes together
            are the batch of a process alone; `batch_size` is of them all.

    Raises:
        ValueError: a part is too short for one window, or the documents are to be told apart and cannot be.
    """

    train: TokenStream
    validation: TokenStream
    tokenizer: Tokenizer
    t: int
    vocab_size: int
    packed: bool = False
    characters_per_token: float | None = None
    bytes_per_token: float | None = None
    process_index: int = 0
    process_count: int = 1
    optimum: ClassVar[None] = None  # nobody knows the entropy of a text

    def __post_init__(self) -> None:
        if self.t < 1 or not 0 <= self.process_index < self.process_count:
            raise ValueError(
                f"t must be at least 1 and process_index below process_count, got t={self.t}, "
                f"process_index={self.process_index}, process_count={self.process_count}"
            )
        for name, part in (("training", self.train), ("validation", self.validation)):
            if len(part) < self.t + 1:
                raise ValueError(
                    f"the {name} part in {part.files[0].parent} has {len(part)} tokens, too few for a context of "
                    f"{self.t} and the token after it; use more text or a shorter context (n_positions)"
                )
            if self.packed and part.ends is None:
                raise ValueError(
                    f"{part.files[0].parent} does not say where documents end, which packed=True needs; "
                    "`flax-gpt data` writes folders that do"
                )

    @functools.cached_property
    def windows(self) -> int:
        """How many windows an epoch has.

        One less than the training part could hold, where it holds several, so that the place where the first one begins
        can be drawn, and every token comes to stand at every place of a window.
        """
        return max(1, (len(self.train) - self.t) // self.t)

    def training_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """The windows whose turn it is; a pure function of its arguments.

        Raises:
            ValueError: the corpus is shorter than a batch, or holds an id outside the vocabulary.
        """
        if batch_size > self.windows:
            raise ValueError(
                f"a corpus shorter than one batch: the training part in {self.train.files[0].parent} has "
                f"{len(self.train)} tokens, {self.windows} windows of {self.t}, and a batch has {batch_size}"
            )
        rows = own_rows(batch_size, self.process_index, self.process_count)
        slack = len(self.train) - 1 - self.windows * self.t
        starts = []
        for row in rows:
            epoch, turn = divmod(step * batch_size + row, self.windows)
            page, place = divmod(turn, PAGE)
            starts.append(_page(seed, epoch, page, self.windows, self.t, slack)[place])
        return self._batch(self.train, starts)

    def validation_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """The validation part as windows side by side: each token predicted once, but for a tail below one window.

        Args:
            batch_size: of every batch; the last is filled up with windows that are not scored.
            limit: at most so many batches, their windows evenly spread over the part; None is all of it.
        """
        n = (len(self.validation) - 1) // self.t
        windows: Sequence[int] = range(n)
        if limit is not None and limit * batch_size < n:
            windows = np.linspace(0, n - 1, limit * batch_size).astype(np.int64).tolist()
        for first in range(0, len(windows), batch_size):
            mine = [first + row for row in own_rows(batch_size, self.process_index, self.process_count)]
            batch = self._batch(self.validation, [self.t * windows[i] if i < len(windows) else 0 for i in mine])
            batch.scored[np.array(mine) >= len(windows)] = False
            yield batch

    def _batch(self, part: TokenStream, starts: Sequence[int]) -> Batch:
        ids = part.read(starts, self.t + 1)
        unsigned = ids.view(np.uint32)  # as the file has them
        if unsigned.max() >= self.vocab_size:
            row, column = np.argwhere(unsigned >= self.vocab_size)[0]
            file, place = part.place(starts[row] + int(column))
            raise ValueError(_outside(file, place, int(unsigned[row, column]), self.vocab_size))
        if not self.packed:
            return Batch(ids[:, :-1], ids[:, 1:], np.ones((len(ids), self.t), bool))
        segments = part.segments(starts, self.t + 1)
        return Batch(ids[:, :-1], ids[:, 1:], segments[:, 1:] == segments[:, :-1], segments[:, :-1])


def own_rows(batch_size: int, process_index: int, process_count: int) -> range:
    """Which rows of a batch are a process's own: as many as every other's, side by side.

    Raises:
        ValueError: the rows cannot be dealt out evenly.
    """
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(
            f"batch_size must be a positive multiple of the number of processes, {process_count}; got {batch_size}"
        )
    each = batch_size // process_count
    return range(process_index * each, (process_index + 1) * each)


def is_shards_folder(path: str | Path) -> bool:
    """Whether a path is for `open_shards`: a folder of `prepare`, finished or not, or one of nanoGPT's."""
    return any(Path(path, name).is_file() for name in (SHARDS_FILE, JOB_FILE, "train.bin"))


def open_shards(
    path: str | Path,
    t: int,
    *,
    packed: bool = False,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> ShardedCorpus:
    """Opens a folder of `prepare`, or one of nanoGPT's.

    Args:
        path: the folder.
        t: length of the windows.
        packed: see `ShardedCorpus`.
        tokenizer: what made the ids, where the folder does not say, as nanoGPT's do not. By default GPT-2's where the
            largest id is from 256 to 50256, else the ids stand for themselves.
        vocab_size: by default the tokenizer's.
        process_index, process_count: see `ShardedCorpus`.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: the folder is unfinished, of an unknown format, or cut off; ids are outside the vocabulary (looked
            for in folders below 2 GiB now, in all folders when they come up in a batch); a part is too short.
    """
    folder = Path(path)
    known: dict[str, float | None] = {}
    if (folder / SHARDS_FILE).is_file():
        if tokenizer is not None:
            raise ValueError(f"{folder} has a tokenizer of its own; give none")
        tokenizer = load_tokenizer(folder)
        parts, known, made_with = _open_prepared(folder)
        if tokenizer.vocab_size != made_with:
            raise ValueError(
                f"{folder / SHARDS_FILE} is of a vocabulary of {made_with}, the tokenizer beside it has "
                f"{tokenizer.vocab_size} ids"
            )
    elif (folder / JOB_FILE).is_file():
        raise ValueError(f"{folder} is unfinished; start the `flax-gpt data` command that writes it again")
    elif is_shards_folder(folder):
        parts = {
            split: _open_nanogpt(folder / name) for split, name in zip(SPLITS, ("train.bin", "val.bin"), strict=True)
        }
        if tokenizer is None:
            tokenizer = _guess_tokenizer(folder, parts, vocab_size)
    else:
        raise FileNotFoundError(f"no token shards in {folder}: neither {SHARDS_FILE} nor train.bin is there")
    vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
    if sum(shard.nbytes for part in parts.values() for shard in part.shards) <= CHECKED_AT_OPENING:
        for part in parts.values():
            part.check(vocab_size)
    return ShardedCorpus(
        parts["train"],
        parts["validation"],
        tokenizer,
        t,
        vocab_size,
        packed,
        **known,
        process_index=process_index,
        process_count=process_count,
    )


def _open_prepared(folder: Path) -> tuple[dict[str, TokenStream], dict[str, float | None], int]:
    """The parts, what is known of the validation part, and the size of the vocabulary."""
    file = folder / SHARDS_FILE
    try:
        entries = json.loads(file.read_text("utf-8"))
        version = entries["format"]
        if version != FORMAT:
            raise ValueError(f"its format is {version}, this version of flax_gpt reads format {FORMAT}")
        dtype: np.dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[entries["dtype"]]  # type: ignore[assignment]
        parts = {split: _open_part(folder, entries["splits"][split], dtype) for split in SPLITS}
        validation: list[dict[str, Any]] = entries["splits"]["validation"]
        tokens = max(1, sum(shard["tokens"] for shard in validation))
        known: dict[str, float | None] = {
            f"{unit}_per_token": sum(shard[unit] for shard in validation) / tokens for unit in ("characters", "bytes")
        }
        return parts, known, int(entries["vocab_size"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not what `flax-gpt data` writes: {type(error).__name__} {error}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _open_part(folder: Path, shards: list[dict[str, Any]], dtype: np.dtype) -> TokenStream:
    if not shards:
        raise ValueError("a part has no shards")
    files = tuple(folder / f"{shard['name']}.bin" for shard in shards)
    ids = [_map(file, dtype, shard["tokens"]) for file, shard in zip(files, shards, strict=True)]
    ends = [_map(folder / f"{shard['name']}.idx", np.dtype("<i8"), shard["documents"]) for shard in shards]
    return TokenStream(files, tuple(ids), tuple(ends))


def _open_nanogpt(file: Path) -> TokenStream:
    return TokenStream((file,), (_map(file, np.dtype("<u2")),), None)


def _map(file: Path, dtype: np.dtype, count: int | None = None) -> np.ndarray:
    """A file as an array that is read from disk as it is used; its size is checked."""
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    size = file.stat().st_size
    if count is not None and size != count * dtype.itemsize:
        raise ValueError(
            f"{file} has {size} bytes, {count * dtype.itemsize} are expected ({count} of {dtype.name}); "
            "it was cut off or changed"
        )
    if size % dtype.itemsize:
        raise ValueError(f"{file} has {size} bytes, which is no whole number of {dtype.name}; it was cut off")
    # A plain array over the map: slicing a np.memmap takes several times as long.
    return np.asarray(np.memmap(file, dtype, mode="r")) if size else np.empty(0, dtype)


def _guess_tokenizer(folder: Path, parts: dict[str, TokenStream], vocab_size: int | None) -> Tokenizer:
    largest = max(_largest(shard) for part in parts.values() for shard in part.shards)
    if not 256 <= largest < VOCAB_SIZE:
        return IdTokenizer(max(vocab_size or 0, largest + 1))
    try:
        return GPT2Tokenizer()
    except ValueError as error:
        raise ValueError(
            f"{folder} does not say what made its ids; up to {largest}, they are taken for GPT-2's, but: {error}; "
            "or give a tokenizer"
        ) from error


def _parts(shard: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    size = 1 << 24
    for first in range(0, len(shard), size):
        yield first, shard[first : first + size]


def _largest(shard: np.ndarray) -> int:
    return max((int(part.max()) for _, part in _parts(shard)), default=0)


def _outside(file: Path, place: int, found: int, vocab_size: int, largest: int | None = None) -> str:
    more = "" if largest is None else f" (the largest is {largest})"
    return f"{file} holds the id {found} at token {place}, outside the vocabulary of {vocab_size}{more}"


@functools.lru_cache(maxsize=8)
def _page(seed: int, epoch: int, page: int, windows: int, t: int, slack: int) -> tuple[int, ...]:
    """Where windows begin, in the order of an epoch: from the place `page * PAGE` of it on.

    The first window begins up to `slack` tokens from the start of the corpus. A page costs hardly more than one place
    of it, and the next batches want its other places.
    """
    offset = int(np.random.default_rng((seed, epoch, 0)).integers(slack + 1))
    turns = np.arange(page * PAGE, min((page + 1) * PAGE, windows))
    return tuple((offset + t * shuffled(turns, windows, round_keys(seed, epoch, 1))).tolist())
