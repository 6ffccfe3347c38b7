"""Patching every head of GPT-2: one compiled program beside TransformerLens, one run of the model a head.

    python experiments/bench_patching.py --peer-python VENV_WITH_TRANSFORMER_LENS/bin/python

gpt2's shapes, random weights, 16 tokens: each of the 144 heads' output is put from one prompt into the other, and the
difference of two logits after the last token is read, by `interp.patch_sweep` and by TransformerLens' own
`get_act_patch_attn_head_out_all_pos`. They take turns in processes of their own. It prints the medians, the ratio with
and without the time of compiling, and how far the two results are apart. `--peer-python` is the Python of an
environment with `transformer-lens<4`; by default the one that runs this. Without it ours is timed alone.

On two cores of an Intel Xeon at 2.0 GHz (jax 0.10.2, torch 2.13): 1.50 s beside TransformerLens' 36.5, 24.3 times as
fast, and 8.2 times with 3 s of compilation; the results differ by 1.8e-6. Of the 1.43 s that a profile shows, 1.18 are
matrix products, at 185 GFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ANSWER, OTHER = 17, 23  # whose logits are compared
SMOKE = {"n_layer": 2, "n_head": 3, "n_embd": 24, "vocab_size": 97, "n_positions": 32}


def ours(folder: Path) -> Callable[[], np.ndarray]:
    """A sweep that waits for its result."""
    from flax_gpt import interp, load_pretrained
    from flax_gpt.cli import keep_freed_memory

    keep_freed_memory()
    config, params = load_pretrained(folder)
    prompts = np.load(folder / "prompts.npy")

    def difference(logits: Any) -> Any:
        return logits[0, ANSWER] - logits[0, OTHER]

    return lambda: np.asarray(
        interp.patch_sweep(config, params, prompts[:1], prompts[1:], difference, at=-1, max_bytes=2**28)
    )


def transformer_lens(folder: Path) -> Callable[[], np.ndarray]:
    """The same by TransformerLens."""
    import torch
    from safetensors.numpy import load_file
    from transformer_lens import HookedTransformer, HookedTransformerConfig, patching

    entries = json.loads((folder / "config.json").read_text("utf-8"))
    n_layer, h, d = (entries[name] for name in ("n_layer", "n_head", "n_embd"))
    model = HookedTransformer(
        HookedTransformerConfig(
            n_layers=n_layer, d_model=d, n_ctx=entries["n_positions"], d_head=d // h, n_heads=h, d_mlp=4 * d,
            d_vocab=entries["vocab_size"], act_fn="gelu_new", normalization_type="LN",
            eps=entries["layer_norm_epsilon"], device="cpu",
        )
    )  # fmt: skip
    theirs = {name.removeprefix("transformer."): x for name, x in load_file(folder / "model.safetensors").items()}
    state = {
        "embed.W_E": theirs["wte.weight"],
        "pos_embed.W_pos": theirs["wpe.weight"],
        "unembed.W_U": theirs["wte.weight"].T,
        "unembed.b_U": np.zeros(entries["vocab_size"], np.float32),
        "ln_final.w": theirs["ln_f.weight"],
        "ln_final.b": theirs["ln_f.bias"],
    }
    for i in range(n_layer):
        block = f"blocks.{i}."
        kernels = np.split(theirs[f"h.{i}.attn.c_attn.weight"], 3, axis=1)
        biases = np.split(theirs[f"h.{i}.attn.c_attn.bias"], 3)
        for name, kernel, bias in zip("QKV", kernels, biases, strict=True):
            state[f"{block}attn.W_{name}"] = kernel.reshape(d, h, -1).transpose(1, 0, 2)
            state[f"{block}attn.b_{name}"] = bias.reshape(h, -1)
        state[block + "attn.W_O"] = theirs[f"h.{i}.attn.c_proj.weight"].reshape(h, -1, d)
        state[block + "attn.b_O"] = theirs[f"h.{i}.attn.c_proj.bias"]
        state[block + "mlp.W_in"] = theirs[f"h.{i}.mlp.c_fc.weight"]
        state[block + "mlp.b_in"] = theirs[f"h.{i}.mlp.c_fc.bias"]
        state[block + "mlp.W_out"] = theirs[f"h.{i}.mlp.c_proj.weight"]
        state[block + "mlp.b_out"] = theirs[f"h.{i}.mlp.c_proj.bias"]
        for ours_, name in (("ln1", "ln_1"), ("ln2", "ln_2")):
            state[f"{block}{ours_}.w"] = theirs[f"h.{i}.{name}.weight"]
            state[f"{block}{ours_}.b"] = theirs[f"h.{i}.{name}.bias"]
    tensors = {name: torch.tensor(np.ascontiguousarray(x)) for name, x in state.items()}
    _, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    prompts = torch.tensor(np.load(folder / "prompts.npy"))

    def difference(logits: Any) -> Any:
        return logits[0, -1, ANSWER] - logits[0, -1, OTHER]

    def sweep() -> np.ndarray:
        with torch.no_grad():
            _, cache = model.run_with_cache(prompts[1:])
            return patching.get_act_patch_attn_head_out_all_pos(model, prompts[:1], cache, difference).numpy()

    return sweep


CONTENDERS = {"flax_gpt": ours, "TransformerLens": transformer_lens}


def serve(contender: str, folder: Path) -> None:
    """Runs the sweep once for each line of input, and answers with its seconds; the results go to a file."""
    run = CONTENDERS[contender](folder)
    for _ in sys.stdin:
        start = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
        np.save(folder / f"{contender}.npy", result)
        print(f"seconds {seconds}", flush=True)


class Contender:
    """One of them in its own process."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        command = [python, __file__, "--serve", name, "--folder", str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def __call__(self) -> float:
        """Seconds of one sweep."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"a contender ended with status {self.process.wait()}: {self.process.args}")

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def prepare(folder: Path, smoke: bool) -> None:
    """Writes weights and prompts that both read."""
    import jax

    import flax_gpt as fg

    config = fg.GPTConfig.preset("gpt2", **(SMOKE if smoke else {}))
    fg.save_pretrained(folder, config, fg.init_params(config, jax.random.key(0)))
    prompts = np.random.default_rng(0).integers(config.vocab_size, size=(2, 16))
    np.save(folder / "prompts.npy", prompts)


def main(argv: list[str] | None = None) -> None:
    """Lets the two take turns, and prints a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, help="the Python that has TransformerLens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--serve", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve(args.serve, args.folder)
        return
    has_peer = not subprocess.run(
        [args.peer_python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('transformer_lens') is None)"],
        check=False,
    ).returncode
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder, args.smoke)
        pythons = {"flax_gpt": sys.executable} | ({"TransformerLens": args.peer_python} if has_peer else {})
        contenders = {name: Contender(name, python, folder) for name, python in pythons.items()}
        first = {name: run() for name, run in contenders.items()}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(args.rounds):
            for name, run in contenders.items():
                times[name].append(run())
        medians = {name: statistics.median(values) for name, values in times.items()}
        apart = None
        if has_peer:
            found, theirs = (np.load(folder / f"{name}.npy") for name in contenders)
            apart = float(np.abs(found - theirs).max())
        for contender in contenders.values():
            contender.close()
    for name in contenders:
        print(f"{name:16} first {first[name]:7.2f} s   then {medians[name]:7.2f} s")
    result: dict[str, Any] = {"first_seconds": first, "seconds": medians, "largest_difference": apart}
    if has_peer:
        theirs_then = medians["TransformerLens"]
        result["ratio"] = theirs_then / medians["flax_gpt"]
        result["ratio_with_compilation"] = theirs_then / first["flax_gpt"]
        print(
            f"TransformerLens / flax_gpt: {result['ratio']:.1f}, compilation included "
            f"{result['ratio_with_compilation']:.1f}; largest difference {apart:.1e}"
        )
    print(json.dumps({**result, "python": platform.python_version(), "machine": platform.machine()}))


if __name__ == "__main__":
    main()
