"""`flax-gpt eval`: how well a trained model predicts a text, or answers questions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flax_gpt.cli.train import say
from flax_gpt.data.corpus import read_text
from flax_gpt.evaluation import read_questions, score_questions, score_text
from flax_gpt.training.run import Run, load_run, parse_checkpoint


@dataclasses.dataclass(frozen=True)
class Args:
    """Measures a trained GPT on a text (--data) or on questions (--choices), neither of which it should have seen."""

    run: Annotated[Path, tyro.conf.Positional]
    """The folder of a run, or of GPT-2 weights, or a name on Hugging Face's hub."""
    data: Path | None = None
    """A UTF-8 text file, or a folder of them; for a run on a toy task, numbers with spaces between."""
    choices: Path | None = None
    """A file of JSON lines: HellaSwag's (ctx, endings, label), LAMBADA's (text), or prompt, choices, answer."""
    window: int | None = None
    """Tokens that the model sees at a time; by default as many as it can."""
    stride: int | None = None
    """Tokens from one window to the next; by default --window. Smaller: more context for each token, and more time."""
    batch_size: int = 8
    """Windows, or choices, at a time."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and matrix products."""
    tokens_limit: int | None = None
    """Score no more than the first so many tokens of the text."""
    checkpoint: str | None = None
    """latest, best, or a step; by default what the run ended with, or the latest of one that has not ended."""
    json: bool = False
    """Print one JSON object instead of a table."""
    quiet: bool = False
    """Show no progress."""


def main(arguments: Sequence[str]) -> int:
    """Reads the run and the data, prints the scores."""
    args = tyro.cli(Args, args=list(arguments), prog="flax-gpt eval")
    if (args.data is None) == (args.choices is None):
        raise ValueError("give one thing to evaluate on: --data with a text, or --choices with a file of questions")
    run = load_run(args.run, checkpoint=parse_checkpoint(args.checkpoint))
    if args.data is not None:
        scores = on_text(run, args, args.data)
    elif args.choices is not None:
        scores = on_questions(run, args, args.choices)
    if args.json:
        say(json.dumps(scores))
        return 0
    for name, value in scores.items():
        say(f"{name.replace('_', ' '):20}" + (f"{value:>14,}" if isinstance(value, int) else f"{value:>14.4f}"))
    if scores.get("truncated"):
        say("\nthe truncated questions were longer than the model's context and lost the beginning of theirs")
    return 0


def on_text(run: Run, args: Args, path: Path) -> dict[str, Any]:
    """Perplexity of a text, and what goes with it; losses and bits as `TextScore` has them."""
    if args.tokens_limit is not None and args.tokens_limit < 2:
        raise ValueError(f"--tokens-limit must be at least 2, got {args.tokens_limit}")
    with progress("tokens", args.quiet) as report:
        score = score_text(
            run.config,
            run.params,
            run.tokenizer,
            read_text(path),
            limit=args.tokens_limit,
            window=args.window,
            stride=args.stride,
            report=report,
            **forward_options(run, args),
        )
    names = ("loss", "perplexity", "bits_per_token", "bits_per_character", "bits_per_byte", "tokens")
    return {name: getattr(score, name) for name in names}


def on_questions(run: Run, args: Args, path: Path) -> dict[str, Any]:
    """The fields of `ChoiceScore` or `LastWordScore`."""
    for name in ("window", "stride", "tokens_limit"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} goes with --data: questions are scored whole")
    questions = read_questions(path)
    with progress("choices", args.quiet) as report:
        score = score_questions(
            run.config, run.params, run.tokenizer, questions, report=report, **forward_options(run, args)
        )
    return dataclasses.asdict(score)


def forward_options(run: Run, args: Args) -> dict[str, Any]:
    """What both kinds of evaluation take."""
    return {"batch_size": args.batch_size, "compute_dtype": args.compute_dtype, "block": run.block}


@contextlib.contextmanager
def progress(what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's standard error, and what to call with how many are done, of how many."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        bar = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)
