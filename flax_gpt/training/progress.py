"""A progress bar for `fit`: step, losses, tokens and operations a second, time left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flax_gpt.training.metrics import Line


class TrainingProgress:
    """Shows the lines that `fit` reports: `with TrainingProgress(steps) as bar: fit(..., report=bar.report)`.

    Where the output is not a terminal it prints a line at each evaluation instead; where `quiet`, nothing at all.

    Args:
        steps: at the end of the run.
        console: where to show them.
        quiet: show nothing.
        peak_flops: the machine's rate in floating-point operations a second, such as `measure_peak_flops` gives; the
            rate of lines with `flops_per_second` is then shown as a share of it, too.
    """

    def __init__(
        self, steps: int, console: Console | None = None, quiet: bool = False, peak_flops: float | None = None
    ) -> None:
        self._console = console or Console(quiet=quiet)
        self._peak_flops = peak_flops
        self._steps = steps
        self._train_loss: float | None = None
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            speed_estimate_period=600,  # evaluations and slow steps even out
        )
        self._bar = self._progress.add_task("compiling", total=steps)
        self._shown: dict[str, str] = {}

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def report(self, line: Line) -> None:
        """Takes a line of metrics."""
        if "train_loss" in line:
            self._train_loss = line["train_loss"]
            self._shown["loss"] = f"loss {line['train_loss']:.4f}"
            self._shown["rate"] = f"{line['tokens_per_second']:,.0f} tokens/s"
            if "flops_per_second" in line:
                self._shown["flops"] = flops_text(line["flops_per_second"], self._peak_flops)
        if "val_loss" in line:
            self._shown["val"] = f"val {line['val_loss']:.4f}"
            if self._progress.disable:
                train = "" if self._train_loss is None else f"train loss {self._train_loss:.4f}  "
                val = f"val loss {line['val_loss']:.4f}"
                rates = "".join(f"  {self._shown[name]}" for name in ("rate", "flops") if name in self._shown)
                self._console.print(f"step {line['step']}/{self._steps}  {train}{val}  {line['seconds']:.0f} s{rates}")
        self._progress.update(self._bar, completed=line["step"], description="  ".join(self._shown.values()))


def flops_text(flops_per_second: float, peak_flops: float | None = None) -> str:
    """A rate for people: "1.23 TFLOP/s (45% of peak)", the share where the peak is known."""
    size, prefix = next(
        ((size, prefix) for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if flops_per_second >= size),
        (1e6, "M"),
    )
    text = f"{flops_per_second / size:.3g} {prefix}FLOP/s"
    return text if peak_flops is None else f"{text} ({flops_per_second / peak_flops:.0%} of peak)"
