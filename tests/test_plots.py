"""How a run is shown: figures, the progress bar, TensorBoard, the measured peak."""

import builtins
import io
import json
import math
import struct
import time

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from flax_gpt import data
from flax_gpt.cli import main
from flax_gpt.training.curves import compare_figure, run_figure
from flax_gpt.training.metrics import read_metrics
from flax_gpt.training.peak import measure_peak_flops
from flax_gpt.training.progress import TrainingProgress, flops_text
from flax_gpt.training.tensorboard import TensorBoardWriter


def lines_of(steps=40, begin=5.0, end=1.0, seconds_per_step=0.1):
    """Lines as `fit` reports them: training every 2 steps, validation every 10."""
    lines = []
    for step in range(0, steps + 1, 2):
        loss, seconds = end + (begin - end) * math.exp(-step / 10), round(step * seconds_per_step, 3)
        if step % 10 == 0:
            lines.append({"step": step, "val_loss": loss + 0.1, "accuracy": 0.5, "seconds": seconds})
        if step:
            lines.append(
                {"step": step, "train_loss": loss, "grad_norm": 0.5, "learning_rate": 1e-3,
                 "tokens_per_second": 1000.0 + step, "seconds": seconds}
            )  # fmt: skip
    return lines


def curves(axes):
    """{label: [(x, y), ...]} of what is drawn."""
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name, lines=None, end="\n", **options):
        (tmp_path / name).mkdir()
        text = "\n".join(json.dumps(line) for line in (lines_of() if lines is None else lines))
        (tmp_path / name / "metrics.jsonl").write_text(text + end)
        (tmp_path / name / "train.json").write_text(json.dumps(options))
        return name

    return write


def test_a_run_has_four_panels_that_show_its_lines():
    figure = run_figure(lines_of(), title="runs/fox", optimum=0.9)
    loss, rate, norm, speed = figure.axes
    assert figure.get_suptitle() == "runs/fox"
    drawn = curves(loss)
    final = 1 + 4 * math.exp(-4)
    assert drawn[f"training (last {final:.4f})"][-1] == (40, pytest.approx(final))
    assert [x for x, _ in drawn[f"validation (last {final + 0.1:.4f})"]] == [0, 10, 20, 30, 40]
    assert "best possible (0.9000)" in drawn
    for axes, value in ((rate, 1e-3), (norm, 0.5), (speed, 1002.0)):
        assert axes.lines[0].get_data()[0].tolist() == list(range(2, 41, 2))
        assert axes.lines[0].get_data()[1][0] == value
    assert norm.get_yscale() == "log"
    assert speed.get_title(loc="left") == "tokens per second (median 1,021)"
    assert loss.get_ylim()[0] < 0.9
    figure.draw_without_rendering()


def test_a_spike_does_not_flatten_the_curve_and_what_is_not_finite_is_a_gap():
    lines = lines_of()
    spike, gap, still = (line for line in lines if line["step"] in (20, 22, 24) and "train_loss" in line)
    spike["train_loss"] = 1000.0
    gap.update(train_loss=math.nan, grad_norm=math.inf)
    still["grad_norm"] = 0.0  # has no place on a logarithmic axis
    of_run, compared = run_figure(lines), compare_figure({"a": lines, "b": lines_of()})
    for losses in (of_run.axes[0], compared.axes[2], compared.axes[3]):
        points = dict(zip(*losses.lines[0].get_data(), strict=True))
        assert 4 < losses.get_ylim()[1] < 6
        assert max(y for y in points.values() if y == y) == 1000.0
        assert sum(math.isnan(y) for y in points.values()) == 1
    norms = dict(zip(*of_run.axes[2].lines[0].get_data(), strict=True))
    assert [step for step, norm in norms.items() if math.isnan(norm)] == [22, 24]


