"""`flax-gpt train`: from a text or a toy task to a folder with a model, its metrics and its loss curve."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro

from flax_gpt import data
from flax_gpt.accounting import count_params
from flax_gpt.config import GPTConfig
from flax_gpt.generate import generate
from flax_gpt.model import BLOCKS, BlockType
from flax_gpt.training import run
from flax_gpt.training.config import TrainConfig
from flax_gpt.training.evaluate import exam_score
from flax_gpt.training.loop import FitResult, Line, check_source, fit
from flax_gpt.training.progress import TrainingProgress
from flax_gpt.training.recipes import RECIPES


@dataclasses.dataclass(frozen=True)
class Args:
    """Trains a GPT: on the built-in text (the source of Python's standard library), a text of yours, or a toy task.

    Options that are not given take the values shown, which belong to what is trained on.
    """

    task: Literal["sort", "induction", "recall", "addition", "markov"] | None = None
    """A toy task to train on instead of a text. With it (or --data), --help shows the values that belong to it."""
    data: Path | None = None
    """A UTF-8 text file, or a folder of them, to train on instead of the built-in text."""
    tokenizer: Literal["char", "byte"] = "char"
    """What a token of the text is."""
    out: Path | None = None
    """The folder to write to; by default runs/NAME, with a number where that is taken."""
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
    activation_function: Literal["gelu_new", "gelu", "relu", "linear"] = "gelu_new"
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
    lr: float = 1e-3
    """Learning rate at the end of the warm-up."""
    min_lr: float = 1e-4
    """Learning rate at the end of the run."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    beta1: float = 0.9
    """AdamW's decay rate of the gradient's mean."""
    beta2: float = 0.99
    """AdamW's decay rate of the gradient's square."""
    weight_decay: float = 0.1
    """AdamW's, on matrices alone."""
    clip_norm: float = 1.0
    """Scale larger gradients down to this norm."""
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

    def take(self, kind: type) -> dict[str, Any]:
        """The flags that are fields of a config class."""
        names = {field.name for field in dataclasses.fields(kind)}
        return {name: value for name, value in vars(self).items() if name in names}


def default_args(recipe_name: str) -> Args:
    """The values of a recipe: a task's, "text" or "python"."""
    recipe = RECIPES[recipe_name]
    task = recipe_name if recipe_name in data.TASKS else None
    length = {"n_positions": data.TASKS[task]().t} if task else {}
    return Args(task=task, **length, **recipe.model, **dataclasses.asdict(recipe.train))  # type: ignore[arg-type]


def parse(arguments: Sequence[str]) -> Args:
    """Reads the flags. What to train on is looked at first: it decides what the others are when they are not given."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--task", nargs="?")
    first.add_argument("--data", nargs="?")
    source, _ = first.parse_known_args(arguments)
    if source.task is not None and source.task not in data.TASKS:
        raise ValueError(f"unknown task {source.task!r}; the tasks are {', '.join(data.TASKS)}")
    defaults = default_args(source.task or ("text" if source.data else "python"))
    args = tyro.cli(Args, args=list(arguments), default=defaults, prog="flax-gpt train")
    if args.task and args.data:
        raise ValueError(f"give --task or --data, not both (got --task {args.task} and --data {args.data})")
    if args.dropout is not None:
        args = dataclasses.replace(args, embd_pdrop=args.dropout, attn_pdrop=args.dropout, resid_pdrop=args.dropout)
    return args


def main(arguments: Sequence[str]) -> int:
    """Trains, saves, and says what came out."""
    args = parse(arguments)
    # Built first: a wrong value should not wait for the data, nor a folder be made for it.
    train = TrainConfig(**args.take(TrainConfig))
    GPTConfig(vocab_size=1, **args.take(GPTConfig))
    source = make_source(args)
    config = GPTConfig(vocab_size=source.vocab_size, **args.take(GPTConfig))
    check_source(config, source)
    name = args.task or (args.data.resolve().stem if args.data else "python")
    options = json.loads(json.dumps(dataclasses.asdict(args), default=str))
    folder = run.claim_folder(args.out, options) if args.out else run.claim_free_folder(name, options)

    say(f"{name}: {describe(source)}")
    amount = f"{train.steps} steps of {train.batch_size} x {source.t} tokens"
    say(f"{count_params(config):,} parameters, {amount} -> {folder}")
    result = train_into(folder, config, train, source, args)
    run.save_model(folder, config, result.params, BLOCKS[args.block])
    if isinstance(source, data.Corpus):
        data.save_tokenizer(folder, source.tokenizer)
    else:
        data.save_tokenizer(folder, data.IdTokenizer(source.vocab_size))
    plot = draw_curve(folder, name, result.metrics, source.optimum)
    if result.interrupted:
        say(f"\ninterrupted after step {result.step} of {train.steps}; what was reached is in {folder}")
        return 130
    if isinstance(source, data.Corpus):
        report_text(config, result, source, train.seed, BLOCKS[args.block])
    else:
        report_task(config, result, source, BLOCKS[args.block])
    say(f"\nloss curve   {plot}\nparameters   {folder / run.WEIGHTS_FILE}\nmetrics      {folder / run.METRICS_FILE}")
    if isinstance(source, data.Corpus):
        say(f'write more   flax-gpt sample {folder} "a prompt"')
    return 0


def make_source(args: Args) -> data.Corpus | data.Task:
    """What the flags say to train on."""
    if args.task:
        return data.TASKS[args.task]()
    text = data.read_text(args.data) if args.data else data.stdlib_text()
    tokenizer = data.ByteTokenizer() if args.tokenizer == "byte" else data.CharTokenizer.of_text(text)
    return data.Corpus.of_text(text, tokenizer, args.n_positions)


def train_into(
    folder: Path, config: GPTConfig, train: TrainConfig, source: data.Corpus | data.Task, args: Args
) -> FitResult:
    """`fit`, with a progress bar and its metrics written to the folder as they arise."""
    with (
        (folder / run.METRICS_FILE).open("w", encoding="utf-8", buffering=1) as file,
        TrainingProgress(train.steps, quiet=args.quiet) as bar,
    ):

        def report(line: Line) -> None:
            file.write(json.dumps(line) + "\n")
            bar.report(line)

        return fit(config, train, source, block=BLOCKS[args.block], report=report)


def describe(source: data.Corpus | data.Task) -> str:
    """The data in a line."""
    if isinstance(source, data.Corpus):
        return (
            f"{len(source.train):,} tokens to train on, {len(source.validation):,} to validate with, "
            f"a vocabulary of {source.vocab_size}"
        )
    return f"{source}, best possible loss {source.optimum:.4f} nats per token"


def report_text(config: GPTConfig, result: FitResult, source: data.Corpus, seed: int, block: BlockType) -> None:
    """Prints the validation loss and a sample."""
    loss = result.metrics[-1]["val_loss"]
    bits = loss / math.log(2) / source.characters_per_token
    say(f"\nvalidation loss {loss:.4f} nats per token, {bits:.4f} bits per character")
    written = generate(
        config,
        result.params,
        [source.validation[:16]],
        300,
        temperature=0.8,
        key=jax.random.key(seed),
        sliding=True,
        block=block,
    )
    opening = source.tokenizer.decode(source.validation[:16])
    say(f"\nit writes, after {opening!r}:\n\n{opening}{source.tokenizer.decode(np.asarray(written.tokens[0]))}")


def report_task(config: GPTConfig, result: FitResult, task: data.Task, block: BlockType) -> None:
    """Prints the validation loss beside the best possible one, and how many questions are answered right."""
    line = result.metrics[-1]
    best = float(np.mean([task.best_loss(batch) for batch in task.validation_batches(64)]))
    say(
        f"\nvalidation loss {line['val_loss']:.4f} nats per token, the best possible on these sequences is {best:.4f}; "
        f"accuracy {line['accuracy']:.2%}"
    )
    if (exam := task.exam()) is not None:
        prompts, answers = exam
        right = exam_score(config, result.params, prompts, answers, block=block)
        say(f"{right} of {len(prompts)} questions answered exactly, by greedy generation")


def draw_curve(folder: Path, name: str, lines: list[Line], optimum: float | None) -> str:
    """Writes the loss curve; returns where it is, or what to install to have one."""
    try:
        from flax_gpt.training.curves import loss_figure

        figure = loss_figure(lines, title=name, optimum=optimum)
    except ImportError:
        return "none: pip install 'flax_gpt[plots]' to have it drawn"
    figure.savefig(folder / run.PLOT_FILE)
    return str(folder / run.PLOT_FILE)


def say(text: str) -> None:
    """Prints; a sample may hold characters that the terminal's encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), flush=True)
