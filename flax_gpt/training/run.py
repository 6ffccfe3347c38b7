"""The folder that a training run leaves behind, and how to read it again.

    config.json                the model, as Hugging Face's GPT-2 has it
    model.safetensors          its parameters, once the run is finished; for GPT-2's tokenizer also what Hugging Face
                               reads of it: vocab.json, merges.txt, tokenizer_config.json, generation_config.json
    flax_gpt_tokenizer.json    what turns text into ids and back
    train.json                 every option as used, the versions, the command line
    metrics.jsonl              one object a line: step, seconds, and losses or rates (see `fit`)
    checkpoints/               of the last steps and of the best (see `flax_gpt.training.checkpoint`)
    samples.txt                what a model of text wrote at each evaluation
    loss.png                   the course of the run, where matplotlib is installed

Config and parameters of the standard block are written under GPT-2's published names, so that `load_pretrained` and
Hugging Face open them; those of another block under their paths in the parameter tree.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from flax_gpt.config import GPTConfig
from flax_gpt.data.bpe import PADDED_SIZES, GPT2Tokenizer
from flax_gpt.data.bpe_files import has_merges
from flax_gpt.data.tokenizer import FILE_NAME, Tokenizer, load_tokenizer
from flax_gpt.forward import Params, init_params
from flax_gpt.model import BLOCKS, Block, BlockType, block_name
from flax_gpt.pretrained.files import CONFIG_FILE, load_pretrained, save_pretrained
from flax_gpt.pretrained.hub import resolve_folder
from flax_gpt.pretrained.tensors import WEIGHTS_FILE, has_weights, open_tensors, write_tensors
from flax_gpt.training.checkpoint import FOLDER_NAME, Checkpoints, Which, has_checkpoints
from flax_gpt.training.metrics import METRICS_FILE

TRAIN_FILE, PLOT_FILE = "train.json", "loss.png"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        config, params, block: the model.
        tokenizer: of its text.
    """

    config: GPTConfig
    params: Params
    block: BlockType
    tokenizer: Tokenizer


def claim_folder(path: str | Path, options: dict[str, Any]) -> Path:
    """Makes a run folder, or takes an empty one, and writes train.json into it, which makes it this run's alone.

    Raises:
        FileExistsError: the folder holds a run, or a file stands in its place.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; give another --out")
    folder.mkdir(parents=True, exist_ok=True)
    versions = {name: importlib.metadata.version(name) for name in ("flax_gpt", "jax", "flax", "optax")}
    entries = {**options, "versions": {"python": platform.python_version(), **versions}, "command": sys.argv}
    try:
        if any((folder / name).exists() for name in (CONFIG_FILE, WEIGHTS_FILE, METRICS_FILE)):
            raise FileExistsError
        with (folder / TRAIN_FILE).open("x", encoding="utf-8") as file:
            file.write(json.dumps(entries, indent=2, default=str) + "\n")
    except FileExistsError:
        raise FileExistsError(f"{folder} already holds a run; give another --out, or move it away") from None
    return folder


def claim_free_folder(name: str, options: dict[str, Any]) -> Path:
    """`claim_folder` for runs/NAME, or the first free one of runs/NAME-2, runs/NAME-3 and so on."""
    number = 1
    while True:
        folder = Path("runs", name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            return claim_folder(folder, options)
        number += 1


def save_model(folder: str | Path, config: GPTConfig, params: Params, block: BlockType = Block) -> None:
    """Writes config.json and model.safetensors."""
    save_config(folder, config, block)
    save_weights(folder, config, params, block)


def save_config(folder: str | Path, config: GPTConfig, block: BlockType = Block) -> None:
    """Writes config.json."""
    path = Path(folder, CONFIG_FILE)
    if block is Block:
        config.to_json(path)
        return
    entries = {"model_type": "flax_gpt", "block": block_name(block), **dataclasses.asdict(config)}
    path.write_text(json.dumps(entries, indent=2) + "\n", "utf-8")


def save_weights(
    folder: str | Path,
    config: GPTConfig,
    params: Params,
    block: BlockType = Block,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes model.safetensors and, where the tokenizer is GPT-2's, what Hugging Face reads of it."""
    if block is Block:
        save_pretrained(folder, config, params, tokenizer if isinstance(tokenizer, GPT2Tokenizer) else None)
        return
    tensors = {name: np.asarray(leaf) for name, leaf in flatten_dict(params, sep=".").items()}
    write_tensors(Path(folder, WEIGHTS_FILE), tensors, {"format": "flax_gpt"})


