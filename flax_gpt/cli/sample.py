"""`flax-gpt sample`: text from a run, or from GPT-2's weights."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

from flax_gpt.cli.train import say
from flax_gpt.data.bpe import GPT2Tokenizer
from flax_gpt.generation import TextPieces, generate, stream
from flax_gpt.training.run import Run, load_run, parse_checkpoint


@dataclasses.dataclass(frozen=True)
class Args:
    """Writes text with a trained GPT: the prompt and what it makes of it, as it is written."""

    run: Annotated[Path, tyro.conf.Positional]
    """The folder of a run, or of GPT-2 weights, or their name on the Hugging Face hub, such as gpt2."""
    prompt: Annotated[str, tyro.conf.Positional] = "\n"
    """What to continue; for a run on a toy task, numbers with spaces between. By default a line break."""
    prompts: Path | None = None
    """A file with a prompt a line, to continue them all instead."""
    max_new_tokens: int = 300
    """How many tokens to write; beyond the model's context, it goes on seeing the last ones."""
    num_samples: int = 1
    """How many continuations to write of each prompt."""
    temperature: float = 0.8
    """Below 1 is surer, above 1 wilder; 0 always takes the most likely token."""
    top_k: int | None = None
    """Draw from so many most likely tokens only."""
    top_p: float | None = None
    """Draw from the most likely tokens that have this probability together."""
    min_p: float | None = None
    """Draw from the tokens that are at least this share as likely as the likeliest."""
    repetition_penalty: float | None = None
    """Above 1 makes tokens that were there before less likely."""
    stop: tuple[str, ...] = ()
    """Texts to stop at, such as a line break. GPT-2's end of text always stops."""
    seed: int = 0
    """Of the draws."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Of activations and matrix products; by default the weights'."""
    checkpoint: str | None = None
    """latest, best, or a step; by default what the run ended with, or the latest of one that has not ended."""
    json: bool = False
    """Print one JSON object a continuation: prompt, text, tokens, log_probs."""
    quiet: bool = False
    """Do not say at the end how fast it was."""


def main(arguments: Sequence[str]) -> int:
    """Reads the run, writes the samples."""
    args = tyro.cli(Args, args=list(arguments), prog="flax-gpt sample")
    if args.num_samples < 1:
        raise ValueError(f"--num-samples must be at least 1, got {args.num_samples}")
    texts = read_prompts(args.prompts) if args.prompts else [args.prompt]
    run = load_run(args.run, checkpoint=parse_checkpoint(args.checkpoint))
    prompts = [run.tokenizer.encode(text) for text in texts]
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("the prompt is empty; give at least one token to continue")
    options: dict[str, Any] = {
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "key": jax.random.key(args.seed),
        "stop_ids": (run.tokenizer.end_of_text,) if isinstance(run.tokenizer, GPT2Tokenizer) else (),
        "stop_strings": args.stop,
        "sliding": True,
        "compute_dtype": args.compute_dtype,
        "block": run.block,
    }
    if len(texts) * args.num_samples == 1 and not args.json:
        write_as_it_comes(run, texts[0], prompts[0], args, options)
    else:
        write_all(run, texts, prompts, args, options)
    return 0


def read_prompts(path: Path) -> list[str]:
    """The lines of a file, but the empty ones."""
    lines = [line for line in path.read_text("utf-8").splitlines() if line]
    if not lines:
        raise ValueError(f"{path} holds no prompt; write one on each line")
    return lines


def write_as_it_comes(run: Run, text: str, prompt: np.ndarray, args: Args, options: dict[str, Any]) -> None:
    """One continuation, piece by piece."""
    pieces = stream(run.config, run.params, prompt, run.tokenizer, args.max_new_tokens, **options)
    say(text, end="")
    first = None  # when the first piece came: until then it compiled
    for piece in pieces:
        say(piece, end="")
        first = first or (time.perf_counter(), len(pieces.tokens))
    say("")
    if first is not None and not args.quiet:
        report(len(pieces.tokens) - first[1], time.perf_counter() - first[0], " after the first")


def write_all(run: Run, texts: list[str], prompts: list[np.ndarray], args: Args, options: dict[str, Any]) -> None:
    """All continuations of all prompts, at once."""
    start = time.perf_counter()
    written = generate(
        run.config,
        run.params,
        prompts,
        args.max_new_tokens,
        num_samples=args.num_samples,
        tokenizer=run.tokenizer,
        **options,
    )
    tokens, lengths, log_probs = map(np.asarray, written)
    seconds = time.perf_counter() - start
    for row, (ids, n) in enumerate(zip(tokens, lengths, strict=True)):
        which, sample = divmod(row, args.num_samples)
        text = text_of(run, prompts[which], ids[:n].tolist(), options)
        if args.json:
            entry = {"prompt": texts[which], "text": text, "tokens": ids[:n].tolist()}
            say(json.dumps({**entry, "log_probs": [round(float(x), 6) for x in log_probs[row, :n]]}))
            continue
        if len(tokens) > 1:
            name = f"prompt {which + 1}, " if len(texts) > 1 else ""
            say(f"--- {name}{sample + 1} of {args.num_samples}")
        say(texts[which] + text)
    if not args.quiet:
        report(int(lengths.sum()), seconds, ", compilation included")


def text_of(run: Run, prompt: np.ndarray, ids: list[int], options: dict[str, Any]) -> str:
    """The text that ids add to a prompt, up to where it was to stop."""
    pieces = TextPieces(run.tokenizer, prompt, options["stop_strings"])
    text = "".join(pieces.feed(i) for i in ids if i not in options["stop_ids"] and not pieces.ended)
    return text if pieces.ended else text + pieces.flush()


def report(tokens: int, seconds: float, what: str) -> None:
    """How fast it was, where it does not disturb the text."""
    print(f"{tokens} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):.1f} a second{what}", file=sys.stderr)
