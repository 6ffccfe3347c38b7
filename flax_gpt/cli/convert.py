"""`flax-gpt convert`: from a run, GPT-2 weights or nanoGPT's checkpoint to a folder that Hugging Face opens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from flax_gpt.accounting import count_params
from flax_gpt.cli.train import say
from flax_gpt.config import GPTConfig
from flax_gpt.data import GPT2Tokenizer, Tokenizer, save_tokenizer
from flax_gpt.forward import Params
from flax_gpt.model import Block, block_name
from flax_gpt.pretrained import resolve_folder, save_pretrained
from flax_gpt.pretrained.files import CONFIG_FILE
from flax_gpt.pretrained.nanogpt import FILE_NAME, load_nanogpt
from flax_gpt.training.run import find_tokenizer, load_model, parse_checkpoint


@dataclasses.dataclass(frozen=True)
class Args:
    """Writes a GPT as Hugging Face has GPT-2: config.json, model.safetensors, and GPT-2's tokenizer where it fits."""

    source: Annotated[str, tyro.conf.Positional]
    """The folder of a run, or of GPT-2 weights, a name on Hugging Face's hub, or nanoGPT's ckpt.pt or its folder."""
    out: Path
    """The folder to write, new or empty."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights; by default the source's."""
    checkpoint: str | None = None
    """Of a run: latest, best, or a step; by default what it ended with, or the latest of one that has not ended."""


def main(arguments: Sequence[str]) -> int:
    """Reads, writes, and says what was written."""
    args = tyro.cli(Args, args=list(arguments), prog="flax-gpt convert")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise FileExistsError(f"{args.out} is there and not an empty folder; give another --out")
    config, params, tokenizer, missing = read_source(args)
    gpt2 = tokenizer if isinstance(tokenizer, GPT2Tokenizer) else None
    save_pretrained(args.out, config, params, gpt2)
    if tokenizer is not None and gpt2 is None:
        save_tokenizer(args.out, tokenizer)
        missing = f"it has no {type(tokenizer).__name__}, which is kept for flax-gpt alone"
    say(f"{count_params(config):,} parameters in {params['wte'].dtype} -> {args.out}")
    if missing is not None:
        say(f"and no tokenizer for Hugging Face: {missing}")
    return 0


def read_source(args: Args) -> tuple[GPTConfig, Params, Tokenizer | None, str | None]:
    """The model and its tokenizer, or why there is none.

    Raises:
        FileNotFoundError, OSError, ValueError: as of `load_model` and `load_nanogpt`, or the model is not GPT-2's.
    """
    path = Path(args.source)
    if path.is_file() or ((path / FILE_NAME).is_file() and not (path / CONFIG_FILE).exists()):
        if args.checkpoint is not None:
            raise ValueError(f"--checkpoint is for runs, and {path} is none")
        config, params = load_nanogpt(path, args.dtype)
        folder = path if path.is_dir() else path.parent
    else:
        folder = resolve_folder(args.source)
        config, params, block = load_model(folder, checkpoint=parse_checkpoint(args.checkpoint), dtype=args.dtype)
        if block is not Block:
            raise ValueError(f"{args.source} has the block {block_name(block)!r}, which Hugging Face's GPT-2 has not")
    try:
        return config, params, find_tokenizer(folder, config), None
    except FileNotFoundError as error:
        return config, params, None, str(error)
