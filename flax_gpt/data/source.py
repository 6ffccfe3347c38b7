"""What a training run is fed with, and what it asks of whatever feeds it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Int


class Batch(NamedTuple):
    """Sequences and what should come after each of their tokens.

    Attributes:
        tokens: the input, ids.
        targets: targets[:, i] should follow tokens[:, : i + 1].
        scored: where the loss counts; the other targets do not matter.
        segment_ids: of documents packed into a row, where there are several: each sees itself alone.
    """

    tokens: Int[Array, "b t"] | Int[np.ndarray, "b t"]
    targets: Int[Array, "b t"] | Int[np.ndarray, "b t"]
    scored: Bool[Array, "b t"] | Bool[np.ndarray, "b t"]
    segment_ids: Int[Array, "b t"] | Int[np.ndarray, "b t"] | None = None


@runtime_checkable
class Source(Protocol):
    """Anything to train on: a `Corpus`, a `Task`, or an object of one's own with these members."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        ...

    @property
    def t(self) -> int:
        """Length of its sequences."""
        ...

    @property
    def optimum(self) -> float | None:
        """Expected loss of the best possible predictor, in nats a scored token, where it is known."""
        ...

    def training_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """The batch of a step: a pure function of its arguments, so that a run can be resumed or repeated."""
        ...

    def validation_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """The same batches at every call, unlike those to train on; `limit` at most."""
        ...