def load_config(folder: str | Path, block: BlockType | None = None) -> tuple[GPTConfig, BlockType]:
    """Reads config.json.

    Args:
        folder: a run's, or one of GPT-2 weights.
        block: the module of one layer, where it is not one of `BLOCKS`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it asks for what is not supported, or for another block.
    """
    path = resolve_folder(folder) / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run and no weights: there is no {path}")
    entries = json.loads(path.read_text("utf-8"))
    if entries.get("model_type") != "flax_gpt":
        return GPTConfig.from_json(path), Block
    name = entries["block"]
    block = block or BLOCKS.get(name)
    if block is None or block_name(block) != name:
        raise ValueError(f"{folder} was trained with the block {name!r}; give it as `block`")
    return GPTConfig.from_dict({key: value for key, value in entries.items() if key != "model_type"}), block


def load_model(
    folder: str | Path, block: BlockType | None = None, checkpoint: Which | None = None, dtype: Any = None
) -> tuple[GPTConfig, Params, BlockType]:
    """Reads the model of a run, or GPT-2 weights.

    Args:
        folder: the run's, or one of weights, or a model's name on Hugging Face's hub.
        block: the module of one layer, where it is not one of `BLOCKS`.
        checkpoint: "latest", "best" or a step, to have its parameters; None is those the run ended with or, where it
            has not ended yet, those of the latest checkpoint.
        dtype: to convert the parameters to; None keeps what is stored.

    Raises:
        FileNotFoundError: the folder, the config, or the weights are not there.
        ValueError: the block is unknown or another one, or the parameters do not fit.
    """
    folder = resolve_folder(folder)
    config, block = load_config(folder, block)
    weights = folder / WEIGHTS_FILE
    if checkpoint is not None or not has_weights(folder):
        if not has_checkpoints(folder):
            missing = f"no checkpoint {checkpoint}" if checkpoint is not None else f"no {weights} and no checkpoint yet"
            raise FileNotFoundError(f"{folder} holds {missing}")
        like = jax.eval_shape(lambda: init_params(config, jax.random.key(0), block=block))
        with Checkpoints(Path(folder, FOLDER_NAME), read_only=True) as checkpoints:
            params = checkpoints.restore_params(like, "latest" if checkpoint is None else checkpoint)
        return config, jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params), block
    if block is Block:  # whose weights alone have GPT-2's names
        return *load_pretrained(folder, dtype), Block
    stored = open_tensors(weights)
    flat = {tuple(name.split(".")): jnp.asarray(np.array(tensor), dtype) for name, tensor in stored.items()}
    expected = flatten_dict(jax.eval_shape(lambda: init_params(config, jax.random.key(0), block=block)))
    shapes = {key: leaf.shape for key, leaf in flat.items()}
    if wrong := {key for key, leaf in expected.items() if shapes.get(key) != leaf.shape} | (flat.keys() - expected):
        raise ValueError(f"the weights in {folder} do not fit its config: {sorted('.'.join(key) for key in wrong)}")
    return config, unflatten_dict(flat), block


def parse_checkpoint(text: str | None) -> Which | None:
    """Reads the name of a checkpoint: "latest", "best" or a step.

    Raises:
        ValueError: it is none of these.
    """
    if text is None or text in ("latest", "best"):
        return text  # type: ignore[return-value]
    if not text.isdigit():
        raise ValueError(f"a checkpoint is latest, best, or the number of a step; got {text!r}")
    return int(text)


def load_run(folder: str | Path, block: BlockType | None = None, checkpoint: Which | None = None) -> Run:
    """Reads a run, or GPT-2 weights: see `load_model` and `find_tokenizer`, whose errors it raises."""
    folder = resolve_folder(folder)
    config, params, block = load_model(folder, block, checkpoint)
    return Run(config, params, block, find_tokenizer(folder, config))


def find_tokenizer(folder: str | Path, config: GPTConfig) -> Tokenizer:
    """The tokenizer of a folder.

    It is the run's own, else that of the files which Hugging Face and OpenAI have for GPT-2's, else, where the
    vocabulary is as large as GPT-2's, or is that one padded, the published one.

    Raises:
        FileNotFoundError: there is none.
        ValueError: its files contradict each other, or it has more ids than the model.
    """
    if Path(folder, FILE_NAME).is_file():
        return load_tokenizer(folder)
    if has_merges(folder):
        tokenizer = GPT2Tokenizer.of_file(folder)
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"the tokenizer in {folder} has {tokenizer.vocab_size} ids, the model only {config.vocab_size}"
            )
        return tokenizer
    reason = ""
    if config.vocab_size in PADDED_SIZES:
        try:
            return GPT2Tokenizer()
        except ValueError as error:
            reason = f" GPT-2's own would fit, but {error}."
    raise FileNotFoundError(
        f"{folder} holds a model and no tokenizer (neither {FILE_NAME} nor merges.txt), and without it no text can be "
        f"turned into ids; put the tokenizer's files into it.{reason}"
    )
