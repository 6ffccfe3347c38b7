"""Pictures of what the interventions found. Needs matplotlib (`pip install "flax_gpt[plots]"`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW_CELLS = 160  # up to so many, a heat map has the numbers written into it


def sweep_plot(
    values: Any,
    title: str,
    *,
    over: Sequence[str] = ("layer", "head"),
    columns: Sequence[str] | None = None,
    unit: str = "metric",
    center: float | None = None,
) -> Figure:
    """A sweep as a heat map: layers upwards, heads or positions across.

    Args:
        values: [l, n].
        title: what was found.
        over: the names of the two axes.
        columns: labels of the second axis, such as the tokens of the row; their numbers by default.
        unit: what the values are.
        center: draw in two colours, for less and for more than this (0, or the value without any patch); in one where
            there is none.
    """
    grid = _matrix("values", values)
    rows, n = grid.shape
    figure = _figure(min(16.0, max(5.0, 2.2 + 0.55 * n)), min(12.0, max(3.2, 1.8 + 0.42 * rows)))
    axes = figure.subplots()
    if center is None:
        image = axes.imshow(grid, aspect="auto", origin="lower", cmap="viridis")
    else:
        reach = float(np.nanmax(np.abs(grid - center))) or 1.0
        image = axes.imshow(
            grid, aspect="auto", origin="lower", cmap="RdBu_r", vmin=center - reach, vmax=center + reach
        )
    figure.colorbar(image, ax=axes, label=unit)
    axes.set(title=title, xlabel=over[1], ylabel=over[0])
    _whole_numbers(axes.yaxis, rows)
    if columns is None:
        _whole_numbers(axes.xaxis, n)
    else:
        _labels(axes.xaxis, columns, n)
    if grid.size <= FEW_CELLS:
        _write_numbers(axes, image, grid)
    return figure


def attention_plot(pattern: Any, labels: Sequence[str], title: str = "", *, names: Sequence[str] = ()) -> Figure:
    """The attention patterns of some heads on one row: queries downwards, keys across, with the tokens as labels.

    Args:
        pattern: [h, t, s], such as `acts["pattern"][layer, row]`.
        labels: the t tokens as text.
        title: what is shown.
        names: of the heads; "head 0" and so on by default.
    """
    heads = np.asarray(pattern)
    if heads.ndim != 3 or heads.shape[1] != len(labels):
        raise ValueError(f"pattern must have shape [h, {len(labels)}, s], one query a label, got {heads.shape}")
    n, t, _ = heads.shape
    across = min(n, 4 if t <= 24 else 3)
    down = -(-n // across)
    size = min(6.0, max(2.6, 0.22 * t + 1.0))
    figure = _figure(across * size + 0.8, down * size + 0.4)
    panels = figure.subplots(down, across, squeeze=False)
    figure.suptitle(title, fontweight="bold")
    for index, axes in enumerate(panels.flat):
        if index >= n:
            axes.set_visible(False)
            continue
        image = axes.imshow(heads[index], cmap="Blues", vmin=0, vmax=1)
        axes.set_title(names[index] if names else f"head {index}", fontsize=10)
        _labels(axes.xaxis, labels, t)
        _labels(axes.yaxis, labels, t)
        if index % across == 0:
            axes.set_ylabel("query")
        if index + across >= n:
            axes.set_xlabel("key")
    figure.colorbar(image, ax=panels, label="attention", shrink=min(1.0, 3.0 / (down * size)))
    return figure


def lens_plot(logits: Any, labels: Sequence[str], decode: Callable[[int], str], title: str = "logit lens") -> Figure:
    """A logit lens as a table: what the model would say next after each layer, shaded by how sure it would be.

    Args:
        logits: [l + 1, t, v], one row of what `logit_lens` returns.
        labels: the t tokens as text.
        decode: an id to its text.
        title: what is shown.
    """
    scores = np.asarray(logits, np.float64)
    if scores.ndim != 3 or scores.shape[1] != len(labels):
        raise ValueError(f"logits must have shape [l + 1, {len(labels)}, v], got {scores.shape}")
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    sure = 1 / scores.sum(axis=-1)  # the largest is 1 before normalising
    best = scores.argmax(axis=-1)
    depth, t = best.shape
    figure = _figure(min(18.0, 1.8 + 0.85 * t), min(12.0, 1.6 + 0.36 * depth))
    axes = figure.subplots()
    image = axes.imshow(sure, aspect="auto", origin="lower", cmap="Greens", vmin=0, vmax=1)
    for row in range(depth):
        for column in range(t):
            color = "white" if sure[row, column] > 0.6 else "black"
            word = _visible(decode(int(best[row, column])))
            axes.text(column, row, word, ha="center", va="center", fontsize=8, color=color)
    _labels(axes.xaxis, labels, t, rotation=45)
    axes.set_yticks(range(depth), ["embeddings", *(f"layer {i}" for i in range(depth - 1))], fontsize=8)
    axes.set(title=title, xlabel="token read")
    figure.colorbar(image, ax=axes, label="probability of the likeliest next token")
    return figure


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "flax_gpt[plots]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def _matrix(name: str, values: Any) -> np.ndarray:
    grid = np.asarray(values, np.float64)
    if grid.ndim != 2:
        raise ValueError(f"{name} must have two axes to be drawn, got shape {grid.shape}; average or index the others")
    return grid


def _visible(text: str) -> str:
    """Text with its white space visible, and no markup to matplotlib."""
    return text.replace("\n", "↵").replace(" ", "·").replace("\t", "→").replace("$", r"\$")


def _labels(axis: Any, labels: Sequence[str], n: int, rotation: int = 90) -> None:
    if len(labels) != n:
        raise ValueError(f"{len(labels)} labels for {n} entries")
    turned = rotation if axis.axis_name == "x" and any(len(label) > 2 for label in labels) else 0
    axis.set_ticks(range(n), [_visible(label) for label in labels], fontsize=8 if n <= 40 else 6, rotation=turned)


def _whole_numbers(axis: Any, n: int) -> None:
    step = max(1, -(-n // 24))
    axis.set_ticks(range(0, n, step))


def _write_numbers(axes: Axes, image: Any, grid: np.ndarray) -> None:
    for (row, column), value in np.ndenumerate(grid):
        if not np.isfinite(value):
            continue
        red, green, blue, _ = image.cmap(image.norm(value))
        dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
        axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
