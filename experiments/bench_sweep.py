"""How much faster are eight seeds trained as one program than one after the other?

    python experiments/bench_sweep.py

The small character model of the README (4 layers, 128 wide, context 64, batch 12) on the built-in text: `fit_many` with
eight seeds, on two virtual devices of the CPU, against eight calls of `fit`, in processes of their own, in turn. It
prints the medians of the rounds: the time of the steps alone, and that of everything, compilation included.

On two cores of an Intel Xeon at 2.0 GHz: 2.16 times as fast with compilation, 1.24 times in the steps alone, where each
core has half of the models to itself while a single run spreads every product over both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

WARM_UP = 10  # steps before the clock of the steps alone starts


def measure(contender: str, steps: int, seeds: list[int]) -> dict[str, float]:
    """Seconds of all the trainings: "steps", those after the first few, and "all"."""
    import jax

    devices = os.cpu_count() or 1 if contender == "fit_many" else 1
    jax.config.update("jax_num_cpu_devices", max(n for n in (1, 2, 4, 8) if n <= devices))
    from flax_gpt import GPTConfig, data, training
    from flax_gpt.cli import keep_freed_memory

    keep_freed_memory()
    text = data.stdlib_text()[:300_000]  # the validation at the end reads a tenth of it
    source = data.Corpus.of_text(text, data.CharTokenizer.of_text(text), 64)
    config = GPTConfig(source.vocab_size, 64, 128, 4, 4, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    train = training.TrainConfig(
        steps=WARM_UP + steps, warmup_steps=WARM_UP, log_every=WARM_UP, eval_every=10**6, eval_batches=1
    )

    def steps_alone(lines: list[dict[str, float]]) -> float:
        at = {line["step"]: line["seconds"] for line in lines if "train_loss" in line}
        return at[WARM_UP + steps] - at[WARM_UP]

    start = time.perf_counter()
    if contender == "fit_many":
        alone = steps_alone(training.fit_many(config, train, source, seed=seeds).metrics[0])
    else:
        alone = 0.0
        for seed in seeds:
            alone += steps_alone(training.fit(config, dataclasses.replace(train, seed=seed), source).metrics)
    return {"steps": alone, "all": time.perf_counter() - start}


def main() -> None:
    """Runs the two in turn and prints the ratios, and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps to time, a multiple of 10")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=8, help="how many")
    parser.add_argument("--contender", choices=("fit", "fit_many"), help="measure this one alone, in this process")
    args = parser.parse_args()
    if args.steps < WARM_UP or args.steps % WARM_UP:
        parser.error(f"--steps must be a multiple of {WARM_UP}, got {args.steps}")
    if args.contender:
        print(json.dumps(measure(args.contender, args.steps, list(range(args.seeds)))))
        return
    times: dict[str, list[dict[str, float]]] = {"fit": [], "fit_many": []}
    for _ in range(args.rounds):
        for contender, measured in times.items():
            command = [sys.executable, __file__, "--contender", contender, "--steps", str(args.steps)]
            command += ["--seeds", str(args.seeds)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            measured.append(json.loads(output.splitlines()[-1]))
    result: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for part, what in (("steps", "the steps alone"), ("all", "all, compilation included")):
        ours, theirs = (statistics.median(m[part] for m in times[name]) for name in ("fit_many", "fit"))
        result[part] = {"fit_many": ours, "fit": theirs}
        print(f"{what:28}fit_many {ours:7.1f} s   {args.seeds} times fit {theirs:7.1f} s   ratio {theirs / ours:.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
