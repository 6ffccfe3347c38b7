"""How fast is generation, beside Hugging Face's on the same machine in the same run?

    python experiments/bench_generate.py

gpt2's shapes with random weights, greedy, prompts of 32 tokens, 128 new ones, one prompt and eight. Hugging Face's
`generate` runs with its cache, in float32 and in bfloat16, ours in both too; they take turns. It prints the medians of
the rounds as milliseconds a step and tokens a second, the ratio of Hugging Face's better time to ours, and the share of
each step that reading all the weights once, in float32, would take at the bandwidth that this run measures. And the
time of a token late in a long text, beside that of an early one. Without transformers and PyTorch it times ours alone.

On two cores of an Intel Xeon at 2.0 GHz (jax 0.10.2, torch 2.13, transformers 5.25), milliseconds a step for one
prompt: 20.8 in float32, three quarters of it what reading the weights takes, beside Hugging Face's 43.0 and, in
bfloat16, 29.7 (1.43 times as fast as its better time); for eight: 41.3 beside 92.1 and 45.7 (1.11). bfloat16 is no gain
here: XLA has no fast product for it. A late token takes 1.33 times an early one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flax_gpt as fg
from flax_gpt.cli import keep_freed_memory
from flax_gpt.generation.decode import plan_generation
from flax_gpt.generation.generate import Decoder
from flax_gpt.generation.sampling import make_sampling

DTYPES = ("float32", "bfloat16")


def ours(config: fg.GPTConfig, prompts: np.ndarray, new: int, dtype: str) -> Callable[[], None]:
    """A function that generates and waits for it."""
    params = jax.tree.map(lambda x: x.astype(dtype), fg.init_params(config, jax.random.key(0)))

    return lambda: jax.block_until_ready(fg.generate(config, params, prompts.tolist(), new, temperature=0.0))


def hugging_face(config: fg.GPTConfig, prompts: np.ndarray, new: int, dtype: str) -> Callable[[], None]:
    """The same of Hugging Face's model."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config.to_dict())).to(getattr(torch, dtype)).eval()
    ids = torch.tensor(prompts)

    def run() -> None:
        with torch.no_grad():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new, max_new_tokens=new,
                use_cache=True, pad_token_id=0,
            )  # fmt: skip

    return run


def bandwidth() -> float:
    """Bytes a second at which this machine reads memory: the best of several products of a 256 MB matrix with a row."""
    matrix, row = jnp.ones((1 << 14, 1 << 12), jnp.float32), jnp.ones(1 << 12, jnp.float32)
    product = jax.jit(jnp.dot)
    run = lambda: jax.block_until_ready(product(matrix, row))  # noqa: E731
    run()
    return matrix.nbytes / min(seconds(run) for _ in range(10))


def seconds(run: Callable[[], None]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def late_over_early(config: fg.GPTConfig, rounds: int) -> float:
    """How much longer a token takes near the end of the context than after a twentieth of it, in one row."""
    n, new = config.n_positions, config.n_positions // 16
    params = fg.init_params(config, jax.random.key(0))
    sampling = make_sampling(1, config.vocab_size, 0.0)
    times = []
    for length in (n // 20, n - n // 8):
        of_rounds = []
        for _ in range(rounds + 1):  # the first compiles
            plan, inputs = plan_generation(config, [[0] * length], None, new, 1, (), False, None, fg.Block)
            decoder = Decoder(plan, params, inputs, sampling, jax.random.key(0))
            decoder.advance(1)
            jax.block_until_ready(decoder.state)

            def rest(decoder: Decoder = decoder) -> None:
                decoder.advance(new)
                jax.block_until_ready(decoder.state)

            of_rounds.append(seconds(rest))
        times.append(statistics.median(of_rounds[1:]))
    return times[1] / times[0]


def main() -> None:
    """Times the contenders in turn and prints a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2", help="whose shapes")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="time ours alone")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it runs")
    args = parser.parse_args()
    keep_freed_memory()
    changes: dict[str, Any] = {"n_layer": 2, "n_embd": 24, "vocab_size": 97, "n_positions": 192} if args.smoke else {}
    config = fg.GPTConfig.preset(args.preset, **changes)
    try:
        peers = [] if args.alone else [importlib.import_module("torch"), importlib.import_module("transformers")]
    except ImportError:
        peers = []

    floor = 4 * fg.count_params(config) / bandwidth()
    print(f"reading {args.preset}'s weights once, in float32: {1000 * floor:.1f} ms")
    result: dict[str, Any] = {"floor_ms": 1000 * floor, "steps_ms": {}}
    for batch in args.batch:
        prompts = np.random.default_rng(0).integers(config.vocab_size, size=(batch, args.prompt))
        contenders = {f"flax_gpt {dtype}": ours(config, prompts, args.new, dtype) for dtype in DTYPES}
        if peers:
            contenders |= {f"Hugging Face {dtype}": hugging_face(config, prompts, args.new, dtype) for dtype in DTYPES}
        for run in contenders.values():
            run()
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(args.rounds):
            for name, run in contenders.items():
                times[name].append(seconds(run))
        steps = {name: 1000 * statistics.median(values) / args.new for name, values in times.items()}
        result["steps_ms"][batch] = steps
        best = min((step for name, step in steps.items() if name.startswith("Hugging")), default=None)
        for name, step in steps.items():
            ratio = "" if best is None else f"   Hugging Face's best / this: {best / step:.2f}"
            print(
                f"batch {batch}   {name:24}{step:8.1f} ms a step{1000 * batch / step:9.1f} tokens/s   "
                f"floor / this: {1000 * floor / step:.2f}{ratio}"
            )
    result["late_over_early"] = late_over_early(config, args.rounds)
    print(f"a token late in the context / an early one: {result['late_over_early']:.2f}")
    versions = {"python": platform.python_version(), "jax": jax.__version__, "machine": platform.machine()}
    versions |= {peer.__name__: peer.__version__ for peer in peers}
    print(json.dumps({**result, **versions}))


if __name__ == "__main__":
    main()
