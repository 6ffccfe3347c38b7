"""`flax-gpt train`: from a text or a toy task to a folder with a model, its metrics and its loss curve."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from flax_gpt import data
from flax_gpt.accounting import count_params
from flax_gpt.cli.train_args import Args, parse
from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params
from flax_gpt.generation import generate
from flax_gpt.model import BLOCKS, BlockType, block_name
from flax_gpt.training import run
from flax_gpt.training.checkpoint import has_checkpoints
from flax_gpt.training.config import TrainConfig
from flax_gpt.training.evaluate import exam_score
from flax_gpt.training.loop import FitResult, check_source, fit
from flax_gpt.training.metrics import METRICS_FILE, Line
from flax_gpt.training.peak import measure_peak_flops
from flax_gpt.training.progress import TrainingProgress

SAMPLES_FILE = "samples.txt"

Text = data.Corpus | data.ShardedCorpus


def main(arguments: Sequence[str]) -> int:
    """Trains, saves, and says what came out."""
    args = parse(arguments)
    # Built first: a wrong value should not wait for the data, nor a folder be made for it.
    train = TrainConfig(**args.take(TrainConfig))
    GPTConfig(vocab_size=1, **args.take(GPTConfig))
    if args.resume and (args.resume / run.WEIGHTS_FILE).exists():
        say(f"{args.resume} holds a finished run; there is nothing left to do")
        return 0
    block = BLOCKS[args.block]
    start = run.load_run(args.init_from) if args.init_from else None
    source = make_source(args, start)
    vocab_size = start.config.vocab_size if start else source.vocab_size
    config = GPTConfig(vocab_size=vocab_size, **args.take(GPTConfig))
    check_source(config, source)
    params = starting_params(start, config, block) if start else None
    name = args.task or (args.data.resolve().stem if args.data else "python")

    if args.resume:
        folder = args.resume
        if not has_checkpoints(folder):
            say(f"{folder} has no checkpoint yet; the run begins anew")
    else:
        options = json.loads(json.dumps(_with_absolute_paths(args), default=str))
        folder = run.claim_folder(args.out, options) if args.out else run.claim_free_folder(name, options)
    run.save_config(folder, config, block)
    data.save_tokenizer(folder, tokenizer_of(source))

    say(f"{name}: {describe(source)}")
    amount = f"{train.steps} steps of {train.batch_size} x {source.t} tokens"
    say(f"{count_params(config, block):,} parameters, {amount} -> {folder}")
    result = train_into(folder, config, train, source, params, args)
    plot = draw_curve(folder, name, result.metrics, source.optimum)
    if result.interrupted is not None:
        kept = f"go on with  flax-gpt train --resume {folder}"
        if not has_checkpoints(folder):
            run.save_weights(folder, config, result.params, block, tokenizer_of(source))
            kept = f"what was reached is in {folder}"
        say(f"\ninterrupted after step {result.step} of {train.steps}; {kept}")
        return 128 + result.interrupted
    run.save_weights(folder, config, result.params, block, tokenizer_of(source))
    if isinstance(source, Text):
        report_text(config, result, source, args)
    else:
        report_task(config, result, source, block)
    say(f"\nthe run      {plot}\nparameters   {folder / run.WEIGHTS_FILE}\nmetrics      {folder / METRICS_FILE}")
    if isinstance(source, Text):
        say(f'write more   flax-gpt sample {folder} "a prompt"')
    return 0


def _with_absolute_paths(args: Args) -> dict[str, object]:
    """The flags as a dict; a run may be resumed from another folder."""
    return {
        name: value.resolve() if isinstance(value, Path) else value for name, value in dataclasses.asdict(args).items()
    }


def make_source(args: Args, start: run.Run | None = None) -> Text | data.Task:
    """What the flags say to train on, in the tokens of the run to start from where there is one.

    Raises:
        ValueError: the data's tokens are others; packed=True goes with token shards alone.
    """
    if args.data and data.is_shards_folder(args.data):
        shards = data.open_shards(args.data, args.n_positions, packed=args.packed)
        if start is not None and start.tokenizer != shards.tokenizer:
            raise ValueError(
                f"{args.data} was made with {shards.tokenizer}, the model to start from has {start.tokenizer}"
            )
        return shards
    if args.packed:
        raise ValueError("--packed goes with --data and a folder of token shards, which knows where documents end")
    if args.task:
        return data.TASKS[args.task]()
    text = data.read_text(args.data) if args.data else data.stdlib_text()
    if start is not None:
        tokenizer: data.Tokenizer = start.tokenizer
    elif args.tokenizer == "gpt2":
        tokenizer = data.GPT2Tokenizer()
    else:
        tokenizer = data.ByteTokenizer() if args.tokenizer == "byte" else data.CharTokenizer.of_text(text)
    return data.Corpus.of_text(text, tokenizer, args.n_positions)


def tokenizer_of(source: Text | data.Task) -> data.Tokenizer:
    """A corpus's own, or plain numbers."""
    return source.tokenizer if isinstance(source, Text) else data.IdTokenizer(source.vocab_size)


