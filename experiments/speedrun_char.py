"""How soon does a small character model reach the loss that nanoGPT's recipe for a CPU ends at?

    python experiments/speedrun_char.py --data tinyshakespeare.txt --nanogpt PATH_TO_A_CHECKOUT

nanoGPT's setting for a CPU: 4 layers, 4 heads, 128 wide, no dropout, context 64, on tinyshakespeare by characters, the
first nine tenths to train on. nanoGPT trains its model for 2000 steps of 12 sequences by AdamW; ours has the same
sizes. All validate with one measure, the mean loss over the whole validation part as windows side by side. They take
turns, a tenth of each one's steps at a time, so that a busy machine is busy for all; each one's clock runs while it
sets up, compiles and trains, and stands while it is validated.

It prints when each first reached the loss that nanoGPT ended at, and writes speedrun.json and speedrun.png. Without
--nanogpt (or PyTorch) only ours run, and the loss to reach is nanoGPT's of an earlier run, 1.89.

On two cores of an Intel Xeon at 2.0 GHz nanoGPT ended at 1.897. AdamW with its settings comes to the same loss in the
same time (1.896); at four times the rate and half the steps it does not reach it (1.932). Muon is what makes the
difference: 450 steps, each half as long again as AdamW's, end at 1.876, and reach the loss after 0.45 of nanoGPT's time
with compilation included, which is a sixth of it. The rate was the best of 0.004, 0.008, 0.016 and 0.032.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import flax_gpt as fg
from flax_gpt import data, training
from flax_gpt.cli import keep_freed_memory
from flax_gpt.data.prefetch import prefetch

LAYERS, HEADS, WIDTH, LENGTH, BATCH = 4, 4, 128, 64, 12
TURNS = 10
KNOWN_TARGET = 1.89

# What nanoGPT does, and then one change at a time.
RECIPES = {
    "AdamW, as nanoGPT": training.TrainConfig(steps=2000, batch_size=BATCH, lr=1e-3, min_lr=1e-4),
    "AdamW, higher rate, linear to 0": training.TrainConfig(
        steps=1000, batch_size=BATCH, lr=4e-3, min_lr=0.0, schedule="linear"
    ),
    "Muon, linear to 0": training.TrainConfig(
        steps=450, batch_size=BATCH, lr=1.6e-2, min_lr=0.0, schedule="linear", optimizer="muon", warmup_steps=10
    ),
}


class Ours:
    """A training of this package."""

    def __init__(self, corpus: data.Corpus, train: training.TrainConfig) -> None:
        self.corpus, self.train = corpus, train
        self.config = fg.GPTConfig(
            corpus.vocab_size, LENGTH, WIDTH, LAYERS, HEADS, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0
        )
        optimizer = training.make_optimizer(train)
        self.state = training.init_state(fg.init_params(self.config, jax.random.key(train.seed)), optimizer)
        self.step = training.make_train_step(self.config, optimizer, **train.step_options)

    def advance(self, first: int, last: int) -> None:
        """Does some of its steps."""
        batches = prefetch(
            lambda step: self.corpus.training_batch(self.train.seed, step, self.train.batch_size), range(first, last)
        )
        with contextlib.closing(batches):
            for batch in batches:
                self.state, _ = self.step(self.state, batch)
        jax.block_until_ready(self.state)

    def validate(self) -> float:
        """The loss over the whole validation part."""
        return training.evaluate(self.config, self.state.params, self.corpus.validation_batches(64))["loss"]


class NanoGPT:
    """nanoGPT's model, optimizer, clipping and schedule, as its train.py runs them with the settings for a CPU."""

    def __init__(self, corpus: data.Corpus, path: str) -> None:
        sys.path.insert(0, path)
        self.torch = importlib.import_module("torch")
        model = importlib.import_module("model")
        self.torch.manual_seed(1337)
        self.corpus = corpus
        config = model.GPTConfig(LENGTH, corpus.vocab_size, LAYERS, HEADS, WIDTH, dropout=0.0, bias=False)
        self.model = model.GPT(config)
        self.optimizer = self.model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")

    def advance(self, first: int, last: int) -> None:
        """Does some of its steps."""
        torch = self.torch
        for step in range(first, last):
            decay = 0.5 * (1 + math.cos(math.pi * (step - 100) / 1900))
            rate = 1e-3 * (step + 1) / 101 if step < 100 else 1e-4 + 9e-4 * decay
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            batch = self.corpus.training_batch(1337, step, BATCH)
            tokens, targets = (torch.from_numpy(x.astype(np.int64)) for x in (batch.tokens, batch.targets))
            _, loss = self.model(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def validate(self) -> float:
        """The same measure of its model."""
        torch, total, count = self.torch, 0.0, 0.0
        with torch.no_grad():
            for batch in self.corpus.validation_batches(64):
                tokens, targets = (torch.from_numpy(x.astype(np.int64)) for x in (batch.tokens, batch.targets))
                logits, _ = self.model(tokens, targets)
                losses = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), reduction="none"
                ).numpy()
                scored = batch.scored.reshape(-1)
                total, count = total + float(losses[scored].sum()), count + scored.sum()
        return total / count


