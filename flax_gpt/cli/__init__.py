"""The command line: `flax-gpt data | train | sample | eval | plot | convert | info`."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

# A command's module is imported when it is asked for, and has a `main(arguments)`.
COMMANDS = {
    "data": "turn texts into token shards to train on",
    "train": "train a GPT on a text or a toy task",
    "sample": "write text with a trained one",
    "eval": "perplexity of a text, or questions answered, by a trained one",
    "plot": "draw the metrics of runs",
    "convert": "write one, GPT-2 weights or nanoGPT's, for Hugging Face",
    "info": "parameters, FLOPs and memory of a model",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 for an error, 2 for a wrong call, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] not in COMMANDS:
        asked_for_help = bool(arguments) and arguments[0] in ("-h", "--help")
        if arguments and not asked_for_help:
            print(f"flax-gpt: unknown command {arguments[0]!r}", file=sys.stderr)
        print(usage(), file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else 2
    keep_freed_memory()
    keep_compiled_programs()
    try:
        return importlib.import_module(f"flax_gpt.cli.{arguments[0]}").main(arguments[1:])
    except BrokenPipeError:  # the reader, `head` say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, FloatingPointError, ImportError) as error:
        print(f"flax-gpt {arguments[0]}: error: {error}", file=sys.stderr)
        return 1


def usage() -> str:
    """What `flax-gpt --help` prints."""
    lines = [f"  {name:8}{what}" for name, what in COMMANDS.items()]
    return "\n".join(
        ["usage: flax-gpt COMMAND ...", "", *lines, "", "flax-gpt COMMAND --help explains a command's options."]
    )


def keep_compiled_programs() -> None:
    """Has JAX keep compiled programs on disk, so that the same command starts faster the next time.

    They go to $XDG_CACHE_HOME/flax_gpt (or ~/.cache/flax_gpt), unless JAX_COMPILATION_CACHE_DIR names another place.
    """
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "flax_gpt")
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def keep_freed_memory() -> None:
    """Has glibc keep what is freed instead of returning it to the kernel (elsewhere it does nothing).

    XLA on CPU allocates a step's buffers anew each time; having them mapped and zeroed again took a third of a training
    step (4 layers, 128 wide: 137 ms against 95).
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(m_mmap_threshold, 1 << 30)
    mallopt(m_trim_threshold, (1 << 31) - 1)