@pytest.mark.parametrize("lines", [[], [{"step": 0, "val_loss": 2.0}], [{"step": 3, "train_loss": math.nan}]])
def test_whatever_lines_lack_is_left_out(lines):
    """Also where nothing is left: a run that has just begun, or one whose losses are all NaN."""
    figures = run_figure(lines), compare_figure({"a": lines, "b": lines})
    for figure in figures:
        figure.draw_without_rendering()
    texts = [[text.get_text() for text in axes.texts] for axes in figures[0].axes]
    assert texts[1:] == [["not recorded"]] * 3
    assert (texts[0] == []) == (len(lines) == 1 and "val_loss" in lines[0])


def test_runs_are_compared_by_step_and_by_time_under_their_names():
    runs = {"slow": lines_of(seconds_per_step=20.0), "fast": lines_of(steps=20, begin=4.0)}
    figure = compare_figure(runs)
    by_step, by_time, train_by_step, train_by_time = figure.axes
    (legend,) = figure.legends
    names = [f"{name} (best {lines[-2]['val_loss']:.4f})" for name, lines in runs.items()]
    assert [text.get_text() for text in legend.get_texts()] == names
    assert list(curves(by_step)) == list(curves(train_by_step)) == names
    slow, fast = by_time.lines
    np.testing.assert_allclose(slow.get_xdata(), np.arange(0, 41, 10) * 20 / 60)
    np.testing.assert_allclose(fast.get_xdata(), np.arange(0, 21, 10) * 0.1 / 60)
    assert (train_by_step.get_xlabel(), train_by_time.get_xlabel()) == ("step", "minutes")
    assert len({line.get_color().tobytes() for line in by_step.lines}) == 2


def test_many_runs_have_as_many_colours():
    figure = compare_figure({f"run {i}": lines_of(steps=4) for i in range(13)})
    assert len({line.get_color().tobytes() for line in figure.axes[0].lines}) == 13


def test_metrics_of_a_run_still_going_on_are_read_up_to_the_line_under_way(run):
    lines = lines_of()
    assert read_metrics(run("whole", lines)) == lines
    assert read_metrics(run("cut", lines, end='\n{"step": 42, "tra')) == lines
    (read,) = read_metrics(run("odd", [{"step": 1, "train_loss": None, "note": "x"}]))
    assert math.isnan(read.pop("train_loss"))
    assert read == {"step": 1}
    with pytest.raises(ValueError, match="broken/metrics.jsonl, line 2: Unterminated string"):
        read_metrics(run("broken", [lines[0]], end='\n{"step": 42, "tra\n{"step": 43}\n'))
    with pytest.raises(ValueError, match="line 1: not an object with a step"):
        read_metrics(run("other", [{"loss": 3}]))


def test_the_command_draws_one_run_or_compares_several(run, tmp_path, capsys, monkeypatch):
    drawn = []
    one, two = run("sorted", task="sort"), run("fox")
    for name, draw in (("run_figure", run_figure), ("compare_figure", compare_figure)):
        monkeypatch.setattr(
            f"flax_gpt.cli.plot.{name}", lambda *a, draw=draw, **k: drawn.append((a, k)) or draw(*a, **k)
        )
    assert main(["plot", one]) == 0
    assert capsys.readouterr().out == "sorted/plot.png\n"
    assert drawn[0][1] == {"title": "sorted", "optimum": data.Sort().optimum}
    assert (tmp_path / "sorted/plot.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", two, "--out", "fox.svg"]) == 0
    assert drawn[1][1] == {"title": "fox", "optimum": None}
    assert (tmp_path / "fox.svg").read_text().startswith("<?xml")
    assert main(["plot", one, two]) == 0
    assert list(drawn[2][0][0]) == ["sorted", "fox"]
    assert (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere", "nowhere is not the folder of a run: there is no nowhere/metrics.jsonl"),
        ("new", "new/metrics.jsonl has no line of metrics yet"),
        ("", "give the folder of a run"),
        ("fox --out fox.xyz", "xyz"),
    ],
)
def test_what_cannot_be_drawn_is_refused(run, arguments, message, capsys):
    run("new", [], end="")
    run("fox")
    assert main(["plot", *arguments.split()]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "plot"])
