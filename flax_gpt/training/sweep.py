"""Many trainings in one compiled program: models that differ in seed, learning rate, weight decay or initial scale."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from flax_gpt.config import GPTConfig
from flax_gpt.data.prefetch import prefetch
from flax_gpt.data.source import Batch, Source
from flax_gpt.forward import Params
from flax_gpt.model import Block, BlockType
from flax_gpt.training.config import TrainConfig
from flax_gpt.training.loop import check_source, first_state
from flax_gpt.training.loss import next_token_loss
from flax_gpt.training.metrics import Line, means_of_steps
from flax_gpt.training.optimizer import learning_rate_schedule, make_optimizer
from flax_gpt.training.step import Metrics, TrainState, train_step

Layout = Literal["auto", "vmap", "map"]


@dataclasses.dataclass(frozen=True)
class SweepResult:
    """What a sweep of n trainings came to.

    Attributes:
        varied: the values that members differ in, by name, each of length n.
        members: the config and the training of each: `fit` with these gives the same.
        states: the last ones, every array with a leading axis n.
        metrics: the lines of each, as of `fit`.
    """

    varied: dict[str, list[float | int]]
    members: list[tuple[GPTConfig, TrainConfig]]
    states: TrainState
    metrics: list[list[Line]]

    def params(self, index: int) -> Params:
        """The trained parameters of one member: their moving average where one is kept."""
        return jax.tree.map(lambda x: x[index], self.states.trained)

    def names(self) -> list[str]:
        """A name for each member: what it differs in."""
        rows = zip(*self.varied.values(), strict=True)
        return [", ".join(f"{name}={value:g}" for name, value in zip(self.varied, row, strict=True)) for row in rows]

    def table(self) -> list[dict[str, float | int]]:
        """A row a member: what it differs in, its last and best validation loss, accuracy, skipped steps."""
        rows = []
        for index, lines in enumerate(self.metrics):
            validation = [line for line in lines if "val_loss" in line]
            skipped = max((line["skipped"] for line in lines if "skipped" in line), default=0)
            rows.append(
                {
                    **{name: values[index] for name, values in self.varied.items()},
                    "val_loss": validation[-1]["val_loss"],
                    "best_val_loss": min(line["val_loss"] for line in validation),
                    "accuracy": validation[-1]["accuracy"],
                    "skipped": skipped,
                }
            )
        return rows

    def write(self, folder: str | Path) -> None:
        """Writes the table to sweep.csv and, where matplotlib is installed, the curves to sweep.png."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        rows = self.table()
        with (folder / "sweep.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        with contextlib.suppress(ImportError):
            from flax_gpt.training.curves import compare_figure

            figure = compare_figure(dict(zip(self.names(), self.metrics, strict=True)))
            figure.savefig(folder / "sweep.png")


def fit_many(
    config: GPTConfig,
    train: TrainConfig,
    source: Source,
    *,
    seed: Sequence[int] | None = None,
    lr: Sequence[float] | None = None,
    min_lr: Sequence[float] | None = None,
    weight_decay: Sequence[float] | None = None,
    initializer_range: Sequence[float] | None = None,
    block: BlockType = Block,
    layout: Layout = "auto",
    report: Callable[[list[Line]], None] | None = None,
) -> SweepResult:
    """Trains n models at once, as one program that is compiled once; member i comes to what `fit` would bring it to.

    A member whose loss is no longer finite stays as it was, and the others go on.

    Args:
        config, train: what all have in common.
        source: what on; each member has the batches that belong to its seed.
        seed, lr, min_lr, weight_decay, initializer_range: n values of what members differ in, each list as long as the
            others.
        block: the module of one layer.
        layout: how a device works on its members: "vmap" on all at once, "map" on one after the other. "auto" is "map"
            on CPU, where a product of many small matrices is slower than the products one by one, and "vmap" elsewhere.
            Either way members are spread over as many of the devices as divide n; on a CPU,
            `jax.config.update("jax_num_cpu_devices", 2)` before anything else makes two, to use two cores well.
        report: called with the lines of all members, at each step that `fit` would report at.

    Raises:
        ValueError: nothing is varied, or lists differ in length; a member's values are not possible, or the source does
            not fit the config.
    """
    check_source(config, source)
    given = {"seed": seed, "lr": lr, "min_lr": min_lr, "weight_decay": weight_decay}
    varied = {name: list(values) for name, values in given.items() if values is not None}
    if initializer_range is not None:
        varied["initializer_range"] = list(initializer_range)
    lengths = {name: len(values) for name, values in varied.items()}
    if not lengths or len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"give lists of one length for what the members differ in; got lengths {lengths}")
    members = [
        _member(config, train, dict(zip(varied, row, strict=True))) for row in zip(*varied.values(), strict=True)
    ]
    sweep = _Sweep(members, source, block, layout, report)
    states = sweep.run()
    return SweepResult(varied, members, states, sweep.lines)


def _member(config: GPTConfig, train: TrainConfig, values: dict[str, Any]) -> tuple[GPTConfig, TrainConfig]:
    if "initializer_range" in values:
        config = dataclasses.replace(config, initializer_range=values.pop("initializer_range"))
    return config, dataclasses.replace(train, **values)


