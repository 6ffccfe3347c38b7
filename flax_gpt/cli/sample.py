"""`flax-gpt sample`: text from a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

from flax_gpt.cli.train import say
from flax_gpt.generate import generate
from flax_gpt.training.run import load_run, parse_checkpoint


@dataclasses.dataclass(frozen=True)
class Args:
    """Writes text with a trained GPT: the prompt and what it makes of it."""

    run: Annotated[Path, tyro.conf.Positional]
    """The folder of a run."""
    prompt: Annotated[str, tyro.conf.Positional] = "\n"
    """What to continue; for a run on a toy task, numbers with spaces between. By default a line break."""
    max_new_tokens: int = 300
    """How many tokens to write; beyond the model's context, it goes on seeing the last ones."""
    num_samples: int = 1
    """How many continuations to write."""
    temperature: float = 0.8
    """Below 1 is surer, above 1 wilder; 0 always takes the most likely token."""
    top_k: int | None = None
    """Draw from so many most likely tokens only."""
    top_p: float | None = None
    """Draw from the most likely tokens that have this probability together."""
    seed: int = 0
    """Of the draws."""
    checkpoint: str | None = None
    """latest, best, or a step; by default what the run ended with, or the latest of one that has not ended."""


def main(arguments: Sequence[str]) -> int:
    """Reads the run, writes the samples."""
    args = tyro.cli(Args, args=list(arguments), prog="flax-gpt sample")
    if args.num_samples < 1:
        raise ValueError(f"--num-samples must be at least 1, got {args.num_samples}")
    run = load_run(args.run, checkpoint=parse_checkpoint(args.checkpoint))
    prompt = run.tokenizer.encode(args.prompt)
    if len(prompt) == 0:
        raise ValueError("the prompt is empty; give at least one token to continue")
    written = generate(
        run.config,
        run.params,
        [prompt] * args.num_samples,
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        key=jax.random.key(args.seed),
        sliding=True,
        block=run.block,
    )
    for index, tokens in enumerate(np.asarray(written.tokens)):
        if args.num_samples > 1:
            say(f"--- {index + 1} of {args.num_samples}")
        say(run.tokenizer.decode(np.concatenate([prompt, tokens])))
    return 0