def test_help_explains_every_flag(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--" in capsys.readouterr().out


def without(monkeypatch, package):
    """Has imports of a package fail, as where it is not installed."""
    real = builtins.__import__

    def fake(name, *rest):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fake)


def test_an_extra_that_is_not_installed_is_named(run, monkeypatch, capsys):
    run("fox")
    without(monkeypatch, "matplotlib")
    assert main(["plot", "fox"]) == 1
    assert "drawing needs matplotlib: pip install 'flax_gpt[plots]'" in capsys.readouterr().err
    without(monkeypatch, "tensorboardX")
    with pytest.raises(ImportError, match="pip install 'flax_gpt\\[tensorboard\\]'"):
        TensorBoardWriter("board")


def read_events(folder):
    """The scalars of TensorBoard's files: records of a length and its checksum, the bytes and theirs."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    (path,) = folder.glob("events.out.tfevents.*")
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = event_pb2.Event.FromString(content[12 : 12 + length])
        found.extend((value.tag, event.step, value.simple_value) for value in event.summary.value)
        content = content[12 + length + 4 :]
    return found


def test_tensorboard_gets_every_metric_of_every_line(tmp_path):
    pytest.importorskip("tensorboardX")
    lines = lines_of(steps=10)
    with TensorBoardWriter(tmp_path / "board") as board:
        for line in lines:
            board.report(line)
    expected = [(n, line["step"], v) for line in lines for n, v in line.items() if n not in ("step", "seconds")]
    events = read_events(tmp_path / "board")
    assert [event[:2] for event in events] == [event[:2] for event in expected]
    np.testing.assert_allclose([event[2] for event in events], [event[2] for event in expected], rtol=1e-6)


@pytest.mark.parametrize(
    ("rate", "peak", "text"),
    [
        (1.234e12, None, "1.23 TFLOP/s"),
        (1.234e12, 2.742e12, "1.23 TFLOP/s (45% of peak)"),
        (98.7e9, 100e9, "98.7 GFLOP/s (99% of peak)"),
        (2.5e15, None, "2.5 PFLOP/s"),
        (3e5, None, "0.3 MFLOP/s"),
    ],
)
def test_rates_are_written_for_people(rate, peak, text):
    assert flops_text(rate, peak) == text


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_loss_rates_and_the_time_left(terminal):
    said = io.StringIO()
    console = Console(file=said, force_terminal=terminal, width=200, color_system=None)
    with TrainingProgress(40, console, peak_flops=1e9) as bar:
        for line in lines_of(steps=20):
            bar.report({**line, "flops_per_second": 25e7} if "train_loss" in line else line)
        bar._progress.refresh()
    shown = said.getvalue()
    if terminal:
        for text in ("step 20/40", "loss 1.5413", "val 1.6413", "1,020 tokens/s  250 MFLOP/s (25% of peak)", "left"):
            assert text in shown
    else:
        last = "step 20/40  train loss 1.6612  val loss 1.6413  2 s  1,018 tokens/s  250 MFLOP/s (25% of peak)"
        assert shown.splitlines()[2:] == [last]


def test_progress_does_not_need_the_new_metrics():
    said = io.StringIO()
    with TrainingProgress(40, Console(file=said, width=200)) as bar:
        for line in lines_of(steps=20):
            bar.report(line)
    assert "tokens/s" in said.getvalue()
    assert "FLOP/s" not in said.getvalue()


@pytest.mark.parametrize("dtype", [jnp.float32, "bfloat16"])
def test_the_peak_is_the_rate_of_a_product(dtype, monkeypatch):
    """Twice size^3 operations, in the best time: known where the clock is."""
    ticks = iter(np.cumsum([0.0, *[0.5, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5] * 3]).tolist())
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    assert measure_peak_flops(dtype, size=64, seconds=0.01) == 2 * 2 * 64**3 / 0.25