class _Sweep:
    """A sweep under way."""

    def __init__(
        self,
        members: list[tuple[GPTConfig, TrainConfig]],
        source: Source,
        block: BlockType,
        layout: Layout,
        report: Callable[[list[Line]], None] | None,
    ) -> None:
        self.members, self.source, self.block, self.report = members, source, block, report
        self.config, self.train = members[0]
        if layout not in ("auto", "vmap", "map"):
            raise ValueError(f"layout must be auto, vmap or map, got {layout!r}")
        self.one_by_one = layout == "map" or (layout == "auto" and jax.default_backend() == "cpu")
        n, devices = len(members), jax.local_devices()
        used = max(size for size in range(1, len(devices) + 1) if n % size == 0)
        self.mesh = Mesh(np.array(devices[:used]), ("n",), axis_types=(AxisType.Auto,))
        self.lines: list[list[Line]] = [[] for _ in members]
        self.begun = time.perf_counter()

    def run(self) -> TrainState:
        """Trains all members."""
        train, source = self.train, self.source
        rates = self.spread(
            {
                name: np.array([getattr(of_member, name) for _, of_member in self.members], np.float32)
                for name in ("lr", "min_lr", "weight_decay")
            }
        )
        states = self.spread(self.stack([first_state(*member, block=self.block) for member in self.members]))
        step_function = jax.jit(self.over_members(self.step), donate_argnums=0)
        evaluate = jax.jit(self.over_members(self.score, shared=1))

        def batches_of(step: int) -> Batch:
            rows = [source.training_batch(member.seed, step, train.batch_size) for _, member in self.members]
            return self.spread(self.stack(rows))

        def validate(step: int, limit: int | None) -> None:
            losses = hits = np.zeros(len(self.members))
            scored = 0.0
            for batch in source.validation_batches(max(train.batch_size, 64), limit):
                loss, accuracy, count = jax.device_get(evaluate(states.trained, batch))
                losses, hits, scored = losses + loss * count, hits + accuracy * count, scored + float(count[0])
            self.emit(
                step,
                [
                    {"val_loss": float(loss / scored), "accuracy": float(hit / scored)}
                    for loss, hit in zip(losses, hits, strict=True)
                ],
            )

        validate(0, train.eval_batches)
        pending: list[Metrics] = []
        step = 0
        with contextlib.closing(prefetch(batches_of, range(train.steps))) as batches:
            for batch in batches:
                states, metrics = step_function(states, batch, rates)
                step += 1
                pending.append(metrics)
                if len(pending) == train.log_every or step == train.steps:
                    self.emit_training(step, pending)
                    pending = []
                if step % train.eval_every == 0 and step < train.steps:
                    validate(step, train.eval_batches)
        validate(step, None)
        return states

    # The functions of one member

    def step(self, state: TrainState, batch: Batch, rates: dict[str, Float[Array, ""]]) -> tuple[TrainState, Metrics]:
        """One member's update, its learning rate and weight decay being arguments."""
        optimizer = make_optimizer(
            self.train, lr=rates["lr"], min_lr=rates["min_lr"], weight_decay=rates["weight_decay"]
        )
        return train_step(self.config, optimizer, state, batch, block=self.block, **self.train.step_options)

    def score(self, params: Params, batch: Batch) -> tuple[Array, Array, Array]:
        """One member's loss, accuracy and number of scored targets."""
        options = self.train.forward_options
        loss, metrics = next_token_loss(self.config, params, batch, block=self.block, **options)
        return loss, metrics["accuracy"], metrics["scored"]

    # Over all members

    def over_members(self, function: Callable[..., Any], shared: int = 0) -> Callable[..., Any]:
        """A function of one member as one of all, spread over the devices; its last `shared` arguments are common."""

        def on_a_device(*arguments: Any) -> Any:
            own, common = arguments[: len(arguments) - shared], arguments[len(arguments) - shared :]
            if self.one_by_one:
                return jax.lax.map(lambda own: function(*own, *common), own)
            return jax.vmap(lambda *own: function(*own, *common))(*own)

        def everywhere(*arguments: Any) -> Any:
            n = len(arguments)
            specs = tuple(PartitionSpec("n") if i < n - shared else PartitionSpec() for i in range(n))
            mapped = jax.shard_map(on_a_device, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec("n"))
            return mapped(*arguments)

        return everywhere

    def stack(self, trees: list[Any]) -> Any:
        """Trees of arrays as one, with a leading axis of members."""
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    def spread(self, tree: PyTree) -> Any:
        """Members on their devices."""
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec("n")))

    # What it reports

    def emit_training(self, step: int, pending: list[Metrics]) -> None:
        """Reports on the last steps."""
        values = jax.device_get(pending)
        lines = []
        for index, (_, train) in enumerate(self.members):
            of_steps = [{name: value[index].item() for name, value in of_step.items()} for of_step in values]
            skipped = int(of_steps[-1]["skipped"])
            rate = float(learning_rate_schedule(train)(step - 1 - skipped))
            lines.append({**means_of_steps(of_steps), "learning_rate": rate, "skipped": skipped})
        self.emit(step, lines)

    def emit(self, step: int, values: Sequence[Line]) -> None:
        """Reports a line of each member."""
        seconds = round(time.perf_counter() - self.begun, 3)
        lines = [{"step": step, **of_member, "seconds": seconds} for of_member in values]
        for own, line in zip(self.lines, lines, strict=True):
            own.append(line)
        if self.report is not None:
            self.report(lines)
