"""Loss curves as a picture. Needs matplotlib (`pip install "flax_gpt[plots]"`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flax_gpt.training.loop import Line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def loss_figure(lines: Sequence[Line], title: str = "", optimum: float | None = None) -> Figure:
    """Training and validation loss against the step, with the best possible loss where it is known.

    Args:
        lines: metrics as `fit` reports them.
        title: what was trained.
        optimum: nats a token; drawn as a dashed line.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for name, label, style in (
        ("train_loss", "training", {"color": "tab:blue", "linewidth": 1.0, "alpha": 0.6}),
        ("val_loss", "validation", {"color": "tab:orange", "linewidth": 1.8, "marker": "o", "markersize": 3.5}),
    ):
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            label = f"{label} (last {points[-1][1]:.4f})"
            axes.plot(*zip(*points, strict=True), label=label, **style)  # type: ignore[arg-type]
    if optimum is not None:
        axes.axhline(optimum, color="black", linestyle="--", linewidth=1.0, label=f"best possible ({optimum:.4f})")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
