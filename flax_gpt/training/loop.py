"""The host's side of training: feeds the compiled step, reports, evaluates, keeps checkpoints, stops when asked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_gpt.accounting import count_flops
from flax_gpt.config import GPTConfig
from flax_gpt.data.prefetch import prefetch
from flax_gpt.data.source import Source
from flax_gpt.forward import Params, init_params
from flax_gpt.model import Block, BlockType, block_name
from flax_gpt.training.checkpoint import FOLDER_NAME, Checkpoints, has_checkpoints
from flax_gpt.training.config import TrainConfig
from flax_gpt.training.evaluate import evaluate
from flax_gpt.training.metrics import METRICS_FILE, Line, MetricsFile, is_sound, means_of_steps
from flax_gpt.training.optimizer import learning_rate_schedule, make_optimizer
from flax_gpt.training.step import TrainState, init_state, make_train_step

# What may differ between a checkpoint and the run that goes on from it: the course of training does not depend on it.
_FREE_TO_CHANGE = ("checkpoint_every", "keep_checkpoints", "max_skipped")


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What a training run came to.

    Attributes:
        state: after the last update.
        metrics: the lines that were reported, in order (see `fit`), those before a resumption included.
        interrupted: the signal, SIGINT (Ctrl-C) or SIGTERM, that ended the run before its last step; None: none did.
    """

    state: TrainState
    metrics: list[Line]
    interrupted: signal.Signals | None

    @property
    def params(self) -> Params:
        """The trained parameters: their moving average where the run keeps one."""
        return self.state.trained

    @property
    def step(self) -> int:
        """Updates done."""
        return int(self.state.step)


def fit(
    config: GPTConfig,
    train: TrainConfig,
    source: Source,
    *,
    params: Params | None = None,
    block: BlockType = Block,
    folder: str | Path | None = None,
    report: Callable[[Line], None] | None = None,
    inspect: Callable[[int, Params], None] | None = None,
) -> FitResult:
    """Trains a model.

    With a folder, the lines of metrics are also written to `metrics.jsonl` in it, and every `train.checkpoint_every`
    steps, at the end and when it is interrupted the run leaves a checkpoint in `checkpoints`. Where there are any, it
    goes on from the latest, to the very bits that it would have come to without the interruption.

    A first Ctrl-C or SIGTERM (in the main thread) ends the run after the step under way, with all that was reached in
    the result and the folder; a second one raises KeyboardInterrupt.

    Args:
        config: the model; its dropout rates apply.
        train: how to train it.
        source: what on: a `Corpus`, a `Task`, or anything with their members.
        params: to start from; None draws them from the seed.
        block: the module of one layer.
        folder: where to keep metrics and checkpoints.
        report: called with each line of metrics as it arises.
        inspect: called with the step and the parameters at each evaluation.

    Returns:
        The last state and the lines of metrics: dicts with `step` (updates done) and `seconds` (spent so far), and
        either the means since the last such line of train_loss, grad_norm, update_norm and param_norm (see
        `train_step`), with learning_rate, skipped (steps so far), tokens_per_second and flops_per_second; or val_loss
        and accuracy, which come at step 0, every `eval_every` steps and at the end.

    Raises:
        ValueError: the source does not fit the config: more ids than vocab_size, or longer than n_positions; or the
            checkpoint is damaged, or is of another model, training or data; the message lists the differences.
        FloatingPointError: more than `max_skipped` steps had a loss or gradient that was not finite.
        BlockingIOError: another process is training into the folder.
        FileExistsError: the folder holds a run that kept no checkpoints, and this one is to keep none either.
        OSError: the folder cannot be written to.
    """
    check_source(config, source)
    with contextlib.ExitStack() as stack:
        file = checkpoints = None
        if folder is not None:
            file = stack.enter_context(MetricsFile(Path(folder, METRICS_FILE)))
            if train.checkpoint_every is not None or has_checkpoints(folder):
                checkpoints = stack.enter_context(Checkpoints(Path(folder, FOLDER_NAME), train.keep_checkpoints))
        stopped = stack.enter_context(stop_on_signal())
        run = _Run(config, train, source, block, file, checkpoints, report, inspect)
        begun_before = checkpoints is not None and checkpoints.steps()
        if file is not None and not begun_before and train.checkpoint_every is None and not file.is_empty():
            raise FileExistsError(
                f"{folder} already holds the metrics of a run, and no checkpoint to go on from; give another folder"
            )
        state = run.resume() if begun_before else run.start(params)
        state = run.go_on(state, stopped)
    return FitResult(state, run.lines, None if run.finished else stopped.signal)


