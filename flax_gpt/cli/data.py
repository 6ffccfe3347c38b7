"""`flax-gpt data`: from texts to token shards that `flax-gpt train --data` reads."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from flax_gpt.data.bpe import GPT2Tokenizer
from flax_gpt.data.prepare import prepare
from flax_gpt.data.tokenizer import ByteTokenizer, Tokenizer


@dataclasses.dataclass(frozen=True)
class Args:
    """Turns texts into token shards, of any size in little memory; started again after a crash, it goes on."""

    inputs: Annotated[list[Path], tyro.conf.Positional]
    """Text files (each a document), .jsonl files (each line a document), and folders of them."""
    out: Path
    """The folder to write to."""
    tokenizer: Literal["char", "byte", "gpt2"] = "gpt2"
    """What a token is: a character that occurs, a byte, or one of GPT-2's 50257."""
    merges: Path | None = None
    """GPT-2's vocab.bpe or merges.txt, or a folder with it; by default it is looked for."""
    field: str = "text"
    """Of the objects in .jsonl files, the one with the text."""
    validation: tuple[Path, ...] = ()
    """Files and folders to validate with, instead of a part of the inputs."""
    validation_fraction: float = 0.1
    """Of a single text its last part, of many documents one in every 1 / fraction."""
    shard_tokens: int = 100_000_000
    """Tokens in a file."""
    workers: int | None = None
    """Threads; by default one a processor, at most 8."""
    quiet: bool = False
    """Show no progress."""


def main(arguments: Sequence[str]) -> int:
    """Prepares, and says what was written."""
    args = tyro.cli(Args, args=list(arguments), prog="flax-gpt data")
    if args.merges is not None and args.tokenizer != "gpt2":
        raise ValueError(f"--merges is for --tokenizer gpt2, got --tokenizer {args.tokenizer}")
    tokenizer: Tokenizer | None = None
    if args.tokenizer == "byte":
        tokenizer = ByteTokenizer()
    elif args.tokenizer == "gpt2":
        tokenizer = GPT2Tokenizer() if args.merges is None else GPT2Tokenizer.of_file(args.merges)
    console = Console(quiet=args.quiet)
    progress = Progress(
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    start = time.perf_counter()
    reads: list[int] = []

    def report(read: int, total: int) -> None:
        reads.append(read)
        progress.update(bar, completed=read, total=total)

    with progress:
        bar = progress.add_task("", total=None)
        try:
            written = prepare(
                args.inputs,
                args.out,
                tokenizer,
                validation=args.validation,
                validation_fraction=args.validation_fraction,
                field=args.field,
                shard_tokens=args.shard_tokens,
                workers=args.workers,
                report=report,
            )
        except KeyboardInterrupt:
            print(f"\nthe same command goes on with what is in {args.out}", file=sys.stderr)
            raise
    # A run that goes on after a crash reads the rest alone.
    rate = (reads[-1] - reads[0]) / (time.perf_counter() - start) if reads else 0.0
    print(describe(written, args.out, rate))
    return 0


def describe(written: dict[str, Any], folder: Path, rate: float) -> str:
    """What was written, a line a part; `rate` is in bytes a second."""
    lines = []
    for split, shards in written["splits"].items():
        tokens, documents, characters, size = (
            sum(shard[name] for shard in shards) for name in ("tokens", "documents", "characters", "bytes")
        )
        lines.append(
            f"{split:12}{tokens:,} tokens, {documents:,} documents, {characters / tokens:.3f} characters and "
            f"{size / tokens:.3f} bytes per token, {len(shards)} shards"
        )
    size = sum(shard["bytes"] for shards in written["splits"].values() for shard in shards)
    text = f"{size / 1e6:,.1f} MB of text, {rate / 1e6:,.1f} MB a second"
    lines.append(f"{text}, a vocabulary of {written['vocab_size']:,}")
    lines.append(f"\ntrain on it  flax-gpt train --data {folder}")
    return "\n".join(lines)
