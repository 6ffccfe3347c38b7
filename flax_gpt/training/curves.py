"""The metrics of runs as pictures. Needs matplotlib (`pip install "flax_gpt[plots]"`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flax_gpt.training.metrics import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAINING: dict[str, Any] = {"color": "tab:blue", "linewidth": 1.0, "alpha": 0.7}
VALIDATION: dict[str, Any] = {"color": "tab:orange", "linewidth": 1.8, "marker": "o", "markersize": 3.0}


def run_figure(lines: Sequence[Line], title: str = "", optimum: float | None = None) -> Figure:
    """A run at a glance: losses, learning rate, gradient norm and throughput against the step.

    Args:
        lines: metrics as `fit` reports them. What they lack is left out; what is not finite leaves a gap.
        title: what was trained.
        optimum: the best possible loss in nats a token, where it is known; drawn as a dashed line.
    """
    figure = _figure(11.0, 7.0)
    (loss, rate), (norm, speed) = figure.subplots(2, 2, sharex=True)
    figure.suptitle(title, fontweight="bold")
    _draw_losses(loss, lines, optimum)
    _style(loss, title="loss (nats per token)")

    _plot(rate, lines, "learning_rate", color="tab:green", linewidth=1.5)
    _style(rate, title="learning rate", from_zero=True)
    rate.yaxis.set_major_formatter("{x:.3g}")

    if _plot(norm, lines, "grad_norm", positive=True, **TRAINING):
        norm.set_yscale("log")
    _style(norm, title="gradient norm before clipping", xlabel="step")

    speeds = _plot(speed, lines, "tokens_per_second", color="tab:purple", linewidth=1.0)
    _style(speed, title=f"tokens per second{_median(speeds)}", xlabel="step", from_zero=True)
    speed.yaxis.set_major_formatter("{x:,.0f}")
    return figure


def compare_figure(runs: Mapping[str, Sequence[Line]], title: str = "") -> Figure:
    """Several runs beside each other: validation and training loss, against the step and against the time.

    Args:
        runs: the lines of metrics of each, by the name it has in the legend.
        title: what is compared.
    """
    seconds = max((line.get("seconds", 0) for lines in runs.values() for line in lines), default=0)
    unit, divide_by = "seconds", 1.0
    for longer, length in (("minutes", 60.0), ("hours", 3600.0)):
        if seconds >= 3 * length:
            unit, divide_by = longer, length
    losses = [
        (name, kind)
        for name, kind in (("val_loss", "validation"), ("train_loss", "training"))
        if any(name in line for lines in runs.values() for line in lines)
    ] or [("val_loss", "validation")]
    figure = _figure(11.0, 1.2 + 3.1 * len(losses))
    panels = figure.subplots(len(losses), 2, sharex="col", sharey="row", squeeze=False)
    figure.suptitle(title, fontweight="bold")
    from matplotlib import colormaps  # only now: `_figure` says what to do where there is no matplotlib

    indices = np.arange(len(runs))
    colors = colormaps["tab10"](indices) if len(runs) <= 10 else colormaps["turbo"](0.05 + 0.9 * indices / len(runs))
    for row, (name, kind) in enumerate(losses):
        style: dict[str, Any] = {"linewidth": 1.0}
        if name == "val_loss":
            style = {"linewidth": 1.6, "marker": "o", "markersize": 2.5}
        drawn = []
        for color, (run, lines) in zip(colors, runs.items(), strict=True):
            drawn.append(_plot(panels[row, 0], lines, name, label=_with_best(run, lines), color=color, **style))
            _plot(panels[row, 1], lines, name, x="seconds", divide_by=divide_by, color=color, **style)
        _limit(panels[row, 0], drawn)
        for column, x in enumerate(("step", unit)):
            _style(
                panels[row, column], title=f"{kind} loss (nats per token)", xlabel=x if row == len(losses) - 1 else ""
            )
    # Below the panels: within them there may be no place that no curve goes through. From both rows: a run may lack one
    # of the losses.
    entries: dict[str, Any] = {}
    for axes in panels[::-1, 0]:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    names = [name for name in (_with_best(run, lines) for run, lines in runs.items()) if name in entries]
    columns = 120 // (6 + max((len(name) for name in names), default=0))
    figure.legend([entries[name] for name in names], names, loc="outside lower center", ncols=max(1, columns))
    return figure


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'flax_gpt[plots]'") from error
    return Figure(figsize=(width, height), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))


def _draw_losses(axes: Axes, lines: Sequence[Line], optimum: float | None) -> None:
    drawn = []
    for name, label, style in (("train_loss", "training", TRAINING), ("val_loss", "validation", VALIDATION)):
        values = _plot(axes, lines, name, label=f"{label} (last {_last(lines, name):.4f})", **style)
        drawn.append(values)
    _limit(axes, drawn, optimum)
    if optimum is not None:
        axes.axhline(optimum, color="black", linestyle="--", linewidth=1.0, label=f"best possible ({optimum:.4f})")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper right")


def _plot(
    axes: Axes,
    lines: Sequence[Line],
    name: str,
    *,
    x: str = "step",
    divide_by: float = 1.0,
    positive: bool = False,
    **style: Any,
) -> list[float]:
    """Draws a metric where lines have it, and returns its finite values; draws nothing where there are none.

    Args:
        axes, lines, name: where, what.
        x: the metric on the other axis, and what it is divided by.
        positive: leave out what a logarithmic axis has no place for.
        style: keyword arguments of `Axes.plot`.
    """
    points = [(line[x] / divide_by, line[name]) for line in lines if name in line and x in line]
    points = [(at, math.nan if not math.isfinite(y) or (positive and y <= 0) else y) for at, y in points]
    values = [y for _, y in points if not math.isnan(y)]
    if values:
        if len(values) == 1:
            style = {"marker": "o", **style}  # a line of one point is not seen
        axes.plot(*zip(*points, strict=True), **style)
    return values


def _last(lines: Sequence[Line], name: str) -> float:
    return next((line[name] for line in reversed(lines) if name in line), math.nan)


def _limit(axes: Axes, drawn: Sequence[Sequence[float]], optimum: float | None = None) -> None:
    """Leaves a spike outside: shows losses up to where a curve began, and at least 19 of each 20 points."""
    curves = [values for values in drawn if values]
    if not curves:
        return
    low = min([*(min(values) for values in curves), *([] if optimum is None else [optimum])])
    high = max(max(values[0], float(np.quantile(values, 0.95, method="lower"))) for values in curves)
    margin = 0.04 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)


def _style(axes: Axes, *, title: str, xlabel: str = "", from_zero: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xlabel(xlabel)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if not axes.lines:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color="gray")
        axes.set_yticks([])
    elif from_zero:
        axes.set_ylim(bottom=0)


def _median(values: Sequence[float]) -> str:
    return f" (median {np.median(values):,.0f})" if values else ""


def _with_best(name: str, lines: Sequence[Line]) -> str:
    """The name of a run with its best validation loss."""
    losses = [line["val_loss"] for line in lines if "val_loss" in line]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return f"{name} (best {min(finite):.4f})" if finite else name
