"""Grain, both ways: the windows of token shards for a pipeline of one's own, and a pipeline as a source of batches.

    rows = grain.MapDataset.source(ShardWindows(corpus.train, t=1024)).map(mine)
    checked = grain.MapDataset.source(ShardWindows(corpus.validation, t=1024))
    source = GrainSource(rows, checked, vocab_size=50257, t=1024)  # for `training.fit`

Needs `pip install 'flax_gpt[grain]'`, for the datasets. Shards alone are read many times faster by `ShardedCorpus`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Int

from flax_gpt.data.shards import TokenStream, own_rows
from flax_gpt.data.source import Batch

if TYPE_CHECKING:
    import grain

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ShardWindows:
    """A part of a corpus as windows side by side, for `grain.MapDataset.source`.

    Attributes:
        tokens: the part: a `ShardedCorpus`' train or validation.
        t: length of a window, which holds one token more: the last is only a target.
    """

    tokens: TokenStream
    t: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.t

    def __getitem__(self, index: int) -> dict[str, Int[np.ndarray, " _"]]:
        """{"ids": int32, t + 1 of them}, and "segment_ids" as long, where the documents' ends are known."""
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} windows, got index {index}")
        start, length = index * self.t, self.t + 1
        row = {"ids": self.tokens.read([start], length)[0]}
        if self.tokens.ends is not None:
            row["segment_ids"] = self.tokens.segments([start], length)[0]
        return row


@dataclasses.dataclass(frozen=True, eq=False)
class GrainSource:
    """Grain datasets of rows, as a source of batches.

    The batch of a step is looked up by its number in the shuffled and repeated dataset, so that nothing has to be kept
    to resume: there is no iterator. A row is a mapping with "ids", t + 1 of them, and, where documents are packed into
    rows, "segment_ids", as many; then a target of another document than its token is not scored.

    Attributes:
        train: rows to train on. They are shuffled here, anew in each epoch.
        validation: rows to validate with.
        vocab_size: ids are below it.
        t: length of the sequences.
        process_index, process_count: which rows of every batch are this process's own, as in `ShardedCorpus`.

    Raises:
        ValueError: a dataset is empty.
    """

    train: grain.MapDataset
    validation: grain.MapDataset
    vocab_size: int
    t: int
    process_index: int = 0
    process_count: int = 1
    optimum: ClassVar[None] = None

    def __post_init__(self) -> None:
        for name, rows in (("training", self.train), ("validation", self.validation)):
            if len(rows) == 0:
                raise ValueError(f"the {name} dataset has no rows")

    def training_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """The rows whose turn it is; a pure function of its arguments, if the dataset's own maps are."""
        if batch_size > len(self.train):
            raise ValueError(f"a dataset shorter than one batch: it has {len(self.train)} rows, a batch {batch_size}")
        endless = self.train.shuffle(seed=seed).repeat()
        mine = own_rows(batch_size, self.process_index, self.process_count)
        return self._batch([endless[step * batch_size + row] for row in mine])

    def validation_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """All rows in order, or `limit` batches of rows evenly spread; the last is filled up with unscored rows."""
        chosen: Sequence[int] = range(len(self.validation))
        if limit is not None and limit * batch_size < len(chosen):
            chosen = np.linspace(0, len(chosen) - 1, limit * batch_size).astype(np.int64).tolist()
        for first in range(0, len(chosen), batch_size):
            mine = [first + row for row in own_rows(batch_size, self.process_index, self.process_count)]
            batch = self._batch([self.validation[chosen[i] if i < len(chosen) else 0] for i in mine])
            batch.scored[np.array(mine) >= len(chosen)] = False
            yield batch

    def _batch(self, rows: Sequence[Row | None]) -> Batch:
        ids = self._stack(rows, "ids")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(f"a row holds ids from {ids.min()} to {ids.max()}, the vocabulary has {self.vocab_size}")
        if rows[0] is None or "segment_ids" not in rows[0]:
            return Batch(ids[:, :-1], ids[:, 1:], np.ones((len(ids), self.t), bool))
        segments = self._stack(rows, "segment_ids")
        return Batch(ids[:, :-1], ids[:, 1:], segments[:, 1:] == segments[:, :-1], segments[:, :-1])

    def _stack(self, rows: Sequence[Row | None], name: str) -> Int[np.ndarray, "b _"]:
        stacked = np.empty((len(rows), self.t + 1), np.int32)
        for place, row in zip(stacked, rows, strict=True):
            if row is None:
                raise ValueError("a row was filtered out, which leaves a hole in a batch; filter before making rows")
            if np.shape(row[name]) != place.shape:
                raise ValueError(f"a row's {name} must be {self.t + 1} integers, got shape {np.shape(row[name])}")
            place[:] = row[name]
        return stacked
