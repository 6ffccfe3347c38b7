"""`flax-gpt info`: what a model costs, before it is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from flax_gpt.accounting import count_flops, count_params, flops_by_part, memory_by_use, params_by_group
from flax_gpt.config import PRESETS, GPTConfig
from flax_gpt.training.run import CONFIG_FILE


@dataclasses.dataclass(frozen=True)
class Args:
    """Prints parameters, FLOPs and memory of a model; nothing is allocated."""

    model: Annotated[str, tyro.conf.Positional] = "gpt2"
    """gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a folder with a config.json."""
    t: int | None = None
    """Tokens in a sequence; by default as many as the model takes."""
    batch_size: int = 1
    """Sequences in a training step, for its memory."""
    n_layer: int | None = None
    """Another number of blocks."""
    n_head: int | None = None
    """Another number of heads."""
    n_embd: int | None = None
    """Another width."""
    n_positions: int | None = None
    """Another length of context."""
    vocab_size: int | None = None
    """Another vocabulary."""
    tie_word_embeddings: bool = True
    """Read the logits off the token embedding."""
    qkv_bias: bool = True
    """Give queries, keys and values a bias."""
    compute_dtype: str = "float32"
    """Of activations, for their memory."""


def main(arguments: Sequence[str]) -> int:
    """Prints the tables."""
    args = tyro.cli(Args, args=list(arguments), prog="flax-gpt info")
    fields = {field.name for field in dataclasses.fields(GPTConfig)}
    # Of the two switches only "no" is a change: "yes" is what they are at when nothing was said.
    changes = {
        name: value for name, value in vars(args).items() if name in fields and value is not None and value is not True
    }
    if args.model not in PRESETS and Path(args.model, CONFIG_FILE).is_file():
        config = dataclasses.replace(GPTConfig.from_json(Path(args.model, CONFIG_FILE)), **changes)
    else:
        config = GPTConfig.preset(args.model, **changes)
    if args.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {args.batch_size}")
    if args.compute_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--compute-dtype must be float32 or bfloat16, got {args.compute_dtype!r}")
    t = config.n_positions if args.t is None else args.t
    forward_flops = count_flops(config, t)

    sizes = f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, {config.n_positions} positions"
    console = Console(highlight=False)
    console.print(f"{args.model}: {sizes}, vocabulary {config.vocab_size:,}\n")
    console.print(_table("parameters", params_by_group(config), count_params(config)))
    flops = {**flops_by_part(config, t), "forward": forward_flops}
    console.print(_table(f"FLOPs, one sequence of {t}", flops, 3 * forward_flops, "forward + backward"))
    memory = memory_by_use(config, args.batch_size, t, compute_dtype=args.compute_dtype)
    console.print(
        _table(f"bytes in training, AdamW, batch {args.batch_size} x {t}", memory, sum(memory.values()), "about")
    )
    return 0


def _table(title: str, rows: dict[str, int], total: int, total_name: str = "total") -> Table:
    table = Table(title=title, title_justify="left", show_header=False, min_width=44)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, f"{value:,}")
    table.add_section()
    table.add_row(total_name, f"{total:,}")
    return table
