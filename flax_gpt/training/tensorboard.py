"""Metrics for TensorBoard. Needs tensorboardX (`pip install "flax_gpt[tensorboard]"`), which needs no TensorFlow."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from flax_gpt.training.metrics import Line


class TensorBoardWriter:
    """Writes the lines that `fit` reports: `with TensorBoardWriter(folder) as board: fit(..., report=board.report)`.

    Look at them with `tensorboard --logdir FOLDER`; each metric is a chart under its own name, and folders beside each
    other are runs to compare.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard needs tensorboardX: pip install 'flax_gpt[tensorboard]'") from error
        self._writer = SummaryWriter(str(folder))

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def report(self, line: Line) -> None:
        """Takes a line of metrics: each but step and seconds is a point of its chart."""
        for name, value in line.items():
            if name not in ("step", "seconds"):
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Writes what is still to be written. Lines are on the disk within two minutes otherwise."""
        self._writer.close()
