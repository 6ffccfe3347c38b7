"""Tensors in safetensors files: what is there is known at once, and each is read when it is asked for."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


# Of parameters. What else a file may hold, masks say, is not read.
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file; `numpy.asarray` maps it into memory, until the array is dropped.

    The file is mapped for each tensor anew: a mapping that is kept counts every page that was read through it as this
    process's memory.

    Attributes:
        path: of the file.
        name: in the file.
        shape, dtype: as the file says.
        offset: of its first byte in the file.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The tensor, read-only where it is not a copy; raises ValueError where it is not of floating point."""
        if self.dtype not in _DTYPES:
            raise ValueError(f"{self.name} is stored as {self.dtype}, not as one of {', '.join(_DTYPES)}")
        tensor = np.memmap(self.path, _DTYPES[self.dtype], "r", self.offset, self.shape)
        return np.array(tensor, dtype) if copy or dtype is not None else tensor


def open_tensors(path: str | Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a safetensors file, or is cut short.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        safe_open(path, framework="numpy")  # which checks the file's header and length
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or not all of one: {error}") from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(path, name, tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def open_folder(folder: str | Path) -> dict[str, StoredTensor]:
    """The tensors of a folder's model.safetensors, or of the shards that its model.safetensors.index.json lists.

    Raises:
        FileNotFoundError: neither is there, or shards are not.
        ValueError: a file is not what its name says, or a shard lacks tensors that the index has in it; all are named.
    """
    folder = Path(folder)
    whole, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if whole.is_file() or not index.is_file():
        return open_tensors(whole)
    try:
        places = dict(json.loads(index.read_text("utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not an index of shards, a JSON object with a weight_map: {error}") from error
    names = sorted(set(map(str, places.values())))
    if odd := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{index} must name files beside it, got {', '.join(odd)}")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{index} lists shards that are not there: {', '.join(missing)}")
    shards = {name: open_tensors(folder / name) for name in names}
    if lost := [f"{name} is not in {shard}" for name, shard in places.items() if name not in shards[shard]]:
        raise ValueError(f"shards lack tensors that {index} lists:\n  " + "\n  ".join(lost))
    return {name: shards[shard][name] for name, shard in places.items()}


def has_weights(folder: str | Path) -> bool:
    """Whether a folder holds weights that `open_folder` reads."""
    return any(Path(folder, name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE))


def write_tensors(path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file, beside the path first and then in its place, so that it is whole or not there."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    save_file(dict(tensors), part, metadata=dict(metadata))
    os.replace(part, path)
