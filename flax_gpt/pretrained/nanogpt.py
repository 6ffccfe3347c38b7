"""nanoGPT's checkpoints: the ckpt.pt that its train.py writes."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params
from flax_gpt.pretrained.names import from_gpt2_names, published_leaves

FILE_NAME = "ckpt.pt"

_COMPILED = "_orig_mod."  # what torch.compile puts before the names
_SIZES = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions"}
_OTHERS = {"vocab_size", "bias", "dropout"}
_LINEAR = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def load_nanogpt(path: str | Path, dtype: Any = None) -> tuple[GPTConfig, Params]:
    """Reads a ckpt.pt; torch is needed for it, and unpickles no more than tensors and plain values.

    nanoGPT's GELU is the exact one and its LayerNorm's epsilon is 1e-5, whatever the checkpoint. A model without biases
    gets biases of zeros. A head that is not the token embedding, as some who changed nanoGPT have it, stays untied.

    Args:
        path: the file, or a folder with a ckpt.pt.
        dtype: of the parameters; None keeps the file's.

    Returns:
        The config, and the parameters as NumPy arrays.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: torch is not installed, the file is no such checkpoint or holds more than tensors, or its model is
            another than nanoGPT's; what differs is listed.
    """
    path = Path(path, FILE_NAME) if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    checkpoint = _read(path)
    config = _config(path, checkpoint["model_args"])
    # What is not contiguous is copied into the stack of its layers, so that transposing costs nothing.
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in checkpoint["model"].items():
        array = _as_numpy(tensor)
        tensors[name.removeprefix(_COMPILED)] = array.T if name.endswith(_LINEAR) else array
    head, wte = tensors.get("lm_head.weight"), tensors.get("transformer.wte.weight")
    if head is not None and wte is not None and not np.array_equal(head, wte):
        config = GPTConfig(**{**vars(config), "tie_word_embeddings": False})
    if not checkpoint["model_args"].get("bias", True):
        for leaf in published_leaves(config):
            for name in leaf.names:
                if name.endswith(".bias"):
                    tensors.setdefault(f"transformer.{name}", np.zeros(leaf.stored, np.float32))
    try:
        return config, from_gpt2_names(config, tensors, dtype)
    except ValueError as error:
        raise ValueError(f"{path} does not hold a model of nanoGPT's: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"to read {path} takes torch: pip install 'flax_gpt[hf]'")
    import torch

    try:
        # Mapped into memory, so that the optimizer's state, twice the size of the model, is not read.
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{path} is not a checkpoint of nanoGPT's, or holds more than tensors: {reason}") from error
    if not isinstance(checkpoint, dict) or not {"model", "model_args"} <= checkpoint.keys():
        raise ValueError(f"{path} is not a checkpoint of nanoGPT's, which has model and model_args")
    return checkpoint


def _config(path: Path, arguments: dict[str, Any]) -> GPTConfig:
    if unknown := sorted(arguments.keys() - _SIZES.keys() - _OTHERS):
        raise ValueError(f"{path} is not of nanoGPT's model: its model_args has {', '.join(unknown)}")
    if missing := sorted({*_SIZES, "vocab_size"} - arguments.keys()):
        raise ValueError(f"{path} is not a checkpoint of nanoGPT's: its model_args lacks {', '.join(missing)}")
    dropout = float(arguments.get("dropout", 0.0))
    return GPTConfig(
        vocab_size=arguments["vocab_size"],
        **{ours: arguments[theirs] for theirs, ours in _SIZES.items()},
        activation_function="gelu",
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
    )


def _as_numpy(tensor: Any) -> np.ndarray:
    import torch

    if tensor.dtype == torch.bfloat16:  # which NumPy does not know of
        return tensor.view(torch.uint16).numpy().view("bfloat16")
    return tensor.numpy()
