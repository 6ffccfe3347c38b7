"""Work done ahead of where it is asked for, by threads, in order and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetch(
    function: Callable[[Item], Result], items: Iterable[Item], *, ahead: int = 2, workers: int = 1
) -> Generator[Result, None, None]:
    """`function` of each item, in order; threads of its own work on the next `ahead` of them meanwhile.

    An error in one is raised where its result is due. Close the generator to end the threads.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="prefetch")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