@contextlib.contextmanager
def on_the_clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Adds the time that passes to a contender's."""
    start = time.perf_counter()
    yield
    seconds[name] += time.perf_counter() - start


def main() -> None:
    """Lets the contenders take turns, and prints and writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the text; by default the source of Python's standard library")
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT")
    parser.add_argument("--out", type=Path, default=Path("runs/speedrun_char"))
    parser.add_argument("--recipes", nargs="*", choices=list(RECIPES), default=list(RECIPES), help="of ours")
    parser.add_argument("--smoke", action="store_true", help="few steps on a short text, to see that it runs")
    args = parser.parse_args()
    keep_freed_memory()
    text = data.read_text(args.data) if args.data else data.stdlib_text()
    text = text[:100_000] if args.smoke else text
    corpus = data.Corpus.of_text(text, data.CharTokenizer.of_text(text), LENGTH)

    seconds = dict.fromkeys([*(["nanoGPT"] if args.nanogpt else []), *args.recipes], 0.0)
    contenders: dict[str, Ours | NanoGPT] = {}
    for name in seconds:
        with on_the_clock(seconds, name):
            contenders[name] = NanoGPT(corpus, args.nanogpt) if name == "nanoGPT" else Ours(corpus, RECIPES[name])
    steps = {name: 2000 if name == "nanoGPT" else RECIPES[name].steps for name in seconds}
    if args.smoke:
        steps = {name: max(number // 100, TURNS) for name, number in steps.items()}
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in seconds}
    for turn in range(TURNS):
        for name, contender in contenders.items():
            first, last = (steps[name] * (turn + more) // TURNS for more in (0, 1))
            with on_the_clock(seconds, name):
                contender.advance(first, last)
            lines[name].append({"step": last, "val_loss": contender.validate(), "seconds": seconds[name]})

    target = lines["nanoGPT"][-1]["val_loss"] if args.nanogpt else KNOWN_TARGET
    theirs = seconds.get("nanoGPT")
    print(f"the loss to reach: {target:.4f}")
    for name, of_contender in lines.items():
        reached = next((line for line in of_contender if line["val_loss"] <= target), None)
        end = f"ended at {of_contender[-1]['val_loss']:.4f} after {steps[name]} steps, {seconds[name]:.1f} s"
        when = (
            "did not reach it"
            if reached is None
            else f"reached it by step {reached['step']}, {reached['seconds']:.1f} s"
        )
        share = "" if reached is None or theirs is None else f", {reached['seconds'] / theirs:.2f} of nanoGPT's time"
        print(f"{name:34}{end}; {when}{share}")
    args.out.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "jax": jax.__version__, "machine": platform.machine()}
    (args.out / "speedrun.json").write_text(json.dumps({"target": target, "lines": lines, **versions}, indent=1) + "\n")
    with contextlib.suppress(ImportError):
        from flax_gpt.training.curves import compare_figure

        compare_figure(lines, "the loss nanoGPT ends at, sooner").savefig(args.out / "speedrun.png")


if __name__ == "__main__":
    main()
