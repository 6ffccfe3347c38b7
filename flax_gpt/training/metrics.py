"""The metrics of a run: lines of JSON, appended as they arise, by one process at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

METRICS_FILE = "metrics.jsonl"

Line = dict[str, float | int]


class MetricsFile:
    """metrics.jsonl of a run, held open, and locked against other processes, until it is closed.

    Args:
        path: made, with its folder, where it does not exist.

    Raises:
        BlockingIOError: another process is writing it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+", encoding="utf-8")
        try:
            _lock(self._file)
        except OSError:
            self._file.close()
            raise BlockingIOError(f"another process is training into {self.path.parent}") from None

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def is_empty(self) -> bool:
        """Whether nothing has been written yet."""
        return self.path.stat().st_size == 0

    def rewind(self, n: int) -> list[Line]:
        """Forgets what comes after the first n lines, which are returned.

        Raises:
            ValueError: there are fewer; nothing is changed then.
        """
        self._file.seek(0)
        content = self._file.read()
        kept = content.splitlines(keepends=True)[:n]
        if len(kept) < n or not all(line.endswith("\n") for line in kept):
            raise ValueError(f"{self.path} has {len(kept)} lines, fewer than the {n} that the checkpoint counts on")
        lines = [json.loads(line) for line in kept]
        self._file.truncate(len("".join(kept).encode("utf-8")))
        return lines

    def write(self, line: Line) -> None:
        """Appends a line, at once."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Has the lines so far on disk, should the machine stop."""
        os.fsync(self._file.fileno())


def read_metrics(folder: str | Path) -> list[Line]:
    """The lines of metrics of a run, also of one still going on, whose last line may be half written.

    null is read as NaN, and what is no number is left out.

    Raises:
        FileNotFoundError: the folder has no metrics.
        ValueError: there is no line yet, or one other than the last is not a JSON object with a step.
    """
    path = Path(folder, METRICS_FILE)
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a run: there is no {path}")
    lines: list[Line] = []
    texts = path.read_text("utf-8", errors="replace").split("\n")
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or "step" not in line:
                raise ValueError("not an object with a step")
        except ValueError as error:
            if number == len(texts):  # what follows the last line break: nothing, or a line under way
                break
            raise ValueError(f"{path}, line {number}: {error}") from error
        values = {name: math.nan if value is None else value for name, value in line.items()}
        lines.append({name: value for name, value in values.items() if isinstance(value, (int, float))})
    if not lines:
        raise ValueError(f"{path} has no line of metrics yet")
    return lines


def is_sound(of_step: Mapping[str, float]) -> bool:
    """Whether a step, by its metrics, was not skipped."""
    return math.isfinite(of_step["loss"]) and math.isfinite(of_step["grad_norm"])


def means_of_steps(values: Sequence[Mapping[str, float]]) -> Line:
    """The means over several steps of loss (as train_loss) and norms, steps that were skipped left out."""
    sound = [of_step for of_step in values if is_sound(of_step)]
    if not sound:
        return {}
    norms = [name for name in sound[0] if "norm" in name]
    means = {name: float(np.mean([of_step[name] for of_step in sound])) for name in ("loss", *norms)}
    return {"train_loss": means.pop("loss"), **means}


def _lock(file: IO[str]) -> None:
    try:
        import fcntl
    except ImportError:  # Windows, where there is no such lock
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
