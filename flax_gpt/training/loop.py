"""The host's side of training: feeds the compiled step, reports, evaluates, stops when asked."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import jax
import numpy as np

from flax_gpt.config import GPTConfig
from flax_gpt.data.source import Source
from flax_gpt.forward import Params, init_params
from flax_gpt.model import Block, BlockType
from flax_gpt.training.config import TrainConfig
from flax_gpt.training.evaluate import evaluate
from flax_gpt.training.optimizer import learning_rate_schedule, make_optimizer
from flax_gpt.training.step import Metrics, TrainState, init_state, make_train_step

Line = dict[str, float | int]


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What a training run came to.

    Attributes:
        state: after the last update.
        metrics: the lines that were reported, in order (see `fit`).
        interrupted: whether SIGINT (Ctrl-C) ended the run before its last step.
    """

    state: TrainState
    metrics: list[Line]
    interrupted: bool

    @property
    def params(self) -> Params:
        """The trained parameters."""
        return self.state.params

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
    report: Callable[[Line], None] | None = None,
) -> FitResult:
    """Trains a model.

    A first Ctrl-C (in the main thread) ends the run after the step under way, with all that was reached in the result;
    a second one raises KeyboardInterrupt as ever.

    Args:
        config: the model; its dropout rates apply.
        train: how to train it.
        source: what on: a `Corpus`, a `Task`, or anything with their members.
        params: to start from; None draws them from the seed.
        block: the module of one layer.
        report: called with each line of metrics as it arises.

    Returns:
        The last state and the lines of metrics: dicts with `step` (updates done) and `seconds` (since the start), and
        either train_loss and grad_norm (means since the last such line), learning_rate and tokens_per_second, or
        val_loss and accuracy, which come at step 0, every `eval_every` steps and at the end.

    Raises:
        ValueError: the source does not fit the config: more ids than vocab_size, or longer than n_positions.
        FloatingPointError: the training loss is no longer finite; the message says since when.
    """
    check_source(config, source)
    params_key, dropout_key = jax.random.split(jax.random.key(train.seed))
    if params is None:
        params = init_params(config, params_key, block=block)
    optimizer, options = make_optimizer(train), {**train.forward_options, "block": block}
    # A copy: the step takes its argument's arrays for its own, and the caller's parameters are the caller's.
    state = init_state(jax.tree.map(lambda x: x.copy(), params), optimizer, dropout_key)
    step_function = make_train_step(config, optimizer, **options)
    schedule = learning_rate_schedule(train)

    lines: list[Line] = []
    start = time.perf_counter()

    def emit(step: int, **values: float) -> None:
        line = {"step": step, **values, "seconds": round(time.perf_counter() - start, 3)}
        lines.append(line)
        if report is not None:
            report(line)

    def emit_validation(step: int, state: TrainState, limit: int | None) -> None:
        batches = source.validation_batches(max(train.batch_size, 64), limit)
        result = evaluate(config, state.params, batches, **options)
        emit(step, val_loss=result["loss"], accuracy=result["accuracy"])

    def emit_training(step: int, pending: list[Metrics], seconds: float) -> None:
        values = [{name: float(value) for name, value in of_step.items()} for of_step in jax.device_get(pending)]
        for ago, of_step in enumerate(reversed(values)):
            if not math.isfinite(of_step["loss"]):
                raise FloatingPointError(
                    f"the training loss is {of_step['loss']} at step {step - ago}; "
                    f"try a learning rate below {train.lr}, or a longer warm-up than {train.warmup_steps} steps"
                )
        emit(
            step,
            train_loss=float(np.mean([of_step["loss"] for of_step in values])),
            grad_norm=float(np.mean([of_step["grad_norm"] for of_step in values])),
            learning_rate=float(schedule(step - 1)),
            tokens_per_second=len(values) * train.batch_size * source.t / seconds,
        )

    emit_validation(0, state, train.eval_batches)
    pending: list[Metrics] = []
    clock = time.perf_counter()
    step = 0
    with stop_on_interrupt() as stopped:
        while step < train.steps and not stopped.is_set():
            batch = source.training_batch(train.seed, step, train.batch_size)
            state, metrics = step_function(state, batch)
            step += 1
            # Fetched only now that the next step is on its way, so that the device never waits for the host.
            if len(pending) == train.log_every:
                jax.block_until_ready(pending)
                emit_training(step - 1, pending, time.perf_counter() - clock)
                pending, clock = [], time.perf_counter()
            pending.append(metrics)
            if step % train.eval_every == 0 and step < train.steps:
                jax.block_until_ready(state)
                evaluation = time.perf_counter()
                emit_validation(step, state, train.eval_batches)
                clock += time.perf_counter() - evaluation
        jax.block_until_ready(state)
        if pending:
            emit_training(step, pending, time.perf_counter() - clock)
    if not stopped.is_set():
        emit_validation(step, state, None)
    return FitResult(state, lines, interrupted=stopped.is_set())


def check_source(config: GPTConfig, source: Source) -> None:
    """Raises ValueError where a source's sequences do not fit a model."""
    if source.vocab_size > config.vocab_size:
        raise ValueError(f"the data has {source.vocab_size} different ids, more than vocab_size={config.vocab_size}")
    if source.t > config.n_positions:
        raise ValueError(f"the data's sequences have {source.t} tokens, more than n_positions={config.n_positions}")


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """An event that a first SIGINT sets, instead of raising KeyboardInterrupt amid an update; a second one raises.

    Outside the main thread, where no handler can be set, the event is never set.
    """
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
