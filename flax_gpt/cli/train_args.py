"""The flags of `flax-gpt train`, and where their values come from when they are not given."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from flax_gpt import data
from flax_gpt.config import GPTConfig
from flax_gpt.pretrained import resolve_folder
from flax_gpt.training.recipes import RECIPES
from flax_gpt.training.run import TRAIN_FILE, load_config


@dataclasses.dataclass(frozen=True)
class Args:
    """Trains a GPT: on the built-in text (the source of Python's standard library), a text of yours, or a toy task.

    Options that are not given take the values shown, which belong to what is trained on.
    """

    task: Literal["sort", "induction", "recall", "addition", "markov"] | None = None
    """A toy task to train on instead of a text. With it (or --data), --help shows the values that belong to it."""
    data: Path | None = None
    """A UTF-8 text file, a folder of them, or one of token shards, to train on instead of the built-in text."""
    tokenizer: Literal["char", "byte", "gpt2"] = "char"
    """What a token of the text is; token shards have their own."""
    packed: bool = False
    """With token shards: documents in one window do not see each other."""
    out: Path | None = None
    """The folder to write to; by default runs/NAME, with a number where that is taken."""
    resume: Path | None = None
    """The folder of a run that was interrupted, to go on with, its options as they were."""
    init_from: Path | None = None
    """A run, a folder of GPT-2 weights or a name on Hugging Face's hub, to take parameters, sizes and tokenizer of."""
    sample_tokens: int = 200
    """Length of the text that is written to samples.txt at each evaluation and shown at the end; 0 writes none."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too."""
    quiet: bool = False
    """Show no progress."""

    n_layer: int = 4
    """Number of blocks."""
    n_head: int = 4
    """Attention heads in each; divides --n-embd."""
    n_embd: int = 128
    """Width of the model."""
    n_positions: int = 64
    """Length of the context."""
    n_inner: int | None = None
    """Width of the MLP's hidden layer; None is 4 times --n-embd."""
    block: Literal["pre_ln", "post_ln", "no_ln"] = "pre_ln"
    """Where the block has its LayerNorms."""
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "linear"] = "gelu_new"
    """The MLP's non-linearity."""
    dropout: float | None = None
    """Sets the three dropout rates below at once."""
    embd_pdrop: float = 0.0
    """Dropout rate of the embeddings."""
    attn_pdrop: float = 0.0
    """Dropout rate of the attention pattern."""
    resid_pdrop: float = 0.0
    """Dropout rate of what attention and MLP add to the stream."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance in LayerNorm."""
    initializer_range: float = 0.02
    """Standard deviation of fresh matrices."""
    tie_word_embeddings: bool = True
    """Read the logits off the token embedding."""
    qkv_bias: bool = True
    """Give queries, keys and values a bias."""

    seed: int = 1337
    """Of parameters, data order and dropout."""
    steps: int = 2000
    """Number of updates."""
    batch_size: int = 12
    """Sequences in each."""
    micro_batches: int = 1
    """Equal parts to compute a batch in, one after the other, to save memory."""
    optimizer: Literal["adamw", "lion", "muon"] = "adamw"
    """What turns gradients into updates."""
    schedule: Literal["cosine", "linear", "trapezoid", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    lr: float = 1e-3
    """Learning rate at the end of the warm-up."""
    min_lr: float = 1e-4
    """Learning rate at the end of the run."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    cooldown_steps: int | None = None
    """Steps of the trapezoid's fall; None is a fifth of --steps."""
    beta1: float = 0.9
    """AdamW's decay rate of the gradient's mean; Lion's first rate."""
    beta2: float = 0.99
    """AdamW's decay rate of the gradient's square; Lion's second rate."""
    momentum: float = 0.95
    """Muon's."""
    weight_decay: float = 0.1
    """On matrices alone."""
    clip_norm: float = 1.0
    """Scale larger gradients down to this norm."""
    ema_decay: float | None = None
    """Evaluate and keep a moving average of the parameters, with this decay rate."""
    max_skipped: int = 10
    """Stop when more than so many steps had to be skipped, their loss or gradient not being finite."""
    loss_chunk: int | None = None
    """Positions of each sequence whose logits are held at once; None chooses by size."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and matrix products."""
    layers: Literal["auto", "scan", "unroll"] = "auto"
    """How the layers are compiled."""
    remat: bool = False
    """Save memory by computing activations twice."""
    log_every: int = 10
    """Steps between lines of metrics."""
    eval_every: int = 250
    """Steps between evaluations."""
    eval_batches: int = 10
    """Batches in each."""
    checkpoint_every: int | None = 250
    """Steps between checkpoints; None keeps none."""
    keep_checkpoints: int = 2
    """How many of the latest to keep, beside the best."""

    def take(self, kind: type) -> dict[str, Any]:
        """The flags that are fields of a config class."""
        names = {field.name for field in dataclasses.fields(kind)}
        return {name: value for name, value in vars(self).items() if name in names}


def parse(arguments: Sequence[str]) -> Args:
    """Reads the flags. Those that decide what the others are when they are not given are looked at first.

    Raises:
        ValueError: the flags contradict each other.
        FileNotFoundError: there is no run to resume, or nothing to start from.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("task", "data", "resume", "init-from"):
        first.add_argument(f"--{name}", nargs="?")
    given, _ = first.parse_known_args(arguments)
    if given.task is not None and given.task not in data.TASKS:
        raise ValueError(f"unknown task {given.task!r}; the tasks are {', '.join(data.TASKS)}")
    if given.resume is not None:
        for flag in ("task", "data", "init_from"):
            if getattr(given, flag) is not None:
                raise ValueError(f"--resume goes on with a run as it was; leave out --{flag.replace('_', '-')}")
        return tyro.cli(Args, args=list(arguments), default=resumed_args(Path(given.resume)), prog="flax-gpt train")
    defaults = default_args(given.task or ("text" if given.data else "python"))
    start = None
    if given.init_from is not None:
        start = resolve_folder(given.init_from)
        defaults = dataclasses.replace(defaults, **_sizes(load_config(start)[0]))
    args = tyro.cli(Args, args=list(arguments), default=defaults, prog="flax-gpt train")
    args = dataclasses.replace(args, init_from=start)
    if args.task and args.data:
        raise ValueError(f"give --task or --data, not both (got --task {args.task} and --data {args.data})")
    if args.sample_tokens < 0:
        raise ValueError(f"--sample-tokens must not be negative, got {args.sample_tokens}")
    if args.dropout is not None:
        args = dataclasses.replace(args, embd_pdrop=args.dropout, attn_pdrop=args.dropout, resid_pdrop=args.dropout)
    return args


def default_args(recipe_name: str) -> Args:
    """The values of a recipe: a task's, "text" or "python"."""
    recipe = RECIPES[recipe_name]
    task = recipe_name if recipe_name in data.TASKS else None
    length = {"n_positions": data.TASKS[task]().t} if task else {}
    return Args(task=task, **length, **recipe.model, **dataclasses.asdict(recipe.train))  # type: ignore[arg-type]


def resumed_args(folder: Path) -> Args:
    """The flags that a run was started with.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: its train.json is not one.
    """
    path = folder / TRAIN_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run to go on with: there is no {path}")
    names = {field.name for field in dataclasses.fields(Args)}
    try:
        values = {name: value for name, value in json.loads(path.read_text("utf-8")).items() if name in names}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} does not hold the options of a run: {error}") from error
    for name in ("data", "out", "init_from"):
        if values.get(name) is not None:
            values[name] = Path(values[name])
    return Args(**{**values, "resume": folder, "quiet": False})


def _sizes(config: GPTConfig) -> dict[str, Any]:
    """A config's fields as flags, less those for which a new run has values of its own."""
    fields = dataclasses.asdict(config)
    return {name: value for name, value in fields.items() if not name.endswith("_pdrop") and name != "vocab_size"}
