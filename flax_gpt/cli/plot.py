"""`flax-gpt plot`: a run's metrics as a picture, or those of several runs beside each other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from flax_gpt import data
from flax_gpt.cli.train import say
from flax_gpt.training.curves import compare_figure, run_figure
from flax_gpt.training.metrics import read_metrics
from flax_gpt.training.run import TRAIN_FILE


@dataclasses.dataclass(frozen=True)
class Args:
    """Draws a run's losses, learning rate, gradient norm and throughput; of several runs, their losses together.

    The runs may still be going on.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    out: Path | None = None
    """The picture's file, of any kind that matplotlib writes; by default plot.png in the run's folder, or here."""


def main(arguments: Sequence[str]) -> int:
    """Reads the metrics, writes the picture."""
    args = tyro.cli(Args, args=list(arguments), prog="flax-gpt plot")
    if not args.runs:
        raise ValueError("give the folder of a run, or of several to compare")
    lines = {str(run): read_metrics(run) for run in args.runs}
    if len(lines) == 1:
        (run,) = {str(run): run for run in args.runs}.values()
        figure = run_figure(lines[str(run)], title=str(run), optimum=best_possible(run))
        out = args.out or run / "plot.png"
    else:
        figure = compare_figure(lines)
        out = args.out or Path("plot.png")
    figure.savefig(out)
    say(str(out))
    return 0


def best_possible(run: Path) -> float | None:
    """The best possible loss of the toy task that a run was trained on, in nats a token; None for a text."""
    try:
        options = json.loads((run / TRAIN_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    task = options.get("task") if isinstance(options, dict) else None
    return data.TASKS[task]().optimum if task in data.TASKS else None
