"""What every experiment does alike: its command line, and the files it leaves behind."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure


def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with --out, the folder for figure and numbers, and --smoke, a setting small enough for the tests."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs") / name, help="folder for the figure and the numbers")
    parser.add_argument("--smoke", action="store_true", help="a small setting, to see that it runs")
    return parser


def save(out: Path, name: str, numbers: dict[str, Any], figure: Figure) -> None:
    """Writes NAME.json, with the versions it was made with, and NAME.png."""
    out.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "jax": jax.__version__, "machine": platform.machine()}
    text = json.dumps({**numbers, **versions}, indent=1, default=float)
    (out / f"{name}.json").write_text(text + "\n", "utf-8")
    figure.savefig(out / f"{name}.png", dpi=120)
    print(f"written: {out / name}.json and .png")
