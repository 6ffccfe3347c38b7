"""Folders of weights as Hugging Face's GPT-2 has them: config.json, model.safetensors, the tokenizer's files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from flax_gpt.config import GPTConfig
from flax_gpt.data.bpe import GPT2Tokenizer
from flax_gpt.data.bpe_files import write_gpt2_files
from flax_gpt.forward import Params
from flax_gpt.pretrained.hub import resolve_folder
from flax_gpt.pretrained.names import (
    QKV_BIAS,
    Leaf,
    at_path,
    from_gpt2_names,
    published_leaves,
    put_path,
    to_gpt2_names,
)
from flax_gpt.pretrained.tensors import WEIGHTS_FILE, open_folder, write_tensors

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"


def save_pretrained(
    path: str | os.PathLike[str], config: GPTConfig, params: Params, tokenizer: GPT2Tokenizer | None = None
) -> None:
    """Writes a folder that Hugging Face's `GPT2LMHeadModel.from_pretrained` opens, and `load_pretrained`.

    Args:
        path: of the folder; it is made where it does not exist.
        config, params: a GPT of the standard block (a post-LN one has the same parameters and is another function).
        tokenizer: to write vocab.json, merges.txt and tokenizer_config.json of, which `AutoTokenizer` opens, and the id
            of its end of text into config.json and generation_config.json.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in to_gpt2_names(config, params).items()}
    write_tensors(folder / WEIGHTS_FILE, tensors, {"format": "pt"})
    # Where nothing is said, Hugging Face takes 50256 for the end of text, also of a vocabulary that has no such id.
    end = None if tokenizer is None else tokenizer.end_of_text
    ends = {"bos_token_id": end, "eos_token_id": end}
    _write_json(folder / CONFIG_FILE, {**config.to_dict(), "dtype": str(jnp.dtype(params["wte"].dtype)), **ends})
    if tokenizer is not None:
        _write_json(folder / GENERATION_FILE, {"_from_model_config": True, **ends})
        write_gpt2_files(folder, tokenizer.merges, config.n_positions)


def load_pretrained(path: str | os.PathLike[str], dtype: Any = None, sharding: Any = None) -> tuple[GPTConfig, Params]:
    """Reads GPT-2 weights: Hugging Face's, or a finished run's.

    The files are read tensor by tensor, straight into the stacked leaves of the parameters: on a CPU this takes the
    memory of the parameters and of one tensor more, on other devices that of one leaf.

    Args:
        path: a folder with config.json and model.safetensors, whole or in shards, or a model's name on Hugging Face's
            hub, such as "gpt2", see `resolve_folder`.
        dtype: to convert the parameters to; None keeps the file's.
        sharding: where the parameters go: a `jax.sharding.Sharding` for all of them, or a tree of such in the form of
            the parameters or of the upper part of it; None is JAX's default device.

    Returns:
        The config, and the parameters as JAX arrays.

    Raises:
        FileNotFoundError: the folder or one of the files is not there.
        OSError: the model cannot be fetched.
        ValueError: the config asks for what is not supported, or the weights do not fit it (all misfits are listed).
    """
    if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"JAX holds no {jnp.dtype(dtype)} unless jax_enable_x64 is set")
    folder = resolve_folder(path)
    config = GPTConfig.from_json(folder / CONFIG_FILE)
    tensors = open_folder(folder)
    where = _shardings(config, sharding)

    def place(leaf: Leaf, array: np.ndarray) -> jax.Array:
        to = at_path(where, leaf.path)
        if to is None:
            placed = jax.device_put(array)
        else:  # unlike `device_put` this is the same on many hosts, each of which takes its part
            placed = jax.make_array_from_callback(array.shape, to, lambda index: array[index])
        return jax.block_until_ready(placed)  # only then can the memory of `array` be had back

    return config, from_gpt2_names(config, tensors, dtype, place)


def _shardings(config: GPTConfig, sharding: Any) -> dict[str, Any]:
    """A sharding, or None, for each leaf."""
    tree: dict[str, Any] = {}
    for leaf in published_leaves(config):
        if config.qkv_bias or leaf.path != QKV_BIAS:
            put_path(tree, leaf.path, 0)
    if sharding is None:
        return jax.tree.map(lambda _: None, tree)
    return jax.tree.broadcast(sharding, tree, is_leaf=lambda node: node is None or isinstance(node, Sharding))


def _write_json(path: Path, entries: dict[str, Any]) -> None:
    path.write_text(json.dumps(entries, indent=2) + "\n", "utf-8")
