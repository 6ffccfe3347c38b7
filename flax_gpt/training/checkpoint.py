"""Checkpoints of a training run: written in the background, whole or not there at all, checked when they are read.

A folder of Orbax checkpoints, one a step, each with its items: the parameters, their moving average where there is one,
the rest of the training state, and notes as JSON. The notes hold checksums of the arrays, made on the device before
they are written, so that a file that has changed since is noticed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from flax_gpt.forward import Params
from flax_gpt.training.step import TrainState

FOLDER_NAME = "checkpoints"
Which = int | Literal["latest", "best"]


class Checkpoints:
    """The checkpoints in a folder; use it in a `with`, which waits for the last one to be written.

    Args:
        folder: made where it does not exist.
        keep: how many of the latest to keep. The one with the lowest validation loss is kept besides.
        read_only: touch nothing, so that a run may be writing there at the same time.

    Raises:
        OSError: the folder cannot be made.
        ValueError: what a checkpoint says of its validation loss cannot be read.
    """

    def __init__(self, folder: str | Path, keep: int = 2, read_only: bool = False) -> None:
        # Imported late: it takes a second, and only those who write or read checkpoints need it.
        import orbax.checkpoint as ocp
        from orbax.checkpoint.checkpoint_managers import preservation_policy

        self._ocp = ocp
        self.folder = Path(folder).resolve()
        try:
            if not read_only:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"cannot write checkpoints to {self.folder}: {error.strerror}") from error
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(
                [
                    preservation_policy.LatestN(keep),
                    preservation_policy.BestN(
                        get_metric_fn=lambda metrics: metrics["val_loss"],
                        reverse=True,
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    ),
                ]
            ),
            best_fn=lambda metrics: metrics["val_loss"],
            best_mode="min",
            cleanup_tmp_directories=not read_only,  # what a killed process left half written
            read_only=read_only,
        )
        handlers = {
            **{name: ocp.StandardCheckpointHandler() for name in ("params", "average", "rest")},
            "notes": ocp.JsonCheckpointHandler(),
        }
        try:
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        except ValueError as error:  # Orbax reads every checkpoint's validation loss at once
            raise ValueError(
                f"a checkpoint in {self.folder} is damaged ({error}): {' and '.join(_without_loss(self.folder))}; "
                "move this folder away to go on from the others"
            ) from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Waits until all is written.

        Raises:
            OSError: the last checkpoint could not be written; those before it are as they were.
        """
        try:
            self._guard("write", self._manager.wait_until_finished)
        finally:
            self._manager.close()

    def steps(self) -> list[int]:
        """The steps of the checkpoints there are, in order."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, notes: Mapping[str, Any], val_loss: float | None = None) -> None:
        """Starts to write a checkpoint of a state, whose arrays may be donated as soon as this returns.

        Args:
            state: of a run; its step is the checkpoint's.
            notes: whatever JSON can hold.
            val_loss: of the parameters, where it was measured: by it the best checkpoint is known.

        Raises:
            OSError: this one, or the one before, could not be written.
            ValueError: there is one of this step or a later one.
        """
        step = int(state.step)
        if (latest := self._manager.latest_step()) is not None and step <= latest:
            raise ValueError(f"{self.folder} already holds a checkpoint of step {latest}, and got one of step {step}")
        items = _items(state)
        stored_notes = {**notes, "val_loss": val_loss, "checksums": _checksums(items)}
        args = self._ocp.args
        arrays = {name: args.StandardSave(item) for name, item in items.items()}
        composite = args.Composite(**arrays, notes=args.JsonSave(stored_notes))
        metrics = {"val_loss": math.inf if val_loss is None else val_loss}
        self._guard("write", lambda: self._manager.save(step, args=composite, metrics=metrics, force=True))

    def find(self, which: Which = "latest") -> int:
        """The step of the latest checkpoint, of the best, or the step itself.

        Raises:
            FileNotFoundError: there is none such; the message lists those there are.
        """
        steps = self.steps()
        if which == "latest":
            step = steps[-1] if steps else None
        elif which == "best":
            step = self._manager.best_step() if steps else None
            if step is not None and self.notes(step)["val_loss"] is None:  # none of them was evaluated
                step = None
        else:
            step = which if which in steps else None
        if step is None:
            raise FileNotFoundError(f"{self.folder} holds no checkpoint {which}; its steps are {steps}")
        return step

    def notes(self, which: Which = "latest") -> dict[str, Any]:
        """The notes of a checkpoint.

        Raises:
            FileNotFoundError, ValueError: there is no such checkpoint, or it is damaged.
        """
        step = self.find(which)
        restore = self._ocp.args.Composite(notes=self._ocp.args.JsonRestore())
        notes = self._guard("read", lambda: self._manager.restore(step, args=restore).notes, step)
        if not isinstance(notes, dict) or "checksums" not in notes:
            raise ValueError(f"the checkpoint {self.folder / str(step)} is damaged: its notes are incomplete")
        return notes

    def restore(self, like: TrainState, which: Which = "latest") -> TrainState:
        """Reads a state.

        Args:
            like: a state of the same form, of arrays or `jax.ShapeDtypeStruct`s; arrays come back on its devices.
            which: "latest", "best" or a step.

        Raises:
            FileNotFoundError, ValueError: there is no such checkpoint, or it is damaged or of another form.
        """
        step = self.find(which)
        items = self._restore(step, _items(like))
        return TrainState(params=items["params"], average=items.get("average"), **items["rest"])

    def restore_params(self, like: Params, which: Which = "latest") -> Params:
        """Reads the parameters alone: their moving average where the run keeps one.

        Args, Raises: as of `restore`.
        """
        step = self.find(which)
        name = "average" if "average" in self.notes(step)["checksums"] else "params"
        return self._restore(step, {name: like})[name]

    def _restore(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """Items by name, with the checksums that they were saved with."""
        args = self._ocp.args
        wanted = {name: args.StandardRestore(jax.tree.map(_abstract, item)) for name, item in like.items()}
        found = self._guard("read", lambda: self._manager.restore(step, args=args.Composite(**wanted)), step)
        items = {name: found[name] for name in like}
        expected = self.notes(step)["checksums"]
        if wrong := [name for name, value in _checksums(items).items() if expected.get(name) != value]:
            raise ValueError(
                f"the checkpoint {self.folder / str(step)} is damaged: its {' and '.join(wrong)} have changed since "
                "they were saved; move this folder away to go on from the checkpoint before it"
            )
        return items

    def _guard(self, what: Literal["read", "write"], action: Callable[[], Any], step: int | None = None) -> Any:
        """Runs an action of Orbax; its errors, of many kinds and at length, become one that says what and where."""
        try:
            return action()
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            if what == "write":
                raise OSError(f"cannot write a checkpoint to {self.folder}: {first}") from error
            raise ValueError(
                f"the checkpoint {self.folder / str(step)} is damaged, or of another model: {first}; move this folder "
                "away to go on from the checkpoint before it"
            ) from error


def _without_loss(folder: Path) -> list[str]:
    """The checkpoints whose validation loss cannot be read."""
    damaged = []
    for path in sorted(folder.glob("*/metrics/metrics")):
        try:
            json.loads(path.read_text("utf-8"))
        except ValueError:
            damaged.append(str(path.parent.parent))
    return damaged


def _items(state: TrainState) -> dict[str, Any]:
    """A state as it is stored: the parameters, their average where there is one, a dict of the rest."""
    rest = state._asdict()
    params, average = rest.pop("params"), rest.pop("average")
    return {"params": params, **({} if average is None else {"average": average}), "rest": rest}


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _checksums(items: dict[str, Any]) -> dict[str, int]:
    return {name: int(checksum(item)) for name, item in items.items()}


@jax.jit
def checksum(tree: PyTree[Array]) -> UInt32[Array, ""]:
    """A 32-bit number that any change of one element, and nearly any other change, of a tree's arrays changes.

    The sum, modulo 2^32, of each element's bits times an odd number that depends on its place.
    """
    total = jnp.zeros((), jnp.uint32)
    for index, leaf in enumerate(jax.tree.leaves(tree)):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if leaf.dtype == bool:
            leaf = leaf.astype(jnp.uint8)
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32).reshape(-1)
        places = jax.lax.iota(jnp.uint32, bits.size) * 2 + np.uint32(2 * index + 1)
        total = total + jnp.sum(bits * places, dtype=jnp.uint32)
    return total


def has_checkpoints(folder: str | Path) -> bool:
    """Whether a run's folder holds any."""
    path = Path(folder, FOLDER_NAME)
    return path.is_dir() and any(name.isdigit() for name in os.listdir(path))