def starting_params(start: run.Run, config: GPTConfig, block: BlockType) -> Params:
    """The parameters of the run to start from, for a config that may differ in dropout, and in a shorter context.

    Raises:
        ValueError: it differs in more; the message lists what.
    """
    old, new = dataclasses.asdict(start.config), dataclasses.asdict(config)
    old["block"], new["block"] = block_name(start.block), block_name(block)
    free = {"embd_pdrop", "attn_pdrop", "resid_pdrop", "n_positions", "initializer_range"}
    differences = [f"{name} is {old[name]!r}, not {new[name]!r}" for name in old if old[name] != new[name]]
    if wrong := [text for text in differences if text.split()[0] not in free]:
        raise ValueError(f"of the model to start from, {'; '.join(wrong)}; leave these flags out")
    if config.n_positions > start.config.n_positions:
        raise ValueError(
            f"the model to start from has n_positions={start.config.n_positions}, fewer than {config.n_positions}"
        )
    return {**start.params, "wpe": jnp.asarray(start.params["wpe"])[: config.n_positions]}


def train_into(
    folder: Path,
    config: GPTConfig,
    train: TrainConfig,
    source: Text | data.Task,
    params: Params | None,
    args: Args,
) -> FitResult:
    """`fit`, with a progress bar, and samples of what a model of text writes."""
    reports: list[Callable[[Line], None]] = []
    with contextlib.ExitStack() as stack:
        if args.tensorboard:
            # Imported only now: most have no use for it.
            from flax_gpt.training.tensorboard import TensorBoardWriter

            reports.append(stack.enter_context(TensorBoardWriter(folder / "tensorboard")).report)
        peak = None if args.quiet else measure_peak_flops(train.compute_dtype)
        bar = stack.enter_context(TrainingProgress(train.steps, quiet=args.quiet, peak_flops=peak))
        reports.append(bar.report)

        def report(line: Line) -> None:
            for each in reports:
                each(line)

        def inspect(step: int, params: Params) -> None:
            if isinstance(source, Text) and args.sample_tokens and step < train.steps:
                with (folder / SAMPLES_FILE).open("a", encoding="utf-8") as file:
                    file.write(f"--- step {step}\n{write_sample(config, params, source, args)}\n\n")

        block = BLOCKS[args.block]
        return fit(config, train, source, params=params, block=block, folder=folder, report=report, inspect=inspect)


def describe(source: Text | data.Task) -> str:
    """The data in a line."""
    if isinstance(source, Text):
        return (
            f"{len(source.train):,} tokens to train on, {len(source.validation):,} to validate with, "
            f"a vocabulary of {source.vocab_size}"
        )
    return f"{source}, best possible loss {source.optimum:.4f} nats per token"


def opening_of(source: Text) -> np.ndarray:
    """The first tokens of the validation part."""
    part = source.validation
    return part.read([0], 16)[0] if isinstance(part, data.TokenStream) else part[:16]


def write_sample(config: GPTConfig, params: Params, source: Text, args: Args) -> str:
    """The beginning of the validation part, and how the model goes on."""
    opening = opening_of(source)
    written = generate(
        config,
        params,
        [opening],
        args.sample_tokens,
        temperature=0.8,
        key=jax.random.key(args.seed),
        sliding=True,
        block=BLOCKS[args.block],
    )
    return source.tokenizer.decode(np.concatenate([opening, written.tokens[0]]))


def report_text(config: GPTConfig, result: FitResult, source: Text, args: Args) -> None:
    """Prints the validation loss and a sample."""
    loss = _last_validation(result)["val_loss"]
    bits = ""
    if source.characters_per_token is not None:
        bits = f", {loss / math.log(2) / source.characters_per_token:.4f} bits per character"
    say(f"\nvalidation loss {loss:.4f} nats per token{bits}")
    if args.sample_tokens:
        text = write_sample(config, result.params, source, args)
        opening = source.tokenizer.decode(opening_of(source))
        say(f"\nit writes, after {opening!r}:\n\n{text}")


def report_task(config: GPTConfig, result: FitResult, task: data.Task, block: BlockType) -> None:
    """Prints the validation loss beside the best possible one, and how many questions are answered right."""
    line = _last_validation(result)
    best = float(np.mean([task.best_loss(batch) for batch in task.validation_batches(64)]))
    say(
        f"\nvalidation loss {line['val_loss']:.4f} nats per token, the best possible on these sequences is {best:.4f}; "
        f"accuracy {line['accuracy']:.2%}"
    )
    if (exam := task.exam()) is not None:
        prompts, answers = exam
        right = exam_score(config, result.params, prompts, answers, block=block)
        say(f"{right} of {len(prompts)} questions answered exactly, by greedy generation")


def _last_validation(result: FitResult) -> Line:
    return next(line for line in reversed(result.metrics) if "val_loss" in line)


def draw_curve(folder: Path, name: str, lines: list[Line], optimum: float | None) -> str:
    """Draws the run; returns where, or what to install to have it drawn."""
    try:
        from flax_gpt.training.curves import run_figure

        figure = run_figure(lines, title=name, optimum=optimum)
    except ImportError:
        return "not drawn: pip install 'flax_gpt[plots]' to have it drawn"
    figure.savefig(folder / run.PLOT_FILE)
    return str(folder / run.PLOT_FILE)


def say(text: str, end: str = "\n") -> None:
    """Prints; a sample may hold characters that the terminal's encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), end=end, flush=True)
