"""How long does a training step take, beside nanoGPT's on the same machine in the same run?

    python experiments/bench_train_step.py --nanogpt PATH_TO_A_CHECKOUT

Forward, backward, clipping and AdamW on random tokens, for nanoGPT's setting of a small character model on a CPU
(4 layers, 4 heads, 128 wide, context 64, batch 12). The two are timed in turn, ours and theirs, and the medians of the
rounds are printed with their ratio: above 1, ours is faster. Without --nanogpt (or PyTorch) it times ours alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable

import jax
import numpy as np

import flax_gpt as fg
from flax_gpt import data, training
from flax_gpt.cli import keep_freed_memory

LAYERS, HEADS, WIDTH, VOCABULARY, LENGTH, BATCH = 4, 4, 128, 65, 64, 12


def our_step(compute_dtype: str) -> Callable[[], None]:
    """A function that does one update and waits for it."""
    config = fg.GPTConfig(VOCABULARY, LENGTH, WIDTH, LAYERS, HEADS, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    optimizer = training.make_optimizer(training.TrainConfig())
    step = training.make_train_step(config, optimizer, compute_dtype=compute_dtype)
    state = training.init_state(fg.init_params(config, jax.random.key(0)), optimizer)
    x = np.random.default_rng(0).integers(VOCABULARY, size=(BATCH, LENGTH + 1))
    batch = data.Batch(x[:, :-1], x[:, 1:], np.ones((BATCH, LENGTH), bool))

    def run() -> None:
        nonlocal state
        state, _ = step(state, batch)
        jax.block_until_ready(state)

    return run


def nanogpt_step(path: str) -> Callable[[], None]:
    """The same of nanoGPT's model, optimizer and clipping, in eager float32."""
    sys.path.insert(0, path)
    torch = importlib.import_module("torch")
    nanogpt = importlib.import_module("model")
    config = nanogpt.GPTConfig(LENGTH, VOCABULARY, LAYERS, HEADS, WIDTH, dropout=0.0, bias=False)
    model = nanogpt.GPT(config)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    x = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))

    def run() -> None:
        _, loss = model(x[:, :-1], x[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def main() -> None:
    """Times the contenders in turn and prints a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="steps in a round")
    args = parser.parse_args()
    keep_freed_memory()

    contenders = {f"flax_gpt {dtype}": our_step(dtype) for dtype in ("float32", "bfloat16")}
    if args.nanogpt:
        contenders["nanoGPT float32"] = nanogpt_step(args.nanogpt)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        for _ in range(3):
            run()
    for _ in range(args.rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            for _ in range(args.steps):
                run()
            times[name].append(1000 * (time.perf_counter() - start) / args.steps)

    medians = {name: statistics.median(values) for name, values in times.items()}
    peer = medians.get("nanoGPT float32")
    for name, median in medians.items():
        low, *_, high = statistics.quantiles(times[name], n=10)
        ratio = "" if peer is None else f"   nanoGPT / this: {peer / median:.2f}"
        print(f"{name:20}{median:8.1f} ms a step (10% to 90%: {low:.1f} to {high:.1f}){ratio}")
    versions = {"python": platform.python_version(), "jax": jax.__version__, "machine": platform.machine()}
    print(json.dumps({"milliseconds": medians, **versions}))


if __name__ == "__main__":
    main()
