"""Batches made, and brought to the device, while the step before is under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from flax_gpt.data.source import Batch, Source


def training_batches(
    source: Source, seed: int, batch_size: int, first: int, last: int, ahead: int = 2
) -> Generator[Batch, None, None]:
    """`source.training_batch(seed, step, batch_size)` for steps from `first` to `last` - 1, on the device.

    A thread of its own makes the next `ahead` of them meanwhile; an error there is raised at the step it belongs to.
    """

    def make(step: int) -> Batch:
        return jax.device_put(source.training_batch(seed, step, batch_size))

    pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
    try:
        waiting: deque[Future[Batch]] = deque()
        for step in range(first, last + ahead):
            if step < last:
                waiting.append(pool.submit(make, step))
            if step - first >= ahead:
                yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
