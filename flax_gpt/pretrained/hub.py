"""Where weights are: in a folder, or on Hugging Face's hub, from which they are fetched once."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

# All that is read of a model. Pickled weights are left where they are.
PATTERNS = [
    "config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
]
# The GPT-2s that the hub has under a name without an owner.
BARE_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")

_OWNER_AND_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(name: str) -> bool:
    """Whether a text may be a model's name on the hub: "gpt2" or one of its sizes, or "owner/name".

    A path into a folder that exists is not taken for one: what it names is missing there.
    """
    if name in BARE_NAMES:
        return True
    return bool(_OWNER_AND_NAME.fullmatch(name)) and not Path(name).parent.exists()


def resolve_folder(path_or_name: str | os.PathLike[str]) -> Path:
    """The folder of a run or of weights: the one of this path or, where there is none, the hub's model of this name.

    What was fetched once is in huggingface_hub's cache, where it is found without a network too.

    Raises:
        FileNotFoundError: there is no such folder, and it is no name on the hub, or huggingface_hub is not installed.
        OSError: the hub does not have it, or cannot be reached.
    """
    folder = Path(path_or_name).expanduser()
    if folder.is_dir():
        return folder
    name = Path(path_or_name).as_posix()
    if not is_hub_name(name) or folder.exists():
        raise FileNotFoundError(f"no such folder: {folder}")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise FileNotFoundError(
            f"no such folder: {folder}; to have {name} fetched from Hugging Face's hub: pip install 'flax_gpt[hf]'"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # whatever the network makes of it
        reason = str(error).strip().split("\n")[0]
        raise OSError(
            f"there is no folder {folder}, and {name} cannot be fetched from Hugging Face's hub "
            f"({type(error).__name__}: {reason})"
        ) from error
