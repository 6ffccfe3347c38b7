"""Folders of weights: config.json and model.safetensors, as Hugging Face's GPT-2 has them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params
from flax_gpt.pretrained.names import from_gpt2_names, to_gpt2_names

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


class TensorFile(Mapping[str, Any]):
    """The tensors of a safetensors file by name, each read when it is asked for.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a safetensors file, or is cut short.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {path}")
        try:
            self._file = safe_open(path, framework="numpy")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file, or not all of one: {error}") from error
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write_tensors(path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file, beside the path first and then in its place, so that it is whole or not there."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    save_file(dict(tensors), part, metadata=dict(metadata))
    os.replace(part, path)


def save_pretrained(path: str | Path, config: GPTConfig, params: Params) -> None:
    """Writes a folder that Hugging Face's `GPT2LMHeadModel.from_pretrained` opens, and `load_pretrained`.

    Args:
        path: of the folder; it is made where it does not exist.
        config, params: a GPT of the standard block (a post-LN one has the same parameters and is another function).
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in to_gpt2_names(config, params).items()}
    write_tensors(folder / WEIGHTS_FILE, tensors, {"format": "pt"})
    config.to_json(folder / CONFIG_FILE)


def load_pretrained(path: str | Path, dtype: Any = None) -> tuple[GPTConfig, Params]:
    """Reads a folder of GPT-2 weights, Hugging Face's or a finished run's.

    Args:
        path: a folder with config.json and model.safetensors.
        dtype: to convert the parameters to; None keeps the file's.

    Returns:
        The config, and the parameters as JAX arrays.

    Raises:
        FileNotFoundError: the folder or one of the two files is not there.
        ValueError: the config asks for what is not supported, or the weights do not fit it (all misfits are listed).
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    config = GPTConfig.from_json(folder / CONFIG_FILE)
    params = from_gpt2_names(config, TensorFile(folder / WEIGHTS_FILE))
    return config, jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