class _Run:
    """A run under way: what `fit` was given, and what it keeps from one step to the next beside the state."""

    def __init__(
        self,
        config: GPTConfig,
        train: TrainConfig,
        source: Source,
        block: BlockType,
        file: MetricsFile | None,
        checkpoints: Checkpoints | None,
        report: Callable[[Line], None] | None,
        inspect: Callable[[int, Params], None] | None,
    ) -> None:
        self.config, self.train, self.source, self.block = config, train, source, block
        self.file, self.checkpoints, self.report, self.inspect = file, checkpoints, report, inspect
        self.optimizer, self.schedule = make_optimizer(train), learning_rate_schedule(train)
        self.flops_per_token = 3 * count_flops(config, source.t) / source.t
        self.lines: list[Line] = []
        self.pending: list[dict[str, Any]] = []  # metrics of the steps that no line tells of yet
        self.fetched = 0  # how many of them are on the host
        self.finished = False
        self.val_loss: float | None = None  # at the present step
        self.begun = self.clock = time.perf_counter()

    # Before the first step

    def start(self, params: Params | None) -> TrainState:
        """The state before the first update."""
        if self.file is not None:
            self.file.rewind(0)
        state = first_state(self.config, self.train, params, self.block)
        self.emit_validation(0, state, self.train.eval_batches)
        return state

    def resume(self) -> TrainState:
        """The state of the latest checkpoint, and with it all that the run had in hand."""
        assert self.checkpoints is not None
        notes = self.checkpoints.notes()
        differences = [
            f"{name}: {notes['description'].get(name)!r} in the checkpoint, {value!r} now"
            for name, value in self.description.items()
            if notes["description"].get(name) != value and name not in _FREE_TO_CHANGE
        ]
        if differences:
            raise ValueError(
                f"the checkpoint in {self.checkpoints.folder} is of another run: {'; '.join(differences)}. Give the "
                "same settings, another folder, or start anew from its parameters"
            )
        form = jax.eval_shape(lambda: first_state(self.config, self.train, block=self.block))
        state = self.checkpoints.restore(form)
        if self.file is not None:
            self.lines = self.file.rewind(notes["lines"])
        self.pending = notes["pending"]
        self.fetched = len(self.pending)
        self.finished = notes["finished"]
        self.begun -= notes["seconds"]
        return state

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """What a run must have in common with the checkpoint that it goes on from."""
        first = self.source.training_batch(self.train.seed, 0, self.train.batch_size)
        return {
            **dataclasses.asdict(self.config),
            **dataclasses.asdict(self.train),
            "block": block_name(self.block),
            "first batch (checksum)": zlib.crc32(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(first))),
        }

    # The steps

    def go_on(self, state: TrainState, stopped: StopSignal) -> TrainState:
        """Trains from a state to the last step, or until it is asked to stop."""
        train = self.train
        step = int(state.step)
        if self.finished:
            return state
        step_function = make_train_step(self.config, self.optimizer, block=self.block, **train.step_options)
        batches = prefetch(
            lambda step: jax.device_put(self.source.training_batch(train.seed, step, train.batch_size)),
            range(step, train.steps),
        )
        self.clock = time.perf_counter()
        with contextlib.closing(batches):
            for batch in batches:
                if stopped.is_set():
                    break
                state, metrics = step_function(state, batch)
                # Looked at only now that the next step is on its way, so that the device never waits for the host.
                if len(self.pending) == train.log_every:
                    self.emit_training(step)
                step += 1
                self.pending.append(metrics)
                self.val_loss = None
                if step < train.steps and step % train.eval_every == 0:
                    self.settle(step, state)
                    with self.off_the_clock():
                        self.emit_validation(step, state, train.eval_batches)
                if step < train.steps and train.checkpoint_every is not None and step % train.checkpoint_every == 0:
                    self.settle(step, state)
                    with self.off_the_clock():
                        self.save(state)
        self.settle(step, state)
        if step == train.steps:
            if self.pending:
                self.emit_training(step)
            self.emit_validation(step, state, None)
            self.finished = True
        self.save(state)
        if self.pending:
            self.emit_training(step)
        return state

    def settle(self, step: int, state: TrainState) -> None:
        """Waits for the device, and emits the line that is due."""
        jax.block_until_ready(state)
        if len(self.pending) == self.train.log_every:
            self.emit_training(step)

    @contextlib.contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """For what the rate of training does not count."""
        start = time.perf_counter()
        yield
        self.clock += time.perf_counter() - start

    def save(self, state: TrainState) -> None:
        """Starts to write a checkpoint, unless there is one of this step."""
        if self.checkpoints is None or int(state.step) in self.checkpoints.steps():
            return
        self.fetch()
        if self.file is not None:
            self.file.sync()
        notes = {
            "description": self.description,
            "lines": len(self.lines),
            "pending": list(self.pending),  # written in the background, while this list grows
            "finished": self.finished,
            "seconds": time.perf_counter() - self.begun,
        }
        self.checkpoints.save(state, notes, self.val_loss)

    # What it reports

    def fetch(self) -> None:
        """Brings the metrics of the last steps to the host."""
        values = jax.device_get(self.pending[self.fetched :])
        self.pending[self.fetched :] = [{name: value.item() for name, value in of_step.items()} for of_step in values]
        self.fetched = len(self.pending)

    def emit(self, step: int, values: dict[str, Any]) -> None:
        """Reports a line."""
        line = {"step": step, **values, "seconds": round(time.perf_counter() - self.begun, 3)}
        self.lines.append(line)
        if self.file is not None:
            self.file.write(line)
        if self.report is not None:
            self.report(line)

    def emit_training(self, step: int) -> None:
        """Reports on the pending steps, the last of which made the number of updates `step`."""
        self.fetch()
        seconds = time.perf_counter() - self.clock
        values, train = self.pending, self.train
        skipped = int(values[-1]["skipped"])
        rate = len(values) * train.batch_size * self.source.t / seconds
        self.pending, self.fetched, self.clock = [], 0, time.perf_counter()
        self.emit(
            step,
            {
                **means_of_steps(values),
                "learning_rate": float(self.schedule(step - 1 - skipped)),
                "skipped": skipped,
                "tokens_per_second": rate,
                "flops_per_second": rate * self.flops_per_token,
            },
        )
        if skipped > train.max_skipped:
            bad = next(index for index, of_step in enumerate(values) if not is_sound(of_step))
            at = step - len(values) + 1 + bad
            raise FloatingPointError(
                f"{skipped} steps were skipped because their loss or gradient was not finite, more than "
                f"max_skipped={train.max_skipped}; the loss is {values[bad]['loss']} and the gradient's norm "
                f"{values[bad]['grad_norm']} at step {at}; try a learning rate below {train.lr}, or a longer warm-up "
                f"than {train.warmup_steps} steps"
            )

    def emit_validation(self, step: int, state: TrainState, limit: int | None) -> None:
        """Evaluates and reports."""
        batches = self.source.validation_batches(max(self.train.batch_size, 64), limit)
        result = evaluate(self.config, state.trained, batches, block=self.block, **self.train.forward_options)
        self.val_loss = result["loss"]
        self.emit(step, {"val_loss": result["loss"], "accuracy": result["accuracy"]})
        if self.inspect is not None:
            self.inspect(step, state.trained)


