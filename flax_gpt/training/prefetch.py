"""Batches made, and brought to the device, while the step before is under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

from flax_gpt.data.source import Batch


def prefetch(make: Callable[[int], Batch], first: int, last: int, ahead: int = 2) -> Generator[Batch, None, None]:
    """`make(step)` for steps from `first` to `last` - 1; a thread of its own makes the next `ahead` of them meanwhile.

    An error in it is raised at the step it belongs to. Close the generator to end the thread.
    """
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