def first_state(
    config: GPTConfig, train: TrainConfig, params: Params | None = None, block: BlockType = Block
) -> TrainState:
    """The state that a run begins with: everything in it follows from the seed, but for parameters that are given."""
    params_key, dropout_key = jax.random.split(jax.random.key(train.seed))
    # Given ones are copied: the step takes its argument's arrays for its own, and the caller's are the caller's.
    own = init_params(config, params_key, block=block) if params is None else jax.tree.map(jnp.array, params)
    return init_state(own, make_optimizer(train), dropout_key, average=train.ema_decay is not None)


def check_source(config: GPTConfig, source: Source) -> None:
    """Raises ValueError where a source's sequences do not fit a model."""
    if source.vocab_size > config.vocab_size:
        raise ValueError(f"the data has {source.vocab_size} different ids, more than vocab_size={config.vocab_size}")
    if source.t > config.n_positions:
        raise ValueError(f"the data's sequences have {source.t} tokens, more than n_positions={config.n_positions}")


class StopSignal:
    """Which signal asked to stop, once one did."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def is_set(self) -> bool:
        """Whether one did."""
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopSignal]:
    """Takes note of a first SIGINT or SIGTERM instead of dying amid an update; a second one raises KeyboardInterrupt.

    Outside the main thread, where no handler can be set, nothing is noted.
    """
    stopped = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.signal = signal.Signals(signum)

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
